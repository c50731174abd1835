"""Where the order of a key holds, and where it does not: a law for each row of the table in docs/guarantees-order.md.

A reader sees a record "in order" if none of its key that was put later was seen before. In the rows that promise no
order, a test shows that it does get lost, so that the page promises neither too much nor too little.
"""

from collections.abc import Callable
from typing import Any

import anyio
import pytest

from kpl_core import BreakerPolicy, Config, FairnessPolicy, Producer, TierPolicy
from kpl_core.hooks import BreakerChanged
from kpl_core.testing import RecordingHook, SplitDuringRequest
from tests.support.key_order import PER_KEY, Unreliable, are_in_order, scene, seen
from tests.support.producer_scene import STREAM, producer

pytestmark = pytest.mark.anyio

COUNT = 100
KEYS = ("a", "b")


async def run(
    seed: int,
    terms: Callable[[int], dict[str, Any]] = lambda _: {},
    at: Callable[[int, Unreliable], object] = lambda _number, _transport: None,
    **options: Any,
) -> dict[str, list[int]]:
    """Put records of two keys, with the `terms` of each; call `at` before each. Return what a reader sees."""
    transport = Unreliable(seed)
    async with producer(transport, **scene(**options)) as orders:
        for number in range(COUNT):
            at(number, transport)
            for key in KEYS:
                _ = await orders.put(STREAM, partition_key=key, data=b"%d" % number, **terms(number))
            if number % 3 == 0:
                await anyio.sleep(0.01)
        report = await orders.flush()
    assert report.delivered == report.accepted == COUNT * len(KEYS)
    found = seen(transport)
    assert {key: sorted(numbers) for key, numbers in found.items()} == {key: list(range(COUNT)) for key in KEYS}
    return found


def split_twice(number: int, transport: Unreliable) -> None:
    if number in {30, 60}:
        transport.kinesis.reshard(STREAM, SplitDuringRequest(), now=anyio.current_time())


def every_other(name: str, first: str, second: str) -> Callable[[int], dict[str, Any]]:
    return lambda number: {name: (first, second)[number % 2]}


def odd(number: int) -> object:
    return number % 2


KEPT: dict[str, dict[str, Any]] = {
    "requests in parallel, throttling, a retry": {},
    "a shard is split or merged": {"at": split_twice},
    "the buffer is full, and `await put` waits": {"max_outstanding_records": 5},
    "flows, each key in one flow": {"fairness": FairnessPolicy(), "terms": lambda _: {"flow": "one"}},
    "flows, records without a flow": {"fairness": FairnessPolicy()},
}


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("row", KEPT)
async def test_the_order_of_a_key_is_kept(row, seed):
    assert are_in_order(await run(seed, **PER_KEY, **KEPT[row]))


@pytest.mark.parametrize("tier", ["normal", "critical"])
async def test_the_order_of_a_key_is_kept_while_the_breaker_opens_and_closes(tier):
    transport, hook = Unreliable(0), RecordingHook()
    breaker = BreakerPolicy(minimum_records=1, open_seconds=0.5)
    config = Config(**scene(breaker=breaker, tiers=TierPolicy(), **PER_KEY))
    async with Producer(config, transport=transport, hooks=[hook]) as orders:
        for number in range(COUNT):
            transport.is_down = 20 <= number < 60
            _ = await orders.put(STREAM, partition_key="k", data=b"%d" % number, tier=tier)
            await anyio.sleep(0.05)
        await orders.flush()
    assert {"open", "closed"} <= {fact.state for fact in hook.facts if isinstance(fact, BreakerChanged)}
    assert seen(transport) == {"k": list(range(COUNT))}


PARTS: dict[str, dict[str, Any]] = {
    "one key in several tiers": {"tiers": TierPolicy(), "terms": every_other("tier", "normal", "critical")},
    "one key with several explicit hash keys": {"terms": every_other("explicit_hash_key", "0", str(2**128 - 1))},
}


@pytest.mark.parametrize("row", PARTS)
async def test_the_order_is_kept_only_among_the_records_of_one_part_of_a_key(row):
    found = [await run(seed, **PER_KEY, **PARTS[row]) for seed in range(2)]
    assert all(are_in_order(each, part=odd) for each in found)
    assert not all(are_in_order(each) for each in found)


async def test_the_order_is_kept_only_among_the_records_of_one_flow_of_a_key():
    """Three of four records are another key's, in the flow of every other record: that flow gets behind."""
    transport = Unreliable(0, shards=1)
    async with producer(transport, **scene(fairness=FairnessPolicy(), **PER_KEY)) as orders:
        for number in range(COUNT):
            _ = orders.put_nowait(STREAM, partition_key="k", data=b"%d" % number, flow=("busy", "quiet")[number % 2])
            for noise in range(3):
                _ = orders.put_nowait(STREAM, partition_key="noise", data=b"%d" % (3 * number + noise), flow="busy")
            if number % 10 == 0:
                await anyio.sleep(0.003)
        await orders.flush()
    found = seen(transport)
    assert found["noise"] == list(range(3 * COUNT))
    assert are_in_order({"k": found["k"]}, part=odd)
    assert not are_in_order({"k": found["k"]})


async def test_by_default_a_retry_overtakes():
    assert not are_in_order(await run(0))


async def test_a_record_that_fails_leaves_a_gap_and_the_next_ones_are_in_order():
    transport = Unreliable(0, is_down=True)
    async with producer(transport, **scene(record_ttl_ms=300, **PER_KEY)) as orders:
        for number in range(COUNT):
            transport.is_down = number < 30
            _ = await orders.put(STREAM, partition_key="k", data=b"%d" % number)
            await anyio.sleep(0.01)
        report = await orders.flush()
    (numbers,) = seen(transport).values()
    assert 0 < report.failed_total < COUNT
    assert len(numbers) >= COUNT - report.failed_total
    assert numbers == sorted(numbers)


async def test_a_close_that_runs_out_of_time_sends_the_rest_in_parallel():
    found = []
    for seed in range(4):
        transport = Unreliable(seed, shards=1)
        orders = producer(transport, **scene(aggregation_enabled=False, **PER_KEY))
        async with orders:
            for number in range(COUNT):
                _ = orders.put_nowait(STREAM, partition_key="k", data=b"%d" % number)
            await orders.close(timeout=1.0)
        found.append(seen(transport))
    assert not all(are_in_order(each) for each in found)
