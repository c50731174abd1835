"""The open aggregated record in C does what the one in Python does, to the byte."""

import hashlib
from bisect import bisect_left
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

from kpl_core.pipeline import open_record
from kpl_core.pipeline.open_record import (
    PythonOpenRecord,
    python_append_pairs,
    python_plain_until,
    python_sealed,
)
from kpl_core.producer.checked_records import checked_pairs
from kpl_core.producer.delivery import Deliveries, Delivery
from kpl_core.records.aggregated_record import MAGIC, explicit_hash_key_entry, record_head
from kpl_core.records.hash_key import are_explicit_hash_keys, md5
from kpl_core.records.outcome import UNPUT, Outcome


def entry(key: str) -> bytes:
    return b"\x0a" + bytes([len(key.encode())]) + key.encode()


def state(record: PythonOpenRecord, keys: list[str]) -> list[object]:
    whole = [record.size, record.limit, record.user_bytes, record.arrivals, record.aggregated()]
    explicit = [record.explicit_count, [record.explicit_index(str(at)) for at in range(400)]]
    return [*whole, *explicit, record.key_count, [record.key_index(key) for key in keys]]


keys = st.one_of(
    st.sampled_from([f"key-{number}" for number in range(6)]), st.text("aé\U0001f600", min_size=1, max_size=20)
)
datas = st.one_of(st.binary(max_size=40), st.integers(0, 20_000).map(bytes), st.sampled_from([bytes(127), bytes(1280)]))
puts = st.tuples(keys, datas)
hash_keys = st.one_of(st.integers(0, 5), st.integers(0, 299), st.integers(0, 2**128 - 1))
explicit_puts = st.tuples(keys, datas, hash_keys.map(str))
wrong_hash_keys = ["", "01", "-1", "+1", " 1", "1a", "٣", str(2**128), str(2**129), "1" * 40, None, 7, b"1", "\ud800"]
odd_hash_keys = st.sampled_from([("k", b"x", each) for each in wrong_hash_keys])
steps = st.one_of(
    st.tuples(st.just("append"), puts),
    st.tuples(st.just("add"), puts),
    st.tuples(st.just("explicit"), st.integers(300, 400)),
    st.tuples(st.just("limit"), st.integers(-1, 60_000)),
    st.tuples(st.just("restart"), st.none()),
)


def take(record: PythonOpenRecord, step: str, given_: object, now: float) -> object:
    """Take a step of the test; return what the record answered, with deliveries as (is its outcome, index)."""
    match step, given_:
        case "limit", int(limit):
            record.limit = limit
        case "restart", _:
            record.restart(Outcome())
        case "explicit", int(number) if record.explicit_index(str(number)) is None:
            index, explicit = record.key_index("k"), (str(number), explicit_hash_key_entry(str(number)))
            head = record_head(record.key_count if index is None else index, record.explicit_count, 1)
            added = record.add("k", entry("k"), head, b"x", 2, now, *explicit)
            return type(added), added.outcome is record.outcome, added.index
        case _, (str(key), bytes(data)):
            if step == "append":
                delivery = record.append(key, entry(key), data, len(key) + len(data), now)
            else:
                index = record.key_index(key)
                head = record_head(record.key_count if index is None else index, None, len(data))
                delivery = record.add(key, entry(key), head, data, len(key) + len(data), now)
                record.size += len(head) + len(data)
                assert record.key_index(record.first_key) == 0
                if len(record.arrivals) == 1:
                    assert record.only_data == data
            return delivery and (type(delivery), delivery.outcome is record.outcome, delivery.index)
    return None


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow, HealthCheck.data_too_large])
@given(st.lists(steps, max_size=30))
def test_both_records_have_the_same_bytes_after_any_steps(in_c, drawn):
    first, second = PythonOpenRecord(Delivery), in_c.OpenRecord(Delivery)
    first.restart(Outcome())
    second.restart(Outcome())
    seen = [str(given_[0]) for _, given_ in drawn if isinstance(given_, tuple)]
    for number, (step, given_) in enumerate(drawn):
        now = float(number)
        assert take(first, step, given_, now) == take(second, step, given_, now)
        assert state(first, seen) == state(second, seen)


odd = st.one_of(
    st.sampled_from([("key-1", bytearray(b"x")), ("key-1", "x"), ("", b"x"), ("\ud800", b"x"), "no pair"]),
    st.sampled_from([("single", b"x"), ("new", b"x")]),
)


def shard_ends(count: int) -> list[bytes]:
    return [((number + 1) * 2**128 // count - 1).to_bytes(16, "big") for number in range(count)]


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.one_of(
        st.lists(st.one_of(puts, odd), max_size=30),
        st.lists(st.one_of(explicit_puts, odd_hash_keys, puts), max_size=30),
        # Few keys with many explicit hash keys, or the other way round.
        st.builds(
            lambda count, keys: [(f"{at % keys}", bytes(at % 9), f"{at % (500 // keys)}") for at in range(count)],
            st.integers(100, 200),
            st.sampled_from([1, 7, 500]),
        ),
    ),
    st.integers(1, 5),
    st.tuples(st.integers(0, 5), st.integers(0, 40)),
    st.tuples(st.integers(-20, 30), st.integers(0, 20_000)),
    st.lists(st.integers(-1, 20_000), min_size=5, max_size=5),
    st.booleans(),
)
def test_both_put_the_same_pairs_and_stop_at_the_same_one(in_c, pairs, shards, part, room, limits, has_handles):
    ends = shard_ends(shards)
    has_hash_keys = any(len(pair) > 2 for pair in pairs if isinstance(pair, tuple))
    lone = set() if has_hash_keys else {bisect_left(ends, md5(key).digest()) for key in (b"single", b"new")}
    outcomes = []
    for make, append_pairs in ((PythonOpenRecord, python_append_pairs), (in_c.OpenRecord, in_c.append_pairs)):
        # A lane without an open record, and one that is not known yet.
        records = [None if number in lone else make(Delivery) for number in range(shards)]
        for record, limit in zip(records, limits, strict=False):
            if record is not None:
                record.restart(Outcome())
                record.limit = limit
        routes: dict[str, Any] = {}
        for key in {pair[0] for pair in pairs if isinstance(pair, tuple)} - {"", "\ud800", "new"}:
            position = bisect_left(ends, md5(key.encode()).digest())
            routes[key] = (None, entry(key), len(key.encode()), records[position])
        explicit_routes: dict[str, Any] = {}
        for _, _, text in (pair for pair in pairs if isinstance(pair, tuple) and len(pair) > 2):
            if isinstance(text, str) and are_explicit_hash_keys([text]):
                lane = SimpleNamespace(open_record=records[bisect_left(ends, int(text).to_bytes(16, "big"))])
                explicit_routes[text] = (lane, explicit_hash_key_entry(text))
        router = SimpleNamespace(routes=routes, explicit_routes=explicit_routes, table=(b"".join(ends), records))
        handles = Deliveries(len(pairs))
        answer = append_pairs(pairs, part, router, room, 1.5, handles if has_handles else None)
        places = {record.outcome: number for number, record in enumerate(records) if record}
        placed = [None if each == UNPUT else places[handles.outcomes[each]] for each in handles.places[::2]]
        assert len(handles.outcomes) <= len(places)
        outcomes.append(
            (answer, placed, list(handles.places[1::2]), [state(record, []) for record in records if record])
        )
    assert outcomes[0] == outcomes[1]


def test_the_version_in_python_stops_at_a_hash_key_whose_lane_has_no_open_record():
    record = PythonOpenRecord(Delivery)
    record.limit = 1_000
    routes = {"k": (None, entry("k"), 1, record)}
    explicit_routes = {"1": (SimpleNamespace(open_record=None), b"")}
    router = SimpleNamespace(routes=routes, explicit_routes=explicit_routes, table=None)
    assert python_append_pairs([("k", b"x"), ("k", b"x", "1")], (0, 2), router, (9, 99), 0.0, None) == (1, 2)


def test_the_version_in_python_looks_at_records_that_are_not_plain_only_once(monkeypatch):
    looked_at = []
    plain_bytes = open_record._plain_bytes  # noqa: SLF001 - its cost is the number of records

    def counted(records: list[Any], *rest: Any) -> int | None:
        looked_at.append(len(records))
        return plain_bytes(records, *rest)

    monkeypatch.setattr(open_record, "_plain_bytes", counted)
    pairs = [("é", b"x")] * 5_000
    checked, size_bytes = checked_pairs(pairs, max_record_bytes=100)
    assert (checked, size_bytes) == (pairs, 15_000)
    assert sum(looked_at) <= 2 * 500


def test_a_router_without_a_table_lets_append_pairs_put_nothing(in_c):
    router = SimpleNamespace(routes={}, table=None)
    assert in_c.append_pairs([("k", b"")], (0, 1), router, (1, 1), 0.0, Deliveries(1)) == (0, 0)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.one_of(st.lists(st.one_of(puts, odd, odd_hash_keys)), st.lists(st.one_of(explicit_puts, odd_hash_keys))),
    st.integers(0, 9),
    st.integers(2, 3),
    st.integers(0, 200),
)
def test_both_stop_at_the_same_record_that_is_not_plain(in_c, records, start, parts, most):
    assert in_c.plain_until(records, start, parts, most) == python_plain_until(records, start, parts, most)


@pytest.mark.parametrize("count", [0, 1, 499, 500, 501, 1_700])
@pytest.mark.parametrize("odd", [("ключ", b""), ("k", 1), None])
def test_the_version_in_python_looks_at_many_at_once_and_finds_the_same_one(count, odd):
    records: list[Any] = [("k", b"x" * (at % 3)) for at in range(count)]
    for first in {at for at in (0, 3, 499, 500, 1_234) if odd is not None and at < count} | {count}:
        put = records if first == count else [*records[:first], odd, *records[first:]]
        assert python_plain_until(put, 0, 2, 100) == (first, sum(1 + len(data) for _, data in records[:first]))


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.one_of(st.integers(0, 300), st.integers(300, 5_000)), max_size=40), st.randoms())
def test_both_seal_aggregated_records_of_any_size_alike(in_c, sizes, chance):
    records = [MAGIC + chance.randbytes(size) + bytes(16) for size in sizes]
    with_digests = python_sealed(records)
    assert all(each[-16:] == md5(each[4:-16]).digest() for each in with_digests)
    assert in_c.sealed([bytes(bytearray(each)) for each in records]) == with_digests


def test_the_digest_is_right_for_every_length_around_a_block_and_for_large_records(in_c):
    sizes = [*range(301), 51_180, 1_000_000, 64]
    records = [MAGIC + bytes([size % 251]) * size + bytes(16) for size in sizes]
    expected = python_sealed(records)
    assert in_c.sealed(records) == expected
    assert [bytes(each[-16:]) for each in expected[:301]] == [
        hashlib.md5(bytes([size % 251]) * size, usedforsecurity=False).digest() for size in range(301)
    ]


@pytest.mark.parametrize(
    "arguments",
    [
        *[(), (1,), ("k", "entry", b"", 1, 0.0), ("k", b"", "data", 1, 0.0), ("k", b"", b"", "1", 0.0)],
        ("k", b"", b"", 1, "0", "entry"),
    ],
)
def test_wrong_arguments_are_refused_and_change_nothing(in_c, arguments):
    record = in_c.OpenRecord(Delivery)
    record.restart(Outcome())
    record.limit = 1_000
    with pytest.raises(TypeError):
        record.append(*arguments)
    with pytest.raises(AttributeError):
        _ = record.only_data
    with pytest.raises(AttributeError):
        _ = record.first_key
    assert (record.size, record.arrivals, record.aggregated()[4:]) == (20, [], bytes(16))


def test_an_index_below_zero_is_refused(in_c):
    with pytest.raises(TypeError, match="an index of 0 or more"):
        in_c.append_pairs([], (-1, 0), None, (1, 1), 0.0, None)
    with pytest.raises(TypeError, match="an index of 0 or more"):
        in_c.plain_until([], -1, 2, 1)


@pytest.mark.parametrize("count", [0, 1])
def test_arrays_that_are_too_short_are_refused(in_c, count):
    router = SimpleNamespace(table=(b"\xff" * 16, [None]))
    handles = SimpleNamespace(outcomes=[] if count else (), places=bytearray(4 * count))
    with pytest.raises(TypeError, match="a place for each pair" if count else "outcomes in a list"):
        in_c.append_pairs([("k", b"")], (0, 1), router, (1, 1), 0.0, handles)
    router.table = (b"", [None])
    with pytest.raises(TypeError, match="an end for each shard"):
        in_c.append_pairs([("k", b"")], (0, 1), router, (1, 1), 0.0, None)
    with pytest.raises(TypeError, match="room for a digest"):
        in_c.sealed([bytes(19)])
