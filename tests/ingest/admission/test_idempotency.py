"""Within a bounded window, the same key is the same request."""

import pytest
from hypothesis import given, strategies as st

from kpl_integrations.ingest import Refusal, Refused
from kpl_integrations.ingest.admission.idempotency import IdempotencyWindow, StoredAnswer, begin_fingerprint, parse_key
from tests.support.gateway_scene import JSON, STREAM, Client, kinesis, open_gateway, records

ONE = {"partition_key": "k", "data": "x"}


def window(**options):
    return IdempotencyWindow(**{"most_keys": 3, "seconds": 10.0, **options})


def test_a_repetition_gets_the_first_answer():
    keys = window()
    assert keys.begin("a", b"1", 0.0) is None
    keys.finish("a", StoredAnswer(202, b"first"), 0.0)
    assert keys.begin("a", b"1", 9.0) == StoredAnswer(202, b"first")


def test_a_key_expires():
    keys = window()
    assert keys.begin("a", b"1", 0.0) is None
    keys.finish("a", StoredAnswer(202, b""), 0.0)
    assert keys.begin("a", b"2", 10.0) is None


def test_a_rejected_request_frees_its_key():
    keys = window()
    assert keys.begin("a", b"1", 0.0) is None
    keys.forget("a")
    assert keys.begin("a", b"2", 0.0) is None


def test_a_key_in_use_and_a_key_of_another_request_have_different_answers():
    keys = window()
    assert keys.begin("a", b"1", 0.0) is None
    with pytest.raises(Refused) as refused:
        keys.begin("a", b"1", 0.0)
    assert refused.value.refusal is Refusal.KEY_IN_USE
    with pytest.raises(Refused) as refused:
        keys.begin("a", b"2", 0.0)
    assert refused.value.refusal is Refusal.KEY_REUSED


def test_the_key_of_a_request_in_progress_is_not_evicted_and_does_not_expire():
    keys = window()
    assert keys.begin("slow", b"1", 0.0) is None
    for key in "abcdef":
        assert keys.begin(key, b"1", 1.0) is None
        keys.finish(key, StoredAnswer(202, b""), 1.0)
    for request, refusal in ((b"1", Refusal.KEY_IN_USE), (b"2", Refusal.KEY_REUSED)):
        with pytest.raises(Refused) as refused:
            keys.begin("slow", request, 60.0)
        assert refused.value.refusal is refusal
    keys.finish("slow", StoredAnswer(200, b"at last"), 60.0)
    assert keys.begin("slow", b"1", 69.0) == StoredAnswer(200, b"at last")
    assert keys.begin("slow", b"1", 70.0) is None


@given(st.lists(st.tuples(st.integers(0, 20), st.integers(0, 2), st.floats(0, 5), st.integers(0, 200))))
def test_the_window_never_exceeds_its_bounds(steps):
    keys = IdempotencyWindow(most_keys=5, seconds=10.0, most_bytes=500)
    now = 0.0
    for key, request, passed, size in steps:
        now += passed
        try:
            if keys.begin(str(key), bytes([request]), now) is None:
                keys.finish(str(key), StoredAnswer(200, bytes(size)), now)
        except Refused:
            pass
        assert len(keys) <= 5
        assert sum(len(entry.answer.body) for entry in keys._answered.values()) <= 500  # noqa: SLF001


@pytest.mark.parametrize(
    ("value", "key"), [(b'"9f1c"', "9f1c"), (b"9f1c", "9f1c"), (b'  "a b"  ', "a b"), (b"x" * 255, "x" * 255)]
)
def test_a_key_is_a_structured_string_or_unquoted(value, key):
    assert parse_key(value) == key


@pytest.mark.parametrize("value", [b"", b"  ", b"x" * 256, b"\xff", b"a\tb"])
def test_an_invalid_key_is_rejected_without_repeating_it(value):
    with pytest.raises(Refused) as refused:
        parse_key(value)
    assert refused.value.refusal is Refusal.BAD_PARAMETER


def test_the_fingerprint_separates_the_parts_of_a_request():
    assert begin_fingerprint(b"ab", b"c").digest() != begin_fingerprint(b"a", b"bc").digest()


@pytest.mark.anyio
async def test_a_request_that_is_sent_twice_is_put_once():
    transport = kinesis()
    async with open_gateway(transport) as gateway:
        client = Client(gateway)
        first = await client.post(records(5), ack="delivered", idempotency_key="one")
        again = await client.post(records(5), ack="delivered", idempotency_key="one")
        assert (again.status, again.body) == (first.status, first.body)
        assert gateway.producer.report().accepted == 5
        assert (await client.post(records(5), ack="delivered", idempotency_key="two")).status == 200
        assert gateway.producer.report().accepted == 10


@pytest.mark.anyio
async def test_the_key_of_a_rejected_request_can_be_used_again():
    async with open_gateway(max_outstanding_records=10) as gateway:
        client = Client(gateway)
        assert (await client.post(records(11), idempotency_key="one")).status == 413
        assert (await client.post(ONE, idempotency_key="one")).status == 202


BINARY = "application/octet-stream"
EVENT = {"content-type": JSON, "ce-specversion": "1.0", "ce-type": "t", "ce-source": "s", "ce-id": "1"}


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("headers", "other"),
    [
        ({"content-type": BINARY, "x-partition-key": "a"}, {"x-partition-key": "b"}),
        ({"content-type": BINARY, "x-partition-key": "a"}, {"x-explicit-hash-key": "0"}),
        ({"content-type": BINARY, "x-partition-key": "a"}, {"content-encoding": "gzip"}),
        ({"content-type": BINARY}, {"content-type": JSON}),
        (EVENT, {"ce-id": "2"}),
    ],
)
async def test_the_same_body_with_another_decoding_field_is_another_request(headers, other):
    async with open_gateway() as gateway:
        client = Client(gateway)
        path, key = f"/v1/streams/{STREAM}/records", {"idempotency-key": "one"}
        assert (await client.call("POST", path, b"{}", headers={**headers, **key})).status == 202
        again = {**headers, **key, "user-agent": "another", "traceparent": "00-1"}
        assert (await client.call("POST", path, b"{}", headers=again)).status == 202
        assert (await client.call("POST", path, b"{}", headers={**headers, **other, **key})).status == 422
        assert gateway.producer.report().accepted == 1


def test_a_thousand_answers_about_fifty_delivered_records_are_remembered():
    """They took 6 MB, so after an outage a key was forgotten in 0.3 s, and its records were put twice."""
    keys = IdempotencyWindow(most_keys=1_000, seconds=600.0)
    answers = []
    for number in range(1_000):
        # Each record has its own sequence number: the worst case.
        results = [(str(10**55 + 7**number * 1_000 + index), f"shardId-{index % 4:012d}") for index in range(50)]
        answers.append(StoredAnswer(200, repr(results).encode()))
        assert keys.begin(str(number), b"1", 0.0) is None
        keys.finish(str(number), answers[-1], 0.0)
    assert len(answers[0].body) > 4_000
    assert [keys.begin(str(number), b"1", 1.0) for number in range(1_000)] == answers
