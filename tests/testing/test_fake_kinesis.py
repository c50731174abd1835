"""The fake service: streams, routing, puts and their limits, at literal times."""

import pytest

from kpl_core.options.kinesis_limits import KIB, MIB
from kpl_core.records.hash_key import hash_key_of
from kpl_core.testing import FakeKinesis, KinesisError, PutRecord, ServiceDurations, ServiceLimits
from kpl_core.testing.fake_shard import parse_sequence_number

FIRST = "shardId-000000000000"
SECOND = "shardId-000000000001"
ACCOUNT = "under account 000000000000"


def refused(code: str, message: str) -> "pytest.RaisesExc[KinesisError]":
    return pytest.RaisesExc(KinesisError, check=lambda error: (error.code, error.message) == (code, message))


def test_a_record_is_stored_where_its_partition_key_hashes_to() -> None:
    kinesis = FakeKinesis({"orders": 2})
    # MD5("a") starts with 0x0c, MD5("b") with 0x92.
    left, right = kinesis.put_records("orders", [("a", None, b"1"), ("b", None, b"2")], now=0.0)
    assert (left.shard_id, right.shard_id) == (FIRST, SECOND)
    assert (left.error_code, left.error_message) == (None, None)
    assert [(record.shard_id, record.partition_key, record.data) for record in kinesis.records("orders")] == [
        (FIRST, "a", b"1"),
        (SECOND, "b", b"2"),
    ]


def test_one_hundred_keys_are_routed_by_their_md5() -> None:
    kinesis = FakeKinesis({"orders": 7})
    shards = {shard.shard_id: shard for shard in kinesis.open_shards("orders")}
    records: list[PutRecord] = [(f"key-{number}-äöü-🚀", None, b"") for number in range(100)]
    for (key, _, _), entry in zip(records, kinesis.put_records("orders", records, now=0.0), strict=True):
        shard = shards[entry.shard_id or ""]
        assert shard.starting_hash_key <= hash_key_of(key) <= shard.ending_hash_key


def test_both_ends_of_a_shards_range_belong_to_it() -> None:
    kinesis = FakeKinesis({"orders": 2})
    border = 2**127
    keys = ["0", str(border - 1), str(border), str(2**128 - 1)]
    entries = kinesis.put_records("orders", [("k", key, b"") for key in keys], now=0.0)
    assert [entry.shard_id for entry in entries] == [FIRST, FIRST, SECOND, SECOND]


def test_a_stream_is_found_by_its_arn_and_by_its_name() -> None:
    kinesis = FakeKinesis({"orders": 1})
    kinesis.put_records(kinesis.arn("orders"), [("a", None, b"1")], now=0.0)
    assert len(kinesis.records("orders")) == 1
    with refused("ResourceNotFoundException", f"Stream orders {ACCOUNT} not found."):
        kinesis.put_records("arn:aws:kinesis:us-east-1:999999999999:stream/orders", [("a", None, b"1")], now=0.0)


def test_sequence_numbers_have_the_format_of_the_service_and_rise() -> None:
    kinesis = FakeKinesis({"orders": 1}, epoch=1_700_000_000.0)
    numbers: list[str] = []
    for second in range(5):
        entries = kinesis.put_records("orders", [("a", None, b"")] * 40, now=float(second))
        numbers += [entry.sequence_number or "" for entry in entries]
    assert {len(number) for number in numbers} == {56}
    assert numbers == sorted(numbers)
    assert len(set(numbers)) == 200
    parsed = parse_sequence_number(numbers[-1])
    assert parsed is not None
    assert (parsed.shard_created_at, parsed.written_at, parsed.shard_index) == (1_700_000_000, 1_700_000_004, 0)


def test_a_childs_sequence_numbers_are_above_its_parents() -> None:
    kinesis = FakeKinesis({"orders": 1})
    (before,) = kinesis.put_records("orders", [("a", None, b"")], now=0.0)
    kinesis.split_shard("orders", shard_id=FIRST, new_starting_hash_key=2**127, now=0.0)
    (after,) = kinesis.put_records("orders", [("a", None, b"")], now=0.0)
    parent = kinesis.list_shards("orders", now=0.0).shards[0]
    assert (before.shard_id, after.shard_id) == (FIRST, SECOND)
    assert parent.starting_sequence_number < (before.sequence_number or "") < (parent.ending_sequence_number or "")
    assert (parent.ending_sequence_number or "") < (after.sequence_number or "")


LONG_KEY = "k" * 257
MEBIBYTE: PutRecord = ("k", None, bytes(MIB - 1))
EMPTY: PutRecord = ("k", None, b"")
TOO_MUCH = [MEBIBYTE] * 10 + [EMPTY]

REFUSED_PUTS: list[tuple[str, list[PutRecord], str, str]] = [
    (
        "no record",
        [],
        "ValidationException",
        "Value '[]' at 'records'|Member must have length greater than or equal to 1",
    ),
    (
        "501 records",
        [("k", None, b"")] * 501,
        "ValidationException",
        "Value at 'records'|Member must have length less than or equal to 500",
    ),
    (
        "empty key",
        [("k", None, b""), ("", None, b"")],
        "ValidationException",
        "Value '' at 'records.2.member.partitionKey'|Member must have length greater than or equal to 1",
    ),
    (
        "long key",
        [(LONG_KEY, None, b"")],
        "ValidationException",
        f"Value '{LONG_KEY}' at 'records.1.member.partitionKey'|Member must have length less than or equal to 256",
    ),
    (
        "key and data above 1 MiB",
        [("k", None, bytes(MIB))],
        "ValidationException",
        "Value at 'records.1.member.data'|Member must have length less than or equal to 1048576",
    ),
    (
        "hash key of letters",
        [("k", "abc", b"")],
        "ValidationException",
        (
            r"Value 'abc' at 'records.1.member.explicitHashKey'|"
            r"Member must satisfy regular expression pattern: 0|([1-9]\d{0,38})"
        ),
    ),
    (
        "empty hash key",
        [("k", "", b"")],
        "ValidationException",
        (
            r"Value '' at 'records.1.member.explicitHashKey'|"
            r"Member must satisfy regular expression pattern: 0|([1-9]\d{0,38})"
        ),
    ),
    (
        "hash key with a leading zero",
        [("k", "007", b"")],
        "ValidationException",
        (
            r"Value '007' at 'records.1.member.explicitHashKey'|"
            r"Member must satisfy regular expression pattern: 0|([1-9]\d{0,38})"
        ),
    ),
]


@pytest.mark.parametrize(("records", "code", "words"), [pytest.param(*row[1:], id=row[0]) for row in REFUSED_PUTS])
def test_an_invalid_record_fails_the_whole_request(records: list[PutRecord], code: str, words: str) -> None:
    kinesis = FakeKinesis({"orders": 1})
    path, constraint = words.split("|", 1)
    message = f"1 validation error detected: {path} failed to satisfy constraint: {constraint}"
    with refused(code, message):
        kinesis.put_records("orders", records, now=0.0)
    assert kinesis.records("orders") == []
    assert kinesis.statistics("orders").put_requests == 0


def test_a_hash_key_of_129_bits_is_an_invalid_argument() -> None:
    kinesis = FakeKinesis({"orders": 1})
    message = (
        f"Invalid ExplicitHashKey. ExplicitHashKey must be in the range: [0, 2^128-1]. Specified value was {2**128}"
    )
    with refused("InvalidArgumentException", message):
        kinesis.put_records("orders", [("k", str(2**128), b"")], now=0.0)


def test_a_request_above_10_mib_with_its_keys_is_an_invalid_argument() -> None:
    kinesis = FakeKinesis({"orders": 1}, enforce_limits=False)
    assert len(kinesis.put_records("orders", TOO_MUCH[:-1], now=0.0)) == 10  # 10 MiB exactly
    with refused("InvalidArgumentException", "Records size exceeds 10 MB limit"):
        kinesis.put_records("orders", TOO_MUCH, now=0.0)


def test_the_size_of_a_key_is_counted_in_bytes() -> None:
    kinesis = FakeKinesis({"orders": 1}, enforce_limits=False)
    key = "🚀" * 256
    kinesis.put_records("orders", [(key, None, bytes(MIB - 1024))], now=0.0)
    assert kinesis.statistics("orders").bytes_stored == MIB
    with pytest.raises(KinesisError, match="1048576"):
        kinesis.put_records("orders", [(key, None, bytes(MIB - 1023))], now=0.0)


def test_a_key_that_is_not_valid_unicode_is_a_serialization_error() -> None:
    kinesis = FakeKinesis({"orders": 1})
    with pytest.raises(KinesisError, match="SerializationException"):
        kinesis.put_records("orders", [("\ud800", None, b"")], now=0.0)


def test_put_record_names_members_without_an_index_and_raises_when_throttled() -> None:
    kinesis = FakeKinesis({"orders": 1}, limits=ServiceLimits(records_per_second_per_shard=1.0))
    message = "1 validation error detected: Value '' at 'partitionKey' failed to satisfy constraint: "
    with pytest.raises(KinesisError, match=message):
        kinesis.put_record("orders", ("", None, b""), now=0.0)
    assert kinesis.put_record("orders", ("k", None, b""), now=0.0).shard_id == FIRST
    throttled = f"Rate exceeded for shard {FIRST} in stream orders {ACCOUNT}."
    with refused("ProvisionedThroughputExceededException", throttled):
        kinesis.put_record("orders", ("k", None, b""), now=0.0)


def test_a_shard_accepts_1000_records_at_once_and_1000_a_second() -> None:
    kinesis = FakeKinesis({"orders": 1})
    records: list[PutRecord] = [("k", None, b"")] * 500

    def stored(now: float) -> int:
        return sum(entry.error_code is None for entry in kinesis.put_records("orders", records, now=now))

    assert [stored(0.0), stored(0.0), stored(0.0)] == [500, 500, 0]
    assert [stored(0.1), stored(0.1), stored(0.6), stored(0.6)] == [100, 0, 500, 0]
    assert stored(100.0) + stored(100.0) + stored(100.0) == 1000


def test_a_shard_accepts_one_mebibyte_of_keys_and_data_a_second() -> None:
    kinesis = FakeKinesis({"orders": 1})
    half: PutRecord = ("kkkk", None, bytes(MIB // 2 - 4))
    entries = kinesis.put_records("orders", [half, half, ("k", None, b""), half], now=0.0)
    assert [entry.error_code for entry in entries] == [None, None, *["ProvisionedThroughputExceededException"] * 2]
    assert entries[2].error_message == f"Rate exceeded for shard {FIRST} in stream orders {ACCOUNT}."
    assert kinesis.put_records("orders", [half], now=0.5)[0].error_code is None
    statistics = kinesis.statistics("orders")
    assert (statistics.records_offered, statistics.records_stored, statistics.records_throttled) == (5, 3, 2)
    assert statistics.bytes_stored == 3 * MIB // 2


def test_a_full_shard_does_not_throttle_another_shard() -> None:
    kinesis = FakeKinesis({"orders": 2}, limits=ServiceLimits(records_per_second_per_shard=2.0))
    first: PutRecord = ("k", "0", b"")
    second: PutRecord = ("k", str(2**128 - 1), b"")
    records = [first] * 3 + [second] * 2
    entries = kinesis.put_records("orders", records, now=0.0)
    assert [entry.shard_id for entry in entries] == [FIRST, FIRST, None, SECOND, SECOND]


def test_a_large_record_passes_a_full_shard_and_leaves_it_in_debt() -> None:
    kinesis = FakeKinesis({"orders": 1})
    kinesis.update_max_record_size("orders", max_record_size_kib=10 * KIB, now=0.0)
    large: PutRecord = ("k", None, bytes(5 * MIB - 1))

    def stored(record: PutRecord, now: float) -> bool:
        return kinesis.put_records("orders", [record], now=now)[0].error_code is None

    assert stored(large, 0.0)
    assert not stored(("k", None, b""), 3.9)  # 4 MiB in debt, 1 MiB a second
    assert stored(("k", None, b""), 4.1)
    assert not stored(large, 4.5)  # the bucket is not full again
    assert stored(large, 6.0)


def test_limits_can_be_turned_off_and_scaled() -> None:
    records: list[PutRecord] = [("k", None, b"")] * 500
    kinesis = FakeKinesis({"orders": 1}, limits=ServiceLimits().scaled(0.1))
    assert sum(entry.error_code is None for entry in kinesis.put_records("orders", records, now=0.0)) == 100
    kinesis.enforce_limits = False
    assert sum(entry.error_code is None for entry in kinesis.put_records("orders", records, now=0.0)) == 500


def test_a_stream_is_created_described_and_deleted() -> None:
    kinesis = FakeKinesis(epoch=1_000.0)
    kinesis.create_stream("orders", shard_count=3, now=2.5)
    summary = kinesis.describe_stream_summary("orders", now=2.5)
    assert summary.stream_arn == "arn:aws:kinesis:us-east-1:000000000000:stream/orders"
    assert (summary.stream_status, summary.stream_mode, summary.created_ms) == ("ACTIVE", "PROVISIONED", 1_002_500)
    assert (summary.open_shard_count, summary.max_record_size_kib, summary.retention_hours) == (3, 1024, 24)
    with refused("ResourceInUseException", f"Stream orders {ACCOUNT} already exists."):
        kinesis.create_stream("orders", shard_count=1, now=3.0)
    kinesis.delete_stream("orders", now=4.0)
    with refused("ResourceNotFoundException", f"Stream orders {ACCOUNT} not found."):
        kinesis.describe_stream_summary("orders", now=4.0)


def test_an_on_demand_stream_has_four_shards_and_is_not_split_by_hand() -> None:
    kinesis = FakeKinesis()
    kinesis.create_stream("orders", mode="ON_DEMAND", now=0.0)
    assert len(kinesis.open_shards("orders")) == 4
    with refused("ValidationException", f"Request is invalid. Stream orders {ACCOUNT} is in On-Demand mode."):
        kinesis.split_shard("orders", shard_id=FIRST, new_starting_hash_key=5, now=0.0)
    with pytest.raises(KinesisError, match="ShardCount cannot be provided"):
        kinesis.create_stream("other", mode="ON_DEMAND", shard_count=4, now=0.0)
    with pytest.raises(KinesisError, match="ShardCount must be provided"):
        kinesis.create_stream("other", now=0.0)


@pytest.mark.parametrize("name", ["", "with space", "a" * 129])
def test_an_invalid_stream_name_is_rejected(name: str) -> None:
    with pytest.raises(KinesisError, match="at 'streamName' failed to satisfy constraint"):
        FakeKinesis().create_stream(name, shard_count=1, now=0.0)


@pytest.mark.parametrize("shards", [0, -1])
def test_a_stream_without_shards_is_rejected(shards: int) -> None:
    with pytest.raises(KinesisError, match="at 'shardCount' failed to satisfy constraint: Member must have value"):
        FakeKinesis({"orders": shards})


def test_an_account_cannot_exceed_its_shard_quota() -> None:
    kinesis = FakeKinesis({"orders": 2}, limits=ServiceLimits(shards_per_account=3))
    with pytest.raises(KinesisError, match=r"Current shard count for the account: 2. Limit: 3."):
        kinesis.create_stream("other", shard_count=2, now=0.0)
    with pytest.raises(KinesisError, match="cannot be greater than 3"):
        kinesis.update_shard_count("orders", target_shard_count=4, now=0.0)
    kinesis.split_shard("orders", shard_id=FIRST, new_starting_hash_key=5, now=0.0)
    with pytest.raises(KinesisError, match="LimitExceededException"):
        kinesis.split_shard("orders", shard_id=SECOND, new_starting_hash_key=2**127 + 5, now=0.0)


def test_the_shards_of_a_deleted_stream_do_not_count_against_the_quota() -> None:
    limits, durations = ServiceLimits(shards_per_account=3), ServiceDurations(deleting_seconds=2.0)
    kinesis = FakeKinesis({"orders": 2}, limits=limits, durations=durations)
    kinesis.delete_stream("orders", now=0.0)
    with pytest.raises(KinesisError, match="LimitExceededException"):
        kinesis.create_stream("other", shard_count=3, now=1.9)
    kinesis.create_stream("other", shard_count=3, now=2.0)
    assert [stream.stream_name for stream in kinesis.list_streams(now=2.0).streams] == ["other"]


def test_changes_of_a_stream_take_the_configured_durations() -> None:
    durations = ServiceDurations(creating_seconds=1.0, updating_seconds=2.0, deleting_seconds=3.0)
    kinesis = FakeKinesis({"ready": 1}, durations=durations)

    def status(now: float, stream: str = "orders") -> str:
        return kinesis.describe_stream_summary(stream, now=now).stream_status

    assert status(0.0, "ready") == "ACTIVE"
    kinesis.create_stream("orders", shard_count=1, now=0.0)
    assert status(0.9) == "CREATING"
    assert kinesis.describe_stream("orders", now=0.9).shards == ()
    with refused("ResourceNotFoundException", f"Stream orders {ACCOUNT} not found."):
        kinesis.put_records("orders", [("k", None, b"")], now=0.9)
    assert status(1.0) == "ACTIVE"

    kinesis.split_shard("orders", shard_id=FIRST, new_starting_hash_key=2**127, now=2.0)
    assert status(3.9) == "UPDATING"
    with refused("ResourceInUseException", f"Stream orders {ACCOUNT} not ACTIVE, instead in state UPDATING"):
        kinesis.split_shard("orders", shard_id=FIRST, new_starting_hash_key=2**127, now=3.9)
    assert kinesis.put_records("orders", [("k", "0", b"")], now=3.9)[0].shard_id == FIRST
    assert kinesis.put_records("orders", [("k", "0", b"")], now=4.0)[0].shard_id == SECOND
    assert status(4.0) == "ACTIVE"

    kinesis.delete_stream("orders", now=5.0)
    assert status(7.9) == "DELETING"
    with pytest.raises(KinesisError, match="not found"):
        kinesis.put_records("orders", [("k", None, b"")], now=7.9)
    kinesis.create_stream("other", shard_count=1, now=8.0)
    with pytest.raises(KinesisError, match="not found"):
        status(8.0)


def test_the_record_limit_follows_update_max_record_size() -> None:
    kinesis = FakeKinesis({"orders": 1}, enforce_limits=False)
    big: PutRecord = ("k", None, bytes(10 * MIB - 1))
    with pytest.raises(KinesisError, match="1048576"):
        kinesis.put_records("orders", [big], now=0.0)
    kinesis.update_max_record_size(kinesis.arn("orders"), max_record_size_kib=10_240, now=0.0)
    assert kinesis.describe_stream_summary("orders", now=0.0).max_record_size_kib == 10_240
    assert kinesis.put_records("orders", [big], now=0.0)[0].shard_id == FIRST
    for size in (1023, 10_241):
        with pytest.raises(KinesisError, match=f"Value '{size}' at 'maxRecordSizeInKiB' failed"):
            kinesis.update_max_record_size("orders", max_record_size_kib=size, now=0.0)
    kinesis.create_stream("large", shard_count=1, max_record_size_kib=2048, now=0.0)
    assert kinesis.describe_stream_summary("large", now=0.0).max_record_size_kib == 2048


def test_streams_are_listed_by_name_in_pages() -> None:
    kinesis = FakeKinesis(dict.fromkeys(["c", "a", "b"], 1))
    first = kinesis.list_streams(limit=2, now=0.0)
    assert [stream.stream_name for stream in first.streams] == ["a", "b"]
    second = kinesis.list_streams(limit=2, next_token=first.next_token, now=299.0)
    assert ([stream.stream_name for stream in second.streams], second.next_token) == (["c"], None)
    after = kinesis.list_streams(exclusive_start_stream_name="a", now=0.0)
    assert [stream.stream_name for stream in after.streams] == ["b", "c"]
    with pytest.raises(KinesisError, match="ExpiredNextTokenException"):
        kinesis.list_streams(next_token=first.next_token, now=300.0)
    with pytest.raises(KinesisError, match="NextToken is invalid"):
        kinesis.list_streams(next_token="made up", now=0.0)


def test_calls_are_counted_by_operation() -> None:
    kinesis = FakeKinesis({"orders": 1})
    kinesis.put_records("orders", [("k", None, b"")], now=0.0)
    kinesis.list_shards("orders", now=0.0)
    kinesis.list_shards("orders", now=0.0)
    assert kinesis.calls == {"PutRecords": 1, "ListShards": 2}
    assert kinesis.statistics("orders").list_shards_requests == 2


def test_records_past_retention_are_trimmed_and_their_memory_is_freed() -> None:
    kinesis = FakeKinesis({"orders": 1}, enforce_limits=False, limits=ServiceLimits(retention_seconds=10.0))
    for second in range(100):
        kinesis.put_records("orders", [("k", None, b"%d" % second)] * 500, now=float(second))
    held = kinesis.records("orders")
    assert len(held) <= 2 * 11 * 500 + 1024
    iterator = kinesis.get_shard_iterator("orders", shard_id=FIRST, now=99.0)
    assert kinesis.get_records(iterator, limit=1, now=99.0).records[0].data == b"89"


def test_the_repr_shows_the_streams_and_shards() -> None:
    kinesis = FakeKinesis({"orders": 2})
    assert repr(kinesis) == "<FakeKinesis <FakeStream orders ACTIVE 2 open shards>>"
