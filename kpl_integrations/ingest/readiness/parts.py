"""The state of each part of a gateway: what is wrong with it, whether records are accepted, and what to do. Pure.

A symptom is something wrong that the gateway sees now. `RULES` has a row for each. The first row of a part whose
symptom has lasted `after_seconds` decides the state of that part; without one the part is ok. So a state ends by
itself when its symptom does.

The gateway is ready (`/readyz` is 200) unless a row that decides says that it accepts no records. A part may have
failed while records are accepted: a client that does not verify an expired certificate still gets its 202.
"""

from collections.abc import Collection, Mapping
from enum import StrEnum
from typing import Final, NamedTuple


class Part(StrEnum):
    """What can fail on its own. `INTAKE` is the gateway itself: its producer and its buffer."""

    INTAKE = "intake"
    SPOOL = "spool"
    DEAD_LETTERS = "dead_letters"
    COORDINATION = "coordination"
    TENANTS_FILE = "tenants_file"
    CERTIFICATE = "certificate"
    KINESIS = "kinesis"


class PartState(StrEnum):
    """What a part does now: all, less than it should, or nothing."""

    OK = "ok"
    DEGRADED = "degraded"
    FAILED = "failed"
    NOT_CONFIGURED = "not_configured"


class Symptom(StrEnum):
    """Something wrong that the gateway sees."""

    PRODUCER_FAILED = "producer failed"
    CLOSED = "closed"
    DRAINING = "draining"
    BUFFER_FULL = "buffer full"
    SPOOL_REFUSES = "spool refuses"
    SPOOLED_REFUSED = "spooled refused"
    SPOOL_BYPASSED = "spool bypassed"
    SPOOL_OVERFLOW_FAILS = "spool overflow fails"
    LETTERS_NOT_STORED = "letters not stored"
    LETTERS_NOT_TAKEN = "letters not taken"
    LETTERS_MANY = "letters many"
    COORDINATION_FAILS = "coordination fails"
    TENANTS_NOT_READ = "tenants not read"
    CERTIFICATE_EXPIRED = "certificate expired"
    CERTIFICATE_NOT_YET_VALID = "certificate not yet valid"
    CERTIFICATE_NOT_READ = "certificate not read"
    CERTIFICATE_EXPIRES_SOON = "certificate expires soon"
    STREAMS_REFUSED = "streams refused"
    NO_STREAM_KNOWN = "no stream known"
    STREAM_BREAKER_OPEN = "stream breaker open"
    REQUESTS_FAIL = "requests fail"
    SOME_REQUESTS_FAIL = "some requests fail"
    STREAM_BREAKER_HALF_OPEN = "stream breaker half open"
    SHARD_BREAKER_OPEN = "shard breaker open"


class PartRule(NamedTuple):
    """One row. `{}` in `detail` is what the gateway saw. The symptom counts once it has lasted `after_seconds`."""

    part: Part
    symptom: Symptom
    state: PartState
    accepts: bool
    after_seconds: float
    detail: str
    action: str


_WAIT: Final = "nothing: the gateway is being stopped"
_SPOOL: Final = (
    "if it is full, raise spool_max_bytes and see the part kinesis; otherwise free space on its disk, or repair it: "
    "the log names the cause"
)
_STORE: Final = "the log names the stream and the error; run `kpl doctor STREAM`"

# The rows of a part are in the order of their weight.
RULES: Final = (
    PartRule(
        *(Part.INTAKE, Symptom.PRODUCER_FAILED, PartState.FAILED, False, 0.0),
        "the producer has failed with {}",
        "restart the process; the log has the cause",
    ),
    PartRule(
        *(Part.INTAKE, Symptom.CLOSED, PartState.DEGRADED, False, 0.0), "closed: delivering accepted records", _WAIT
    ),
    PartRule(
        *(Part.INTAKE, Symptom.DRAINING, PartState.DEGRADED, False, 0.0), "draining: it accepts no records soon", _WAIT
    ),
    PartRule(
        *(Part.INTAKE, Symptom.BUFFER_FULL, PartState.DEGRADED, False, 0.0),
        "the buffer is {} full",
        "add shards or gateways if this lasts; see the part kinesis",
    ),
    PartRule(*(Part.SPOOL, Symptom.SPOOL_REFUSES, PartState.FAILED, False, 0.0), "{}; puts are refused", _SPOOL),
    PartRule(
        *(Part.SPOOL, Symptom.SPOOLED_REFUSED, PartState.FAILED, False, 0.0),
        "{}; requests get 503, except those with ack=queued or ack=delivered, whose records go straight to Kinesis",
        _SPOOL,
    ),
    PartRule(
        *(Part.SPOOL, Symptom.SPOOL_BYPASSED, PartState.DEGRADED, True, 0.0),
        "{}; records go straight to Kinesis, and requests with ack=spooled get 503",
        _SPOOL,
    ),
    PartRule(
        *(Part.SPOOL, Symptom.SPOOL_OVERFLOW_FAILS, PartState.DEGRADED, True, 0.0),
        "{}; records that are not delivered in time fail, unless dead letters take them",
        _SPOOL,
    ),
    PartRule(
        *(Part.DEAD_LETTERS, Symptom.LETTERS_NOT_STORED, PartState.FAILED, True, 0.0),
        "cannot store; records that fail are lost",
        "free space on the disk of the dead letters, or remove letters (`kpl dlq`); the log names the cause",
    ),
    PartRule(
        *(Part.DEAD_LETTERS, Symptom.LETTERS_NOT_TAKEN, PartState.FAILED, True, 0.0),
        "the queue or bucket did not take the latest ones; records that fail are lost",
        "check what dead_letters_sqs or dead_letters_s3 names, and the right to write to it; the log names the cause",
    ),
    PartRule(
        *(Part.DEAD_LETTERS, Symptom.LETTERS_MANY, PartState.DEGRADED, True, 0.0),
        "{} dead letters wait",
        "run `kpl dlq list`, fix the cause, then run `kpl dlq redrive`",
    ),
    PartRule(
        *(Part.COORDINATION, Symptom.COORDINATION_FAILS, PartState.DEGRADED, True, 5.0),
        "{}",
        "check the store that KPL_INGEST_COORDINATION names; the log has its error",
    ),
    PartRule(
        *(Part.TENANTS_FILE, Symptom.TENANTS_NOT_READ, PartState.DEGRADED, True, 0.0),
        "the tenants cannot be read again; the earlier ones stay in force",
        "correct the file; the log says what is wrong with it",
    ),
    PartRule(
        *(Part.CERTIFICATE, Symptom.CERTIFICATE_EXPIRED, PartState.FAILED, True, 0.0),
        "expired at {}; clients that verify it do not connect",
        "replace the files of tls_certificate and tls_key; they are read again without a restart",
    ),
    PartRule(
        *(Part.CERTIFICATE, Symptom.CERTIFICATE_NOT_YET_VALID, PartState.FAILED, True, 0.0),
        "not valid before {}; clients that verify it do not connect",
        "check the clock of this machine, or replace the certificate",
    ),
    PartRule(
        *(Part.CERTIFICATE, Symptom.CERTIFICATE_NOT_READ, PartState.DEGRADED, True, 0.0),
        "the changed files cannot be used; the earlier certificate stays in use until it expires at {}",
        "give a certificate chain and the key that belongs to it; the log says what is wrong",
    ),
    PartRule(
        *(Part.CERTIFICATE, Symptom.CERTIFICATE_EXPIRES_SOON, PartState.DEGRADED, True, 0.0),
        "expires at {}",
        "renew it: replace the files of tls_certificate and tls_key",
    ),
    PartRule(
        *(Part.KINESIS, Symptom.STREAMS_REFUSED, PartState.FAILED, False, 0.0),
        "the circuit breaker of stream {} is open, and no spool stores its records",
        _STORE,
    ),
    PartRule(
        *(Part.KINESIS, Symptom.NO_STREAM_KNOWN, PartState.FAILED, False, 3.0),
        "stream {} cannot be looked up, and the gateway knows no other",
        _STORE,
    ),
    PartRule(
        *(Part.KINESIS, Symptom.STREAM_BREAKER_OPEN, PartState.FAILED, True, 0.0),
        "the circuit breaker of stream {} is not closed again",
        _STORE,
    ),
    PartRule(*(Part.KINESIS, Symptom.REQUESTS_FAIL, PartState.FAILED, True, 3.0), "requests to stream {} fail", _STORE),
    PartRule(
        *(Part.KINESIS, Symptom.SOME_REQUESTS_FAIL, PartState.DEGRADED, True, 3.0), "requests to stream {} fail", _STORE
    ),
    PartRule(
        *(Part.KINESIS, Symptom.STREAM_BREAKER_HALF_OPEN, PartState.DEGRADED, True, 0.0),
        "Kinesis answers again; the circuit breaker of stream {} closes after a few more records",
        "nothing: the next records close it",
    ),
    PartRule(
        *(Part.KINESIS, Symptom.SHARD_BREAKER_OPEN, PartState.DEGRADED, True, 3.0),
        "the circuit breaker of shard {} is not closed again",
        "split the shard, or look for a partition key that most records share",
    ),
)

_RULES_BY_PART: Final = {part: tuple(rule for rule in RULES if rule.part is part) for part in Part}
OK_DETAILS: Final[Mapping[Part, str]] = {
    Part.INTAKE: "accepting records",
    Part.SPOOL: "stores records",
    Part.DEAD_LETTERS: "stores records",
    Part.COORDINATION: "the store answers",
    Part.TENANTS_FILE: "read",
    Part.CERTIFICATE: "valid",
    Part.KINESIS: "accepts records",
}


class PartStatus(NamedTuple):
    """The state of one part, since an instant of the machine's clock; `action` is empty while there is none."""

    part: Part
    state: PartState
    accepts: bool
    since: float
    detail: str
    action: str = ""


class Parts:
    """The states of all parts. `configured` parts begin as ok; instants are monotonic seconds."""

    def __init__(self, configured: Collection[Part], now: float) -> None:
        self._seen_since: dict[Symptom, float] = {}
        self._statuses = {
            part: _ok(part, now)
            if part in configured
            else PartStatus(part, PartState.NOT_CONFIGURED, accepts=True, since=now, detail="not configured")
            for part in Part
        }

    @property
    def statuses(self) -> Collection[PartStatus]:
        """Return the status of every part."""
        return self._statuses.values()

    @property
    def accepts(self) -> bool:
        """Return True if records can be accepted."""
        return all(status.accepts for status in self.statuses)

    def observe(self, symptoms: Mapping[Symptom, str], now: float) -> list[PartStatus]:
        """Note all symptoms there are now, each with what was seen; return the parts whose state changed.

        Symptoms of a part that is not configured do not count.
        """
        self._seen_since = {symptom: self._seen_since.get(symptom, now) for symptom in symptoms}
        changed = []
        for part, before in self._statuses.items():
            if before.state is PartState.NOT_CONFIGURED:
                continue
            status = self._status(part, symptoms, now)
            if status.state is before.state:
                status = status._replace(since=before.since)
            else:
                changed.append(status)
            self._statuses[part] = status
        return changed

    def _status(self, part: Part, symptoms: Mapping[Symptom, str], now: float) -> PartStatus:
        for rule in _RULES_BY_PART[part]:
            since = self._seen_since.get(rule.symptom)
            if since is not None and now - since >= rule.after_seconds:
                detail = rule.detail.format(symptoms[rule.symptom])
                return PartStatus(part, rule.state, rule.accepts, since, detail, rule.action)
        return _ok(part, now)


def _ok(part: Part, now: float) -> PartStatus:
    return PartStatus(part, PartState.OK, accepts=True, since=now, detail=OK_DETAILS[part])
