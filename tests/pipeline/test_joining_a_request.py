"""A request that is due before it is full also takes the records that have waited half of their time."""

import pytest

from tests.support.material import even_shards, keys_in
from tests.support.stream import Stream

SHARDS = even_shards(2)
FIRST, SECOND = (keys_in(shard, 2) for shard in SHARDS)
# Of the first shard's record, put at 0: its deadline, and the wait of its request for other records.
LEAVES_AT = 0.1 + 0.01


def shards_of(request: object) -> list[str | None]:
    return [record.predicted_shard for record in request.records]  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("second_put_at", "goes_along"),
    [(0.0, True), (0.06, True), (0.061, False), (0.1, False)],
    ids=["put with it", "half its time is left", "more than half is left", "fresh"],
)
def test_a_record_that_has_waited_half_of_its_time_joins_the_next_request(
    second_put_at: float, *, goes_along: bool
) -> None:
    stream = Stream(SHARDS)
    stream.put(FIRST[0])
    stream.put(SECOND[0], now=second_put_at)
    request = stream.only(LEAVES_AT + 1e-9)
    assert (len(request.records) == 2) == goes_along
    assert request.records[0].predicted_shard == SHARDS[0].shard_id


def test_what_left_together_is_due_together_again() -> None:
    stream = Stream(SHARDS)
    stream.put(FIRST[0])
    stream.put(SECOND[0], now=0.06)
    requests = []
    for tick in range(1, 101):
        now = 0.06 + tick / 100
        requests += stream.due(now)
        stream.put(FIRST[0], now=now)
        stream.put(SECOND[0], now=now)
    assert all(len(request.records) == 2 for request in requests)
    assert len(requests) <= 10


def test_what_fills_requests_waits_for_its_own_time() -> None:
    stream = Stream(SHARDS, collection_max_count=1)
    stream.put(FIRST[0])
    stream.put(SECOND[0], now=0.05)
    assert shards_of(stream.only(0.1)) == [SHARDS[0].shard_id]
    assert shards_of(stream.only(0.15 + 1e-9)) == [SHARDS[1].shard_id]


def test_in_arrival_order_no_open_record_joins_a_request() -> None:
    stream = Stream(SHARDS, ordering="per_key")
    stream.put(FIRST[0])
    stream.put(SECOND[0], now=0.06)
    assert shards_of(stream.only(LEAVES_AT + 1e-9)) == [SHARDS[0].shard_id]


def test_no_more_go_along_than_there_is_room_for() -> None:
    shards = even_shards(4)
    stream = Stream(shards, collection_max_count=3)
    for number, shard in enumerate(shards):
        stream.put(keys_in(shard, 1)[0], now=0.01 * number)
    first, second = stream.due(0.2)
    assert (len(first.records), len(second.records)) == (3, 1)
