"""Each row of the table of refusals has one Retry-After rule, on every route."""

import pytest

from kpl_integrations.ingest.admission.refusals import REFUSALS, Refusal, Refused
from kpl_integrations.ingest.admission.retry_after import over_queue_share, refusal_headers, retry_after_header
from kpl_integrations.ingest.http.answers import problem_of
from kpl_integrations.ingest.routes.kinesis_wire import WIRE_ANSWERS
from kpl_integrations.ingest.tenants import Tenant

# Seconds, and the field's value: rounded up, at least 1.
ROUNDED = [(0.0, b"1"), (0.2, b"1"), (1.0, b"1"), (1.2, b"2"), (1.5, b"2"), (2.5, b"3"), (59.01, b"60")]


@pytest.mark.parametrize(("seconds", "value"), ROUNDED)
def test_retry_after_is_rounded_up_to_whole_seconds(seconds, value):
    assert retry_after_header(seconds) == (b"retry-after", value)
    refused = Refused(Refusal.NO_ROOM, "full", retry_after=seconds)
    assert refusal_headers(refused) == [(b"retry-after", value)]
    assert (b"retry-after", value) in problem_of(refused)[1]


@pytest.mark.parametrize("refusal", list(Refusal))
def test_a_row_without_a_default_never_has_retry_after(refusal):
    row = REFUSALS[refusal]
    for retry_after in (None, 7.0):
        headers = dict(refusal_headers(Refused(refusal, "no", retry_after=retry_after)))
        assert (b"retry-after" in headers) is (row.retry_after_seconds is not None)
    assert row.status not in {429, 503} or row.retry_after_seconds is not None


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
