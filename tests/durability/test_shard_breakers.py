"""A shard's breaker and the stream's, asked together: what one of them stops costs the other nothing."""

import pytest

from kpl_core.durability.breaker_gate import WHOLE_STREAM, BreakerGate
from kpl_core.durability.circuit_breaker import Decision
from kpl_core.hooks import BreakerChanged
from kpl_core.options.config import Config
from kpl_core.options.reliability import BreakerPolicy, TierPolicy
from kpl_core.pipeline.send_queue import FAILURES_IN_A_ROW
from kpl_core.pipeline.stages import Passage
from kpl_core.records.put_records import PutRecordsEntry, PutRecordsRequest, RequestFailure
from tests.support.material import kinesis_record, shard_id
from tests.support.stream import THROTTLED

LEFT, RIGHT = shard_id(0), shard_id(1)
NO_CONNECTION = RequestFailure("Internal", "no connection")
POLICY = BreakerPolicy(probe_records=4, open_seconds=1.0, probe_timeout_seconds=3.0)


def gate_of(policy: BreakerPolicy = POLICY) -> BreakerGate:
    """Return a gate that reserves two critical records a second."""
    config = Config(rate_limit_records_per_sec_per_shard=20, tiers=TierPolicy(critical_reserve=0.1))
    return BreakerGate("s", policy, config, spool=None)


def request(shard: str, count: int, started_at: float) -> PutRecordsRequest:
    return PutRecordsRequest("s", [kinesis_record(shard=shard) for _ in range(count)], started_at=started_at)


def all_open() -> BreakerGate:
    """Both shards' breakers and the stream's opened at 1.0; their breaks are over at 2.0."""
    breakers = gate_of()
    for shard in (LEFT, RIGHT):
        breakers.answered(request(shard, 20, 0.9), [THROTTLED] * 20, 1.0)
    for _ in range(FAILURES_IN_A_ROW):
        breakers.answered(request(LEFT, 100, 0.9), NO_CONNECTION, 1.0)
    assert {breaker.known_state for breaker in breakers.breakers.values()} == {"open"}
    assert set(breakers.breakers) == {WHOLE_STREAM, LEFT, RIGHT}
    return breakers


def test_a_probe_of_a_shard_is_not_spent_on_a_record_that_the_stream_stops():
    """It was given up only after its timeout, so that the shard found back seconds after the stream had."""
    breakers = all_open()
    asked = [LEFT, RIGHT] * 4
    granted = [shard for shard in asked if breakers.allows(shard, "normal", 2.0) is Decision.PROBE]
    assert granted == [LEFT, RIGHT, LEFT, RIGHT]
    for shard in granted:
        breakers.answered(request(shard, 1, 2.0), [PutRecordsEntry("1", shard)], 2.1)
    # The stream's is closed, and two more probes of each shard may go at once.
    more = [shard for shard in asked if breakers.allows(shard, "normal", 2.1) is Decision.PROBE]
    assert more == [LEFT, RIGHT, LEFT, RIGHT]


@pytest.mark.parametrize(
    ("tier", "decision"), [("critical", Decision.SEND), ("normal", Decision.WAIT), ("bulk", Decision.REFUSE)]
)
def test_while_open_each_tier_has_its_row(tier, decision):
    assert all_open().allows(LEFT, tier, 1.5) is decision


def test_a_record_that_must_wait_gets_a_time_at_which_it_may_leave():
    breakers = all_open()
    at = breakers.ready_at(LEFT, "normal", 1.5)
    assert at == 2.0
    assert breakers.allows(LEFT, "normal", at) is Decision.PROBE


def test_one_failed_request_stops_nothing_however_many_records_it_carried():
    """A connection that was closed while it was idle fails the only request of a quiet second."""
    breakers = gate_of()
    for second in range(10):
        breakers.answered(request(LEFT, 500, second), NO_CONNECTION, second + 0.1)
        assert breakers.allows(LEFT, "normal", second + 0.1) is Decision.SEND
        breakers.answered(request(LEFT, 1, second + 0.1), [PutRecordsEntry("1", LEFT)], second + 0.2)
    breakers.answered(request(LEFT, 1, 10.0), NO_CONNECTION, 10.5)
    breakers.answered(request(LEFT, 500, 10.0), NO_CONNECTION, 10.6)
    assert breakers.allows(LEFT, "normal", 10.6) is Decision.WAIT


@pytest.mark.parametrize("spacing", [0.01, 0.3, 4.0])
@pytest.mark.parametrize(("count", "opens_at"), [(1, 10), (3, 4), (5, 2), (100, 2)])
def test_requests_that_fail_in_a_row_open_it_however_small_and_far_apart_they_are(count, opens_at, spacing):
    """While requests fail, one probe leaves every few seconds, with one record of a small stream."""
    breakers = gate_of(BreakerPolicy(minimum_records=10))
    decisions = []
    for number in range(opens_at):
        at = 1.0 + number * spacing
        breakers.answered(request(LEFT, count, at), NO_CONNECTION, at)
        decisions.append(breakers.allows(LEFT, "normal", at))
    assert decisions == [*[Decision.SEND] * (opens_at - 1), Decision.WAIT]


def test_an_answer_between_requests_that_fail_begins_a_new_row():
    breakers = gate_of(BreakerPolicy(minimum_records=10))
    for number in range(40):
        at = 1.0 + number * 4.0
        is_answered = number % 9 == 8
        answer = [PutRecordsEntry("1", LEFT)] if is_answered else NO_CONNECTION
        breakers.answered(request(LEFT, 1, at), answer, at)
        assert breakers.allows(LEFT, "normal", at) is Decision.SEND


def test_records_that_wait_leave_as_soon_as_the_probes_have_closed_the_breaker():
    """They had waited for the next probe, which would go after the timeout of the last ones."""
    breakers = gate_of()
    breakers.answered(request(LEFT, 20, 0.9), [THROTTLED] * 20, 1.0)
    assert not breakers.take_ready(1.0)[0]
    probes = [kinesis_record(shard=LEFT, expires_at=30.0) for _ in range(4)]
    assert {breakers.decide(record, 2.0) for record in probes} == {Passage.PROBE}
    waits = kinesis_record(shard=LEFT, expires_at=30.0)
    assert breakers.decide(waits, 2.0) is Passage.KEPT
    assert not breakers.take_ready(2.0)[0]
    breakers.answered(PutRecordsRequest("s", probes, started_at=2.0), [PutRecordsEntry("1", LEFT)] * 4, 2.1)
    assert breakers.take_ready(2.1)[0] == [waits]


@pytest.mark.parametrize(
    ("answer", "code"),
    [
        (PutRecordsEntry(None, None, "InternalFailure", "m"), "InternalFailure"),
        (PutRecordsEntry(None, None, None, None), "Internal"),
    ],
)
def test_the_fact_of_a_shard_that_fails_has_the_code_of_its_last_record(answer, code):
    breakers = gate_of()
    breakers.answered(request(LEFT, 20, 0.9), [THROTTLED] * 19 + [answer], 1.0)
    assert breakers.take_ready(1.0) == ([], [BreakerChanged("s", LEFT, "open", code)])
