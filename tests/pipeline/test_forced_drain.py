"""When closing runs out of time everything leaves at once, and a key's user records still in the order they were put.

(docs/howto/producer-streams.md, Order: by default records of one key leave in the order they were put.)
"""

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, strategies

from kpl_core.records.put_records import PutRecordsRequest
from tests.support.material import even_shards
from tests.support.stream import Stream

SHARDS = even_shards(2)
# Where user records wait: in open aggregated records and for tokens, for tokens alone, or behind one on its way.
WAYS: dict[str, dict[str, Any]] = {
    "aggregated": {"aggregation_max_count": 3},
    "each alone": {"aggregation_enabled": False},
    "one on its way": {"aggregation_max_count": 3, "ordering": "per_key"},
}
# Key, and the seconds that pass before it is put.
PUTS = strategies.lists(
    strategies.tuples(strategies.sampled_from("abcdefgh"), strategies.sampled_from([0.0, 0.01, 0.3])),
    min_size=1,
    max_size=60,
)


def by_key(requests: Sequence[PutRecordsRequest]) -> dict[str, list[int]]:
    """Return what left under each key, in the order of leaving."""
    left: dict[str, list[int]] = defaultdict(list)
    for request in requests:
        for record in request.records:
            for each in record.user_records():
                left[each.partition_key].append(int(each.data))
    return left


@pytest.mark.parametrize("way", WAYS)
@given(puts=PUTS)
def test_what_a_forced_drain_lets_go_leaves_in_the_order_of_its_key(way: str, puts: list[tuple[str, float]]) -> None:
    # One token a second for each shard: nearly all of them wait when time is up.
    stream = Stream(SHARDS, rate_limit_records_per_sec_per_shard=1.0, **WAYS[way])
    put: dict[str, list[int]] = defaultdict(list)
    requests: list[PutRecordsRequest] = []
    now = 0.0
    for number, (key, seconds) in enumerate(puts):
        now += seconds
        stream.put(key, b"%d" % number, now)
        put[key].append(number)
        requests += stream.due(now)
    stream.pipeline.drain_force(now)
    requests += stream.due(now)
    assert by_key(requests) == put
    for request in requests:
        stream.pipeline.request_completed(request, stream.stored(request), now)
    assert stream.pipeline.statistics().buffered == 0


@pytest.mark.parametrize("way", WAYS)
def test_a_forced_drain_leaves_the_expired_behind_and_the_others_in_order(way: str) -> None:
    stream = Stream(even_shards(1), rate_limit_records_per_sec_per_shard=1.0, record_ttl_ms=1_000, **WAYS[way])
    for number in range(12):
        stream.put("k", b"%d" % number, 0.0)
    stream.pipeline.flush(0.0)
    requests = stream.due(0.0)
    for number in range(12, 24):
        stream.put("k", b"%d" % number, 0.9)
    # The first records have expired; there was no poll since.
    stream.pipeline.drain_force(1.0)
    requests += stream.due(1.0)
    left = by_key(requests)["k"]
    assert left == sorted(left)
    assert left[-12:] == list(range(12, 24))
    assert len(left) < 24
