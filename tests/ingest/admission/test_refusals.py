"""Each row of the table of refusals has one Retry-After rule, on every route."""

from pathlib import Path

import pytest

import kpl_integrations
from kpl_integrations.asgi.protocol import retry_after_header
from kpl_integrations.ingest.admission.refusals import (
    REFUSALS,
    Refusal,
    Refused,
    over_queue_share,
    rate_limit_headers,
    refusal_headers,
)
from kpl_integrations.ingest.http.answers import problem_of
from kpl_integrations.ingest.request.kinesis_wire import WIRE_ANSWERS
from kpl_integrations.ingest.tenants import QuotaState, Tenant

# Seconds, and the field's value: rounded up, at least 1.
ROUNDED = [(0.0, b"1"), (0.2, b"1"), (1.0, b"1"), (1.2, b"2"), (1.5, b"2"), (2.5, b"3"), (59.01, b"60")]


@pytest.mark.parametrize(("seconds", "value"), ROUNDED)
def test_retry_after_is_rounded_up_to_whole_seconds(seconds, value):
    assert retry_after_header(seconds) == (b"retry-after", value)
    refused = Refused(Refusal.NO_ROOM, "full", retry_after=seconds)
    assert refusal_headers(refused) == [(b"retry-after", value)]
    assert (b"retry-after", value) in problem_of(refused, b"id").fields


def test_one_file_writes_and_rounds_retry_after():
    folder = Path(next(iter(kpl_integrations.__path__)))
    written = [path.name for path in folder.rglob("*.py") if 'b"retry-after"' in path.read_text(encoding="utf-8")]
    assert written == ["protocol.py"]


@pytest.mark.parametrize("seconds", [0.0, 0.2, 1.5])
def test_the_time_of_ratelimit_is_rounded_as_retry_after_is_and_absent_if_there_is_room(seconds):
    fields = dict(rate_limit_headers([QuotaState("records", 10, 1, 0, seconds)]))
    time = b";t=" + retry_after_header(seconds)[1] if seconds else b""
    assert fields[b"ratelimit"] == b'"records";r=0' + time


@pytest.mark.parametrize("refusal", list(Refusal))
def test_a_row_without_a_default_never_has_retry_after(refusal):
    row = REFUSALS[refusal]
    for retry_after in (None, 7.0):
        headers = dict(refusal_headers(Refused(refusal, "no", retry_after=retry_after)))
        assert (b"retry-after" in headers) is (row.retry_after_seconds is not None)
    assert row.status not in {429, 503} or row.retry_after_seconds is not None


# What clients program against: status, Retry-After in seconds if the code has no better value, and whether the
# connection ends.
CONTRACT = {
    Refusal.QUOTA: (429, 1.0, False),
    Refusal.QUEUE_SHARE: (429, 1.0, False),
    Refusal.CPU_SHARE: (429, 1.0, False),
    Refusal.NO_ROOM: (503, 1.0, False),
    Refusal.BREAKER_OPEN: (503, 1.0, False),
    Refusal.DRAINING: (503, 1.0, True),
    Refusal.NOT_SPOOLED: (503, 1.0, False),
    Refusal.STREAM_UNCERTAIN: (503, 2.0, False),
    Refusal.NO_CREDENTIALS: (401, None, False),
    Refusal.BAD_CREDENTIALS: (401, None, False),
    Refusal.WRONG_KEYS: (429, 12.0, False),
    Refusal.FORBIDDEN: (403, None, False),
    Refusal.UNKNOWN_STREAM: (404, None, False),
    Refusal.UNKNOWN_PATH: (404, None, False),
    Refusal.METHOD: (405, None, False),
    Refusal.HOST: (421, None, False),
    Refusal.TOO_LARGE: (413, None, True),
    Refusal.SLOW_BODY: (408, None, True),
    Refusal.UNSUPPORTED: (415, None, False),
    Refusal.MALFORMED: (400, None, False),
    Refusal.BAD_RECORDS: (400, None, False),
    Refusal.BAD_PARAMETER: (400, None, False),
    Refusal.KEY_IN_USE: (409, 1.0, False),
    Refusal.KEY_REUSED: (422, None, False),
    Refusal.EXPIRED: (504, None, False),
    Refusal.NOT_DELIVERED: (502, None, False),
    Refusal.BUSY: (503, 1.0, True),
    Refusal.BAD_HTTP: (400, None, True),
    Refusal.SLOW_HEAD: (408, None, True),
    Refusal.LARGE_HEAD: (431, None, True),
    Refusal.TRANSFER_CODING: (501, None, True),
    Refusal.HTTP_VERSION: (505, None, True),
}


def test_a_client_gets_the_status_the_retry_after_and_the_closed_connection_that_were_promised():
    assert {refusal: (row.status, row.retry_after_seconds, row.closes) for refusal, row in REFUSALS.items()} == CONTRACT
    assert [refusal for refusal, row in REFUSALS.items() if row.shows_quota] == [Refusal.QUOTA]


def test_a_given_time_replaces_the_default_of_the_row():
    assert dict(refusal_headers(Refused(Refusal.STREAM_UNCERTAIN, "no"))) == {b"retry-after": b"2"}
    assert dict(refusal_headers(Refused(Refusal.STREAM_UNCERTAIN, "no", retry_after=9.0))) == {b"retry-after": b"9"}


def test_the_429_of_a_full_queue_share_has_the_same_time_in_both_fields():
    headers = dict(refusal_headers(over_queue_share(Tenant(id="t"), retry_after=5)))
    assert headers == {b"retry-after": b"5", b"ratelimit": b'"queue-share";r=0;t=5'}


def test_every_kinesis_answer_that_clients_retry_is_a_row_with_retry_after():
    for refusal, answer in WIRE_ANSWERS.items():
        is_retried = answer.per_record or answer.status == 503
        assert is_retried is (REFUSALS[refusal].retry_after_seconds is not None), refusal
