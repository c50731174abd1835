import gc

from hypothesis import given, strategies as st

from kpl_core.records.put_records import PutRecordsRequest
from kpl_core.records.record_result import Attempt
from kpl_core.records.user_record import UserRecord
from tests.support.material import digest, hash_key, kinesis_record, shard_id, user_records

FAILED = Attempt(False, "InternalFailure", "", 0.0, 1.0)


@given(st.lists(user_records, min_size=1, max_size=6))
def test_its_user_records_can_be_read_back_with_their_hash_keys(records):
    record = kinesis_record(*records)
    assert list(record.user_records()) == records
    assert record.digests() == [
        digest(hash_key(each.partition_key) if each.explicit_hash_key is None else int(each.explicit_hash_key))
        for each in records
    ]
    assert record.user_record_count == len(records)


def test_each_user_record_keeps_its_attempts_when_its_kinesis_record_is_taken_apart():
    record = kinesis_record(
        UserRecord("a", b"1"), UserRecord("b", b"2", "7"), arrivals=(3.0, 4.0), tier="bulk", generation=5
    )
    record.outcome.attempted(FAILED)
    first, second = record.take_apart()
    assert (first.user_record, first.arrived_at, first.index) == (UserRecord("a", b"1"), 3.0, 0)
    assert (second.user_record, second.arrived_at, second.index) == (UserRecord("b", b"2", "7"), 4.0, 1)
    for moving in (first, second):
        assert (moving.tier, moving.generation, moving.outcome) == ("bulk", 5, record.outcome)
        assert moving.history is not None
        assert moving.history.to_tuple() == (FAILED,)


def test_another_attempt_does_not_change_the_history_of_the_others():
    (moving,) = kinesis_record(UserRecord("a", b"1")).take_apart()
    later = moving.after(FAILED)
    assert later.history is not None
    assert later.history.to_tuple() == (FAILED,)
    assert moving.history is None


def test_the_repr_of_a_kinesis_record_shows_its_kind_and_size():
    single, many = kinesis_record(UserRecord("k", b"x")), kinesis_record(*[UserRecord("k", b"")] * 3)
    assert repr(single) == f"<KinesisRecord single, 1 user records, 2 bytes, {shard_id(0)}>"
    assert repr(many).startswith("<KinesisRecord aggregated, 3 user records, ")
    assert repr(PutRecordsRequest("s", [single], started_at=0.0)) == "<PutRecordsRequest 's', 1 records, 2 bytes>"


def test_a_kinesis_record_is_not_tracked_by_the_garbage_collector():
    assert not gc.is_tracked(kinesis_record())
