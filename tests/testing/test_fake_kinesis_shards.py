"""Resharding and listing in the fake service."""

import pytest

from kpl_core.testing import FakeKinesis, KinesisError, ServiceLimits, ShardDescription, ShardListingFilter

ZERO, ONE, TWO, THREE, FOUR = (f"shardId-{index:012d}" for index in range(5))
WHOLE = 2**128
IN_ORDERS = "in stream orders under account 000000000000"


def ids(shards: tuple[ShardDescription, ...]) -> list[str]:
    return [shard.shard_id for shard in shards]


def test_a_split_closes_the_shard_and_divides_its_range_between_two_children() -> None:
    kinesis = FakeKinesis({"orders": 1})
    kinesis.split_shard("orders", shard_id=ZERO, new_starting_hash_key=100, now=0.0)
    parent, left, right = kinesis.list_shards("orders", now=0.0).shards
    assert parent.ending_sequence_number is not None
    assert (left.shard_id, left.starting_hash_key, left.ending_hash_key) == (ONE, 0, 99)
    assert (right.shard_id, right.starting_hash_key, right.ending_hash_key) == (TWO, 100, WHOLE - 1)
    assert left.parent_shard_id == right.parent_shard_id == ZERO
    assert left.adjacent_parent_shard_id is None


def test_a_merge_closes_both_shards_and_the_child_names_both() -> None:
    kinesis = FakeKinesis({"orders": 3})
    kinesis.merge_shards("orders", shard_id=ONE, adjacent_shard_id=TWO, now=0.0)
    child = kinesis.list_shards("orders", now=0.0).shards[-1]
    assert (child.shard_id, child.parent_shard_id, child.adjacent_parent_shard_id) == (THREE, ONE, TWO)
    assert (child.starting_hash_key, child.ending_hash_key) == (WHOLE // 3, WHOLE - 1)
    assert ids(kinesis.open_shards("orders")) == [ZERO, THREE]


@pytest.mark.parametrize("hash_key", [0, 1, WHOLE - 1, WHOLE, 10**38 * 9])
def test_a_split_outside_or_at_the_edge_of_the_range_is_rejected(hash_key: int) -> None:
    kinesis = FakeKinesis({"orders": 1})
    message = (
        f"NewStartingHashKey {hash_key} used in SplitShard() on shard {ZERO} {IN_ORDERS} is not both greater than "
        f"one plus the shard's StartingHashKey 0 and less than the shard's EndingHashKey {WHOLE - 1}."
    )
    with pytest.raises(KinesisError) as refusal:
        kinesis.split_shard("orders", shard_id=ZERO, new_starting_hash_key=hash_key, now=0.0)
    assert (refusal.value.code, refusal.value.message) == ("InvalidArgumentException", message)


@pytest.mark.parametrize(("first", "second"), [(ZERO, TWO), (ONE, ZERO), (ZERO, ZERO)])
def test_only_a_shard_and_its_right_neighbour_can_be_merged(first: str, second: str) -> None:
    kinesis = FakeKinesis({"orders": 3})
    with pytest.raises(KinesisError, match=r"are not an adjacent pair of shards eligible for merging"):
        kinesis.merge_shards("orders", shard_id=first, adjacent_shard_id=second, now=0.0)


def test_a_closed_shard_can_be_neither_split_nor_merged() -> None:
    kinesis = FakeKinesis({"orders": 1})
    kinesis.split_shard("orders", shard_id=ZERO, new_starting_hash_key=100, now=0.0)
    with pytest.raises(KinesisError, match="has already been merged or split"):
        kinesis.split_shard("orders", shard_id=ZERO, new_starting_hash_key=100, now=0.0)
    with pytest.raises(KinesisError, match="has already been merged or split"):
        kinesis.merge_shards("orders", shard_id=ZERO, adjacent_shard_id=TWO, now=0.0)


@pytest.mark.parametrize(
    ("shard_id", "message"),
    [
        ("shardId-5", f"Could not find shard shardId-000000000005 {IN_ORDERS}."),
        ("nonsense", f"Could not find shard nonsense {IN_ORDERS}."),
        ("2147483648", f"Could not find shard 2147483648 {IN_ORDERS}."),
    ],
)
def test_an_unknown_shard_is_not_found(shard_id: str, message: str) -> None:
    with pytest.raises(KinesisError) as refusal:
        FakeKinesis({"orders": 1}).split_shard("orders", shard_id=shard_id, new_starting_hash_key=5, now=0.0)
    assert (refusal.value.code, refusal.value.message) == ("ResourceNotFoundException", message)


def test_doubling_splits_every_shard_and_halving_merges_every_pair() -> None:
    kinesis = FakeKinesis({"orders": 2})
    change = kinesis.update_shard_count("orders", target_shard_count=4, now=0.0)
    assert (change.current_shard_count, change.target_shard_count) == (2, 4)
    assert [shard.starting_hash_key for shard in kinesis.open_shards("orders")] == [
        WHOLE // 4 * quarter for quarter in range(4)
    ]
    kinesis.update_shard_count("orders", target_shard_count=2, now=1.0)
    assert [shard.starting_hash_key for shard in kinesis.open_shards("orders")] == [0, WHOLE // 2]
    kinesis.update_shard_count("orders", target_shard_count=3, now=2.0)
    assert [shard.starting_hash_key for shard in kinesis.open_shards("orders")] == [
        WHOLE // 3 * third for third in range(3)
    ]


@pytest.mark.parametrize(("target", "words"), [(9, "scale up over double"), (1, "scale down below half")])
def test_the_shard_count_can_at_most_halve_or_double(target: int, words: str) -> None:
    with pytest.raises(KinesisError, match=words):
        FakeKinesis({"orders": 4}).update_shard_count("orders", target_shard_count=target, now=0.0)


def test_records_stay_in_a_closed_shard_and_new_ones_go_to_its_children() -> None:
    kinesis = FakeKinesis({"orders": 1})
    kinesis.put_records("orders", [("k", "0", b"before")], now=0.0)
    kinesis.split_shard("orders", shard_id=ZERO, new_starting_hash_key=100, now=1.0)
    kinesis.put_records("orders", [("k", "0", b"after"), ("k", "100", b"right")], now=2.0)
    assert [(record.shard_id, record.data) for record in kinesis.records("orders")] == [
        (ZERO, b"before"),
        (ONE, b"after"),
        (TWO, b"right"),
    ]


def resharded() -> FakeKinesis:
    """Return a stream: shard 0 splits into 1 and 2 at second 10, which merge into 3 at second 20.

    Retention is 30 seconds, and the epoch is 0.
    """
    kinesis = FakeKinesis({"orders": 1}, epoch=0.0, limits=ServiceLimits(retention_seconds=30.0))
    kinesis.split_shard("orders", shard_id=ZERO, new_starting_hash_key=100, now=10.0)
    kinesis.merge_shards("orders", shard_id=ONE, adjacent_shard_id=TWO, now=20.0)
    return kinesis


FILTERS: list[tuple[ShardListingFilter, float, list[str]]] = [
    (ShardListingFilter("AT_LATEST"), 25.0, [THREE]),
    (ShardListingFilter("FROM_TRIM_HORIZON"), 25.0, [ZERO, ONE, TWO, THREE]),
    (ShardListingFilter("FROM_TRIM_HORIZON"), 45.0, [ONE, TWO, THREE]),
    (ShardListingFilter("FROM_TRIM_HORIZON"), 55.0, [THREE]),
    (ShardListingFilter("AT_TRIM_HORIZON"), 25.0, [ZERO]),
    (ShardListingFilter("AT_TRIM_HORIZON"), 45.0, [ONE, TWO]),
    (ShardListingFilter("AT_TRIM_HORIZON"), 55.0, [THREE]),
    (ShardListingFilter("AFTER_SHARD_ID", shard_id=ONE), 25.0, [TWO, THREE]),
    (ShardListingFilter("AT_TIMESTAMP", timestamp_ms=5_000), 25.0, [ZERO]),
    (ShardListingFilter("AT_TIMESTAMP", timestamp_ms=15_000), 25.0, [ONE, TWO]),
    (ShardListingFilter("AT_TIMESTAMP", timestamp_ms=22_000), 25.0, [THREE]),
    (ShardListingFilter("AT_TIMESTAMP", timestamp_ms=1_000), 45.0, [ONE, TWO]),
    (ShardListingFilter("FROM_TIMESTAMP", timestamp_ms=15_000), 25.0, [ONE, TWO, THREE]),
    (ShardListingFilter("FROM_TIMESTAMP", timestamp_ms=22_000), 25.0, [THREE]),
]


@pytest.mark.parametrize(("shard_filter", "now", "listed"), FILTERS)
def test_a_filter_lists_the_same_shards_as_the_service(
    shard_filter: ShardListingFilter, now: float, listed: list[str]
) -> None:
    assert ids(resharded().list_shards("orders", shard_filter=shard_filter, now=now).shards) == listed


@pytest.mark.parametrize(
    ("shard_filter", "words"),
    [
        (ShardListingFilter("AFTER_SHARD_ID"), "ShardId must be provided"),
        (ShardListingFilter("AT_TIMESTAMP"), "Timestamp must be provided"),
        (ShardListingFilter("AT_LATEST", shard_id=ZERO), "ShardId cannot be provided"),
        (ShardListingFilter("AT_LATEST", timestamp_ms=1), "Timestamp cannot be provided"),
    ],
)
def test_a_filter_must_have_exactly_the_argument_that_its_type_needs(
    shard_filter: ShardListingFilter, words: str
) -> None:
    with pytest.raises(KinesisError, match=words):
        resharded().list_shards("orders", shard_filter=shard_filter, now=25.0)


def test_the_pages_of_a_listing_are_consecutive_and_keep_the_filter() -> None:
    kinesis = FakeKinesis({"orders": 5})
    kinesis.split_shard("orders", shard_id=TWO, new_starting_hash_key=WHOLE // 2, now=0.0)
    page = kinesis.list_shards("orders", shard_filter=ShardListingFilter("AT_LATEST"), max_results=2, now=0.0)
    pages = [ids(page.shards)]
    while page.next_token is not None:
        assert kinesis.listing(page.next_token) == ("orders", len(pages) + 1)
        page = kinesis.list_shards(next_token=page.next_token, max_results=2, now=0.0)
        pages.append(ids(page.shards))
    assert pages == [[ZERO, ONE], [THREE, FOUR], ["shardId-000000000005", "shardId-000000000006"]]
    assert kinesis.listing(None) == (None, 1)


def test_a_listing_begins_after_the_exclusive_start() -> None:
    assert ids(FakeKinesis({"orders": 3}).list_shards("orders", exclusive_start_shard_id=ZERO, now=0.0).shards) == [
        ONE,
        TWO,
    ]


def test_a_page_has_at_most_1000_shards() -> None:
    kinesis = FakeKinesis({"orders": 1001})
    page = kinesis.list_shards("orders", max_results=10_000, now=0.0)
    assert len(page.shards) == 1000
    assert len(kinesis.list_shards(next_token=page.next_token, now=0.0).shards) == 1


def test_a_next_token_excludes_other_arguments_and_expires_after_300_seconds() -> None:
    kinesis = FakeKinesis({"orders": 2})
    token = kinesis.list_shards("orders", max_results=1, now=0.0).next_token
    for stream, words in (("orders", "StreamName"), (kinesis.arn("orders"), "StreamARN")):
        with pytest.raises(KinesisError, match=f"NextToken and {words} cannot be provided together."):
            kinesis.list_shards(stream, next_token=token, now=0.0)
    with pytest.raises(KinesisError, match=r"NextToken and ShardFilter cannot be provided together."):
        kinesis.list_shards(next_token=token, shard_filter=ShardListingFilter("AT_LATEST"), now=0.0)
    with pytest.raises(KinesisError, match=r"NextToken and ExclusiveStartShardId cannot be provided together."):
        kinesis.list_shards(next_token=token, exclusive_start_shard_id=ZERO, now=0.0)
    assert len(kinesis.list_shards(next_token=token, now=299.9).shards) == 1
    with pytest.raises(KinesisError, match="ExpiredNextTokenException"):
        kinesis.list_shards(next_token=token, now=300.0)
    for made_up in ("", "made up", kinesis.list_streams(limit=1, now=0.0).next_token or "e30="):
        with pytest.raises(KinesisError, match="NextToken is invalid"):
            kinesis.list_shards(next_token=made_up, now=0.0)


def test_a_listing_needs_a_stream_or_a_token() -> None:
    with pytest.raises(KinesisError, match="must be provided"):
        FakeKinesis({"orders": 1}).list_shards(now=0.0)


def test_a_description_shows_at_most_100_shards() -> None:
    kinesis = FakeKinesis({"orders": 150})
    first = kinesis.describe_stream("orders", limit=10_000, now=0.0)
    assert (len(first.shards), first.has_more_shards) == (100, True)
    rest = kinesis.describe_stream("orders", exclusive_start_shard_id=first.shards[-1].shard_id, now=0.0)
    assert (len(rest.shards), rest.has_more_shards) == (50, False)
