"""A group put in slices is accepted as a whole or not at all, and every record of it arrives once."""

from collections import Counter
from typing import Any

import anyio
import anyio.lowlevel
import pytest

from kpl_core import BufferFull, InvalidUserRecord, Producer, TierPolicy, UserRecord
from kpl_core.producer.internal import SLICE_BYTES, SLICE_RECORDS
from tests.producer.test_put_together import fair, pairs, records
from tests.support.producer_scene import STREAM, assert_books_close, stored, unmetered

pytestmark = pytest.mark.anyio


@pytest.mark.parametrize("count", [1, SLICE_RECORDS, 3 * SLICE_RECORDS + 1])
@pytest.mark.parametrize("is_cut_short", [True, False])
async def test_all_records_of_a_group_arrive_once(count, is_cut_short):
    transport = unmetered(4)
    put = [*records(count), UserRecord("x", b"with a hash key", explicit_hash_key="12345")]
    async with Producer(fair(), transport=transport) as producer:
        group = producer.internal.begin_group(STREAM, put, flow="t")
        assert producer.buffer_limit.outstanding_records == len(put)
        while group.step() and not is_cut_short:
            pass
        group.finish()
        assert not group.step()
        results = [await delivery for delivery in group.deliveries]
        assert len(results) == len(put)
        pair_group = producer.internal.begin_group(STREAM, pairs(count), flow="t")
        pair_group.finish()
        assert all([(await delivery).successful for delivery in pair_group.deliveries])
        assert len(pair_group.deliveries) == count
        report = await producer.close()
    assert report.accepted == report.delivered == len(put) + count
    expected = Counter((each.partition_key, each.data) for each in put) + Counter(pairs(count))
    assert Counter(stored(transport)) == expected


async def test_a_slice_has_few_records_or_few_bytes():
    async with Producer(fair(), transport=unmetered(1)) as producer:
        for size in (10, 2_000, 200_000, SLICE_BYTES + 1):
            count = min(2 * SLICE_RECORDS, 20_000_000 // size)
            group = producer.internal.begin_group(STREAM, records(count, size=size), flow="t")
            before = 0
            while True:
                has_more = group.step()
                taken = len(group.deliveries) - before
                before += taken
                assert 1 <= taken <= SLICE_RECORDS
                assert (taken - 1) * size < SLICE_BYTES
                if not has_more:
                    break
            await producer.flush()


async def test_a_group_without_room_takes_nothing():
    async with Producer(fair(max_outstanding_records=100), transport=unmetered(1)) as producer:
        with pytest.raises(BufferFull):
            producer.internal.begin_group(STREAM, records(101), flow="t")
        assert producer.buffer_limit.outstanding_records == 0
        group = producer.internal.begin_group(STREAM, records(90), flow="t")
        # The room is taken, although no record is put yet.
        with pytest.raises(BufferFull):
            producer.internal.put_together_nowait(STREAM, records(20), flow="u")
        group.finish()


@pytest.mark.parametrize("are_pairs", [True, False])
async def test_a_record_that_is_too_large_refuses_the_group(are_pairs):
    async with Producer(fair(), transport=unmetered(1)) as producer:
        most = producer.internal.max_record_bytes(STREAM)
        put = [*pairs(3), ("k", bytes(most))] if are_pairs else [*records(3), UserRecord("k", bytes(most))]
        with pytest.raises(InvalidUserRecord, match=r"partition_key and data have 1,048,577 bytes"):
            producer.internal.begin_group(STREAM, put, flow="t")
        assert producer.buffer_limit.outstanding_records == 0


@pytest.mark.parametrize("are_pairs", [True, False])
async def test_a_close_delivers_all_records_of_an_open_group(are_pairs):
    async with Producer(fair(), transport=unmetered(1)) as producer:
        group = producer.internal.begin_group(STREAM, pairs(1_000) if are_pairs else records(1_000), flow="t")
        group.step()
        report = await producer.close()
        assert (report.accepted, report.delivered, report.complete) == (1_000, 1_000, True)
        assert producer.buffer_limit.outstanding_records == 0
        group.finish()
        assert not group.step()
        assert producer.report() == report
        assert all(delivery.result().successful for delivery in group.deliveries)


async def test_a_cancelled_producer_gives_all_records_of_an_open_group_a_result():
    producer = Producer(fair(), transport=unmetered(1))
    with anyio.CancelScope() as scope:
        async with producer:
            group = producer.internal.begin_group(STREAM, records(1_000), flow="t")
            group.step()
            scope.cancel()
            await anyio.lowlevel.checkpoint()
    assert_books_close(producer.report(), group.deliveries)
    assert len(group.deliveries) == 1_000


@pytest.mark.parametrize(
    ("bad", "error", "message"),
    [
        (("", b"x"), InvalidUserRecord, "partition_key has 0 characters"),
        (("k" * 257, b"x"), InvalidUserRecord, "partition_key has 257 characters"),
        (("\ud800", b"x"), InvalidUserRecord, "lone surrogate"),
        ((5, b"x"), TypeError, "partition_key must be a str"),
        (("k", "text"), TypeError, "data must be bytes"),
        (UserRecord("", b"x"), InvalidUserRecord, "partition_key has 0 characters"),
        (UserRecord("k", b"x", explicit_hash_key="abc"), InvalidUserRecord, "explicit_hash_key is 'abc'"),
        (UserRecord("k", "text"), TypeError, "data must be bytes"),  # type: ignore[arg-type] # as callers do
    ],
)
async def test_an_invalid_record_refuses_the_group_and_takes_no_room(bad, error, message):
    make: Any = pairs if type(bad) is tuple else records
    async with Producer(fair(), transport=unmetered(1)) as producer:
        with pytest.raises(error, match=message):
            producer.internal.begin_group(STREAM, [*make(3), bad, *make(600)], flow="t")
        assert producer.buffer_limit.outstanding_records == 0
    assert producer.report().accepted == 0


@pytest.mark.parametrize(
    ("put", "message"),
    [
        ([("k", b"x", "1"), ("k", b"x")], r"records\[1\] has 2 items and records\[0\] has 3"),
        ([("k", b"x"), ("k", b"x"), ("k", b"x", "1")], r"records\[2\] has 3 items and records\[0\] has 2"),
        ([("k", b"x"), ("k", b"x"), ("k",)], r"records\[2\] has 1 items and records\[0\] has 2"),
        ([("k", b"x", "1", 2)], r"records\[0\] has 4 items"),
        (
            [("k", b"x", "1"), ("k", b"x", None)],
            "explicit_hash_key must be a str of decimal digits or None, not NoneType",
        ),
        ([("k", b"x", "1"), ("k", b"x", 7)], "explicit_hash_key must be a str of decimal digits or None, not int"),
    ],
)
@pytest.mark.parametrize("known_before", [True, False])
async def test_pairs_that_are_not_alike_are_refused_and_take_no_room(put, message, known_before):
    async with Producer(fair(), transport=unmetered(1)) as producer:
        if known_before:
            producer.internal.put_pairs_together_nowait(STREAM, [("k", b"x")])
            producer.internal.put_pairs_together_nowait(STREAM, [("k", b"x", "1")])
        accepted = producer.report().accepted
        with pytest.raises(TypeError, match=message) as caught:
            producer.internal.begin_group(STREAM, put, flow="t")
        assert "records[" in str(caught.value)
        with pytest.raises(TypeError, match=message):
            producer.internal.put_pairs_together_nowait(STREAM, put, flow="t")
        assert producer.buffer_limit.outstanding_records == producer.report().accepted == accepted


async def test_an_invalid_flow_refuses_the_group_and_takes_no_room():
    async with Producer(fair(), transport=unmetered(1)) as producer:
        with pytest.raises(InvalidUserRecord, match="flow has a lone surrogate"):
            producer.internal.begin_group(STREAM, records(3), flow="\ud800")
        assert producer.buffer_limit.outstanding_records == 0


@pytest.mark.parametrize("are_pairs", [True, False])
async def test_a_buffer_that_changes_later_does_not_change_the_group(are_pairs):
    transport = unmetered(1)
    buffer = bytearray(b"before")
    put: list[Any] = [("k", b"first"), ("k", buffer)]
    async with Producer(fair(), transport=transport) as producer:
        group = producer.internal.begin_group(
            STREAM, put if are_pairs else [UserRecord(*each) for each in put], flow="t"
        )
        buffer[:] = b"after!"
        group.finish()
    assert Counter(stored(transport)) == Counter([("k", b"first"), ("k", b"before")])


@pytest.mark.parametrize("options", [{"aggregate": True}, {"aggregate": False}, {"tier": "bulk"}, None])
async def test_a_lower_size_limit_does_not_refuse_records_of_an_accepted_group(options):
    put: Any = [("k", bytes(2_000))] * 600 if options is None else [UserRecord("k", bytes(2_000))] * 600
    async with Producer(fair(tiers=TierPolicy()), transport=unmetered(1)) as producer:
        group = producer.internal.begin_group(STREAM, put, flow="t", **options or {})
        group.step()
        producer._life.pipeline(STREAM).max_record_bytes = 1_000  # noqa: SLF001 - as the stream's description does
        with pytest.raises(InvalidUserRecord, match="accepts at most 1,000"):
            producer.internal.begin_group(STREAM, put, flow="t", **options or {})
        assert group.step()
        group.finish()
        report = await producer.close()
    assert (report.accepted, report.delivered) == (600, 600)
