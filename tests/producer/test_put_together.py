"""Many user records of one flow put at once: all or none, and fair like any other put."""

from collections import Counter
from pathlib import Path
from typing import Any

import anyio
import pytest

from kpl_core import (
    BufferFull,
    Config,
    ConfigError,
    FairnessPolicy,
    InvalidUserRecord,
    Producer,
    TierPolicy,
    UserRecord,
)
from kpl_core.options.reliability import SpoolOptions
from tests.support.producer_scene import STREAM, assert_books_close, seen_by_kcl, service, stored, unmetered

pytestmark = pytest.mark.anyio


def records(count: int, *, size: int = 100, key: str = "k") -> list[UserRecord]:
    return [UserRecord(f"{key}{number % 50}", str(number).encode().ljust(size, b".")) for number in range(count)]


def pairs(count: int, *, key: str = "k") -> list[tuple[str, bytes]]:
    return [(record.partition_key, record.data) for record in records(count, key=key)]


def fair(**options: Any) -> Config:
    return Config(fairness=FairnessPolicy(), **options)


@pytest.mark.parametrize("tier", ["critical", "normal", "bulk"])
@pytest.mark.parametrize("aggregate", [True, False])
async def test_all_arrive_once_and_in_the_order_of_the_deliveries(tier, aggregate):
    transport = unmetered(4)
    put = [*records(500), UserRecord("x", b"with a hash key", explicit_hash_key="12345")]
    async with Producer(fair(tiers=TierPolicy()), transport=transport) as producer:
        for _ in range(2):
            deliveries = producer.internal.put_together_nowait(STREAM, put, flow="t", tier=tier, aggregate=aggregate)
            results = [await delivery for delivery in deliveries]
            assert all(result.successful for result in results)
        report = await producer.close()
    assert report.accepted == report.delivered == 2 * len(put)
    assert Counter(stored(transport)) == Counter({(record.partition_key, record.data): 2 for record in put})


@pytest.mark.parametrize("aggregate", [True, False])
async def test_a_buffer_that_changes_later_does_not_change_what_was_put(aggregate):
    transport = unmetered(1)
    buffers = [bytearray(b"%d" % number) for number in range(3)]
    async with Producer(fair(), transport=transport) as producer:
        mutable: list[Any] = [UserRecord("k", buffer) for buffer in buffers]  # type: ignore[arg-type] # as callers do
        put = producer.internal.put_together_nowait(STREAM, mutable, flow="t", aggregate=aggregate)
        pairs_of_them: list[Any] = [("k", buffer) for buffer in buffers]
        producer.internal.put_pairs_together_nowait(STREAM, pairs_of_them, flow="t")
        for buffer in buffers:
            buffer[:] = b"!"
        assert all([(await delivery).successful for delivery in put])
    assert Counter(stored(transport)) == Counter({("k", b"%d" % number): 2 for number in range(3)})


async def test_without_aggregation_each_has_a_kinesis_record_and_a_sequence_number_of_its_own():
    async with Producer(fair(), transport=unmetered(2)) as producer:
        _ = await producer.internal.put_together_nowait(STREAM, records(1), flow="t")[0]
        deliveries = producer.internal.put_together_nowait(STREAM, records(50), flow="t", aggregate=False)
        results = [await delivery for delivery in deliveries]
    assert len({result.sequence_number for result in results}) == 50


async def test_one_bad_record_puts_none():
    async with Producer(fair(), transport=unmetered()) as producer:
        for bad in (UserRecord("", b"x"), UserRecord("k", bytes(2_000_000)), UserRecord("k", b"", "not a number")):
            with pytest.raises(InvalidUserRecord):
                _ = producer.internal.put_together_nowait(STREAM, [*records(3), bad], flow="t")
        assert producer.report().accepted == 0
        assert producer.buffer_limit.outstanding_records == 0


async def test_too_many_for_the_room_puts_none():
    async with Producer(fair(max_outstanding_records=100), transport=unmetered()) as producer:
        with pytest.raises(BufferFull):
            _ = producer.internal.put_together_nowait(STREAM, records(101), flow="t")
        assert producer.report().accepted == 0
        deliveries = producer.internal.put_together_nowait(STREAM, records(100), flow="t")
        report = await producer.close()
    assert_books_close(report, deliveries)


async def test_a_flood_uses_up_its_share_and_a_quiet_flow_still_finds_room():
    config = fair(max_outstanding_records=1_000, rate_limit_bytes_per_sec_per_shard=10_000, record_ttl_ms=600_000)
    async with Producer(config, transport=unmetered()) as producer:
        flood = 0

        def flood_on() -> None:
            nonlocal flood
            while True:
                flood += len(producer.internal.put_together_nowait(STREAM, records(50), flow="flood"))

        with pytest.raises(BufferFull, match=r"flow .flood. has"):
            flood_on()
        assert 450 <= flood <= 900
        assert len(producer.internal.put_together_nowait(STREAM, records(50), flow="quiet")) == 50
        report = await producer.close(timeout=1.0)
    assert report.accepted == flood + 50
    assert report.buffered == 0


async def test_critical_records_use_their_reserve_when_the_room_of_all_others_is_gone():
    config = fair(
        max_outstanding_records=100, tiers=TierPolicy(critical_reserve=0.2), rate_limit_bytes_per_sec_per_shard=1_000
    )
    async with Producer(config, transport=unmetered()) as producer:
        _ = producer.internal.put_together_nowait(STREAM, records(80), flow="a")
        with pytest.raises(BufferFull):
            _ = producer.internal.put_together_nowait(STREAM, records(1), flow="b")
        for _ in range(4):
            _ = producer.internal.put_together_nowait(STREAM, records(2), flow="c", tier="critical")
        await producer.close(timeout=0)


async def test_what_waits_of_a_flow_without_aggregation_travels_alone_when_its_turn_comes():
    transport = service()
    async with Producer(fair(), transport=transport) as producer:
        _ = await producer.internal.put_together_nowait(STREAM, records(1), flow="t")[0]
        deliveries = producer.internal.put_together_nowait(STREAM, records(1_500), flow="t", aggregate=False)
        assert producer.statistics()[STREAM].queueing > 0
        results = [await delivery for delivery in deliveries]
    assert len({result.sequence_number for result in results}) == 1_500


class OneByOne(FairnessPolicy):
    def aggregates(self, flow: object) -> bool:
        return flow != "one by one"


async def test_a_single_put_of_a_flow_that_the_policy_does_not_aggregate_travels_alone():
    async with Producer(Config(fairness=OneByOne()), transport=service()) as producer:
        _ = await (await producer.put(STREAM, partition_key="k", data=b"looks up the shards"))
        apart = [producer.put_nowait(STREAM, partition_key="k", data=b"1", flow="one by one") for _ in range(5)]
        others = [producer.put_nowait(STREAM, partition_key="k", data=b"2", flow="another") for _ in range(5)]
        numbers = {(await delivery).sequence_number for delivery in apart}
        assert len(numbers) == 5
        assert len({(await delivery).sequence_number for delivery in others} - numbers) == 1


async def test_records_without_aggregation_stay_so_whatever_their_flow_puts_afterwards():
    async with Producer(fair(), transport=service()) as producer:
        _ = await producer.internal.put_together_nowait(STREAM, records(1), flow="t")[0]
        group = producer.internal.begin_group(STREAM, records(1_500), flow="t", aggregate=False)
        group.step()
        _ = producer.internal.put_together_nowait(STREAM, records(1), flow="t")
        group.finish()
        _ = producer.internal.put_together_nowait(STREAM, records(1), flow="t")
        assert producer.statistics()[STREAM].queueing > 0
        results = [await delivery for delivery in group.deliveries]
    assert len({result.sequence_number for result in results}) == 1_500


# The disk is a thread of its own: virtual time would run away while it writes.
@pytest.mark.parametrize("anyio_backend", ["asyncio", "trio"])
async def test_written_ahead_they_are_in_the_spool_before_they_are_acknowledged(tmp_path: Path):
    config = fair(spool=SpoolOptions(path=tmp_path / "spool.db", mode="write_ahead"))
    transport = unmetered(latency_seconds=0.2)
    async with Producer(config, transport=transport) as producer:
        deliveries = producer.internal.put_together_nowait(STREAM, records(200), flow="t")
        await producer.internal.acknowledged(deliveries)
        assert producer.spool is not None
        assert producer.spool.statistics().records == 200
        assert all([(await delivery).successful for delivery in deliveries])
        report = await producer.close()
    assert report.delivered == 200
    assert report.spooled == 0


async def test_without_a_fair_queue_it_is_refused_in_words():
    async with Producer(Config(), transport=unmetered()) as producer:
        with pytest.raises(ConfigError, match="needs a fair queue"):
            _ = producer.internal.put_together_nowait(STREAM, records(1))
        await anyio.lowlevel.checkpoint()


@pytest.mark.parametrize("aggregated", [True, False])
async def test_pairs_arrive_once_each_in_its_shard_and_in_the_order_of_their_key(aggregated):
    transport = unmetered(4)
    put = [*pairs(700), ("ключ", b""), ("k0", b"large".ljust(60_000)), *pairs(300, key="more")]
    async with Producer(fair(aggregation_enabled=aggregated), transport=transport) as producer:
        _ = await producer.internal.put_together_nowait(STREAM, [UserRecord("first", b"")], flow="t")[0]
        producer.internal.put_pairs_together_nowait(STREAM, put, flow="t")
        group = producer.internal.begin_group(STREAM, put, flow="t")
        group.finish()
        report = await producer.close()
        results = await group.deliveries.results()
    assert report.accepted == report.delivered == 1 + 2 * len(put)
    assert all(result.successful for result in results)
    assert len({result.shard_id for result in results}) == 4
    found = [pair for pair in stored(transport) if pair[0] != "first"]
    assert Counter(found) == Counter(2 * put)
    for key in {key for key, _ in put} if aggregated else ():
        assert [data for other, data in found if other == key] == 2 * [data for other, data in put if other == key]


@pytest.mark.parametrize("aggregated", [True, False])
async def test_pairs_with_explicit_hash_keys_arrive_once_each_in_the_shard_of_that_key(aggregated):
    transport = unmetered(4)
    put = [(*pair, str(number * 0x9E3779B97F4A7C15F39CC0605CEDC834 % 2**128)) for number, pair in enumerate(pairs(900))]
    put += [("k0", b"large".ljust(60_000), "5"), ("k" * 200, b"more", str(2**128 - 1))]
    async with Producer(fair(aggregation_enabled=aggregated), transport=transport) as producer:
        _ = await producer.internal.put_together_nowait(STREAM, [UserRecord("first", b"")], flow="t")[0]
        producer.internal.put_pairs_together_nowait(STREAM, put, flow="t")
        group = producer.internal.begin_group(STREAM, put, flow="t")
        group.finish()
        shards = {result.shard_id for result in await group.deliveries.results()}
        assert len(group.deliveries) == len(put)
        report = await producer.close()
    assert len(shards) == 4
    assert report.accepted == report.delivered == 1 + 2 * len(put)
    assert Counter(stored(transport)) == Counter([("first", b""), *(2 * [each[:2] for each in put])])
    # A consumer drops an aggregated record in which a user record belongs to another shard.
    assert seen_by_kcl(transport, now=1e6) == {b"", *(data for _, data, _ in put)}


async def test_pairs_with_explicit_hash_keys_wait_in_the_fair_queue_too():
    config = fair(rate_limit_bytes_per_sec_per_shard=10_000, record_ttl_ms=600_000)
    transport = unmetered(2)
    async with Producer(config, transport=transport) as producer:
        _ = await producer.internal.put_together_nowait(STREAM, records(1), flow="t")[0]
        put = [(*pair, str(number << 120)) for number, pair in enumerate(pairs(200))]
        for _ in range(20):
            producer.internal.put_pairs_together_nowait(STREAM, put, flow="t")
        assert producer.statistics()[STREAM].queueing > 0
        report = await producer.close()
    assert report.delivered == 4_001
    assert seen_by_kcl(transport, now=1e6) == {data for _, data, _ in put}


async def test_pairs_of_which_one_is_bad_or_too_many_put_none():
    async with Producer(fair(max_outstanding_records=100), transport=unmetered()) as producer:
        for bad in (("", b"x"), ("k" * 257, b"x"), ("k", bytes(2_000_000)), ("\ud800", b"x")):
            with pytest.raises(InvalidUserRecord):
                producer.internal.put_pairs_together_nowait(STREAM, [*pairs(3), bad], flow="t")
        for key, data, explicit in (("k", 1, "01"), ("k", 1, str(2**128)), ("", 1, "1"), ("k", 2_000_000, "1")):
            for put in (producer.internal.put_pairs_together_nowait, producer.internal.begin_group):
                with pytest.raises(InvalidUserRecord):
                    put(STREAM, [("k", b"x", "7"), (key, bytes(data), explicit)], flow="t")
        with pytest.raises(BufferFull):
            producer.internal.put_pairs_together_nowait(STREAM, pairs(101), flow="t")
        assert producer.report().accepted == 0
        assert producer.buffer_limit.outstanding_records == 0
        producer.internal.put_pairs_together_nowait(STREAM, pairs(100), flow="t")
        report = await producer.close()
    assert report.delivered == 100
    assert report.complete


async def test_pairs_wait_in_the_fair_queue_and_have_the_share_that_records_have():
    config = fair(max_outstanding_records=5_000, rate_limit_bytes_per_sec_per_shard=10_000, record_ttl_ms=600_000)
    seen = []
    for as_pairs in (True, False):
        async with Producer(config, transport=unmetered()) as producer:
            _ = await producer.internal.put_together_nowait(STREAM, records(1), flow="t")[0]

            def put(flow: str, *, as_pairs: bool = as_pairs, producer: Producer = producer) -> None:
                if as_pairs:
                    producer.internal.put_pairs_together_nowait(STREAM, pairs(50), flow=flow)
                else:
                    producer.internal.put_together_nowait(STREAM, records(50), flow=flow)

            def flood(put: Any = put) -> None:
                while True:
                    put("flood")

            with pytest.raises(BufferFull, match=r"flow .flood. has"):
                flood()
            put("quiet")
            seen.append((producer.report().accepted, producer.waiting_by_flow()))
            report = await producer.close(timeout=1.0)
            assert report.buffered == 0
    assert seen[0] == seen[1]
    assert seen[0][1]["flood"][0] > 1_000
    assert seen[0][1]["quiet"][0] == 50


async def test_pairs_of_a_flow_that_had_no_aggregation_are_aggregated_again_after_a_retry():
    async with Producer(fair(), transport=unmetered(2)) as producer:
        _ = await producer.internal.put_together_nowait(STREAM, records(1), flow="t", aggregate=False)[0]
        producer.internal.put_pairs_together_nowait(STREAM, pairs(500), flow="t")
        report = await producer.close()
    assert report.delivered == 501


@pytest.mark.parametrize("anyio_backend", ["asyncio", "trio"])
@pytest.mark.parametrize("mode", ["write_ahead", "overflow"])
async def test_pairs_are_kept_where_something_is_kept(tmp_path: Path, mode):
    config = fair(spool=SpoolOptions(path=tmp_path / "spool.db", mode=mode))
    transport = unmetered(latency_seconds=0.2)
    async with Producer(config, transport=transport) as producer:
        producer.internal.put_pairs_together_nowait(STREAM, pairs(200), flow="t")
        report = await producer.close()
    assert report.delivered + report.spooled == 200
    assert report.complete


async def test_many_pairs_are_put_once_each_while_critical_records_use_their_reserve():
    config = Config(max_outstanding_records=400, tiers=TierPolicy(critical_reserve=0.2), record_max_buffered_time_ms=10)
    transport = unmetered(1)
    async with Producer(config, transport=transport) as producer:
        first = [producer.put_nowait(STREAM, partition_key="k0", data=b"%d" % at, tier="critical") for at in range(390)]
        assert producer.buffer_limit.free_records < 0
        put = pairs(1_000)
        deliveries = await producer.put_many(STREAM, put)
        report = await producer.close()
    assert report.accepted == report.delivered == 1_390
    assert len(deliveries) + len(first) == 1_390
    assert Counter(stored(transport)) == Counter(put) + Counter(("k0", b"%d" % at) for at in range(390))
