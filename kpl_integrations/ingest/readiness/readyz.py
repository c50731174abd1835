"""Watches the parts of an open gateway: reads what is wrong with them, logs each change, and counts for metrics.

It looks once a second, and whenever a client asks for readiness. It never calls AWS: all that it reads is known in
memory. A worker of several watches its own parts only.
"""

import logging
import os
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

import anyio

from kpl_core import Producer
from kpl_core.durability.circuit_breaker import BreakerState
from kpl_core.hooks import CoordinatorMet, RequestCompleted
from kpl_core.records.record_result import REASON_BY_ERROR_CODE
from kpl_integrations.ingest.http.certificate import ServerCertificate, instant_text
from kpl_integrations.ingest.outside_parts import WatchedSink
from kpl_integrations.ingest.readiness.parts import Part, Parts, PartState, PartStatus, Symptom
from kpl_integrations.ingest.streams.stream_directory import FailedLookup, StreamDirectory
from kpl_integrations.ingest.tenants import Ack
from kpl_integrations.metrics.metrics_hook import Sample

LOOK_SECONDS: Final = 1.0
FULL_ABOVE: Final = 0.9
# How many streams or shards a detail names.
_MOST_NAMED: Final = 3
_WHOLE_STREAM: Final = ""
# A stream counts as used for so long after its latest answer.
USED_SECONDS: Final = 60.0
# A failure that nothing has confirmed since, because there was no traffic, ends after so long.
_FORGET_SECONDS: Final = 300.0
_DAY_SECONDS: Final = 86_400.0
_LEVELS: Final = {PartState.OK: logging.INFO, PartState.DEGRADED: logging.WARNING, PartState.FAILED: logging.ERROR}
# Their changes are in the log already, or too frequent for it.
_NOT_LOGGED: Final = frozenset({Part.INTAKE})

_log: Final = logging.getLogger("kpl_integrations.ingest.readiness")


class PartsWatch:
    """The parts of one gateway, and what they look like from outside.

    Args:
        producer: an open one.
        admission_state: "open", "draining" or "closed".
        has_tenants_file: the tenants are read again when they change.
        certificate: of the server in front, None without TLS.
        default_ack: what requests get that choose none.
        sink: takes the dead letters; None: a file does, or there are none.
        streams: looks up the streams that clients name.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        producer: Producer,
        admission_state: Callable[[], str],
        *,
        has_tenants_file: bool,
        certificate: ServerCertificate | None,
        default_ack: Ack,
        sink: WatchedSink | None,
        streams: StreamDirectory,
        clock: Callable[[], float],
    ) -> None:
        self._producer = producer
        self._admission_state = admission_state
        self._certificate = certificate
        self._default_ack = default_ack
        self._sink = sink
        self._streams = streams
        self._clock = clock
        self._wall_clock = time.time
        # Why the tenants could not be read again, None if they were.
        self.tenants_problem: str | None = None
        # The last problem of each kind of coordination, "" if its last sync was a success.
        self._coordination: dict[str, str] = {}
        # When the latest request to each stream was answered, and its code if it failed as a whole. The message may
        # quote the request.
        self._answers: dict[str, tuple[float, str | None]] = {}
        is_configured = {
            Part.INTAKE: True,
            Part.SPOOL: producer.spool_state is not None,
            Part.DEAD_LETTERS: producer.config.dead_letters is not None,
            Part.COORDINATION: producer.coordination is not None,
            Part.TENANTS_FILE: has_tenants_file,
            Part.CERTIFICATE: certificate is not None,
            Part.KINESIS: True,
        }
        self._parts = Parts({part for part, is_there in is_configured.items() if is_there}, clock())
        self.look()

    async def run(self) -> None:
        """Look once a second, until cancelled."""
        while True:
            await anyio.sleep(LOOK_SECONDS)
            letters = self._producer.dead_letters
            if letters is not None:
                letters.probe()
            self.look()

    def coordinated(self, kind: str, fact: CoordinatorMet) -> None:
        """Note the end of a sync round that shares limits of this kind."""
        self._coordination[kind] = fact.failure

    def answered(self, fact: RequestCompleted) -> None:
        """Note the end of a request."""
        self._answers[fact.stream] = fact.ended_at, fact.error_code

    def look(self) -> Parts:
        """Return the parts as they are now; log those whose state has changed."""
        for status in self._parts.observe(self.symptoms(), self._clock()):
            if status.part not in _NOT_LOGGED:
                fields = {
                    "event": "part changed",
                    "part": status.part.value,
                    "state": status.state.value,
                    "reason": status.detail,
                }
                text = "part changed: %s is %s: %s%s"
                action = f"; {status.action}" if status.action else ""
                level = _LEVELS[status.state]
                _log.log(level, text, status.part, status.state, status.detail, action, extra={"fields": fields})
        return self._parts

    def symptoms(self) -> dict[Symptom, str]:
        """Return what is wrong now, each with what a reader should know about it; no text may be a secret."""
        return {**self._intake(), **self._disk(), **self._files(), **self._kinesis()}

    def _intake(self) -> dict[Symptom, str]:
        found: dict[Symptom, str] = {}
        producer, state = self._producer, self._admission_state()
        if producer.failure is not None:
            # Without its text, which may quote what no probe should show.
            found[Symptom.PRODUCER_FAILED] = type(producer.failure).__name__
        if state != "open":
            found[Symptom.DRAINING if state == "draining" else Symptom.CLOSED] = ""
        limit = producer.buffer_limit
        used = max(limit.outstanding_records / limit.max_records, limit.outstanding_bytes / limit.max_bytes)
        if used > FULL_ABOVE:
            found[Symptom.BUFFER_FULL] = f"{used:.1%}"
        return found

    def _disk(self) -> dict[Symptom, str]:
        found: dict[Symptom, str] = {}
        spool, letters = self._producer.spool_state, self._producer.dead_letters
        disk_fails = False
        if spool is not None and not spool.can_store:
            if spool.unready() is not None:
                symptom = Symptom.SPOOL_REFUSES
            elif not spool.writes_ahead:
                symptom = Symptom.SPOOL_OVERFLOW_FAILS
            else:
                symptom = Symptom.SPOOLED_REFUSED if self._default_ack == "spooled" else Symptom.SPOOL_BYPASSED
            found[symptom] = "full (spool_max_bytes)" if spool.is_full else "cannot store"
            disk_fails = not spool.is_full
        if letters is not None:
            # Without a sink both are in one file, each with its own bound.
            if letters.failing or (disk_fails and self._sink is None):
                found[Symptom.LETTERS_NOT_STORED] = ""
            if letters.is_alarmed:
                found[Symptom.LETTERS_MANY] = f"{letters.depth:,}"
        if self._sink is not None and self._clock() - self._sink.failed_at <= _FORGET_SECONDS:
            found[Symptom.LETTERS_NOT_TAKEN] = ""
        return found

    def _files(self) -> dict[Symptom, str]:
        found: dict[Symptom, str] = {}
        problems = sorted({problem for problem in self._coordination.values() if problem})
        if problems:
            found[Symptom.COORDINATION_FAILS] = self._uncoordinated(problems)
        if self.tenants_problem is not None:
            found[Symptom.TENANTS_NOT_READ] = ""
        certificate = self._certificate
        if certificate is not None:
            now, validity = self._wall_clock(), certificate.validity
            ends = instant_text(validity.not_after)
            if now >= validity.not_after:
                found[Symptom.CERTIFICATE_EXPIRED] = ends
            if now < validity.not_before:
                found[Symptom.CERTIFICATE_NOT_YET_VALID] = instant_text(validity.not_before)
            if certificate.problem is not None:
                found[Symptom.CERTIFICATE_NOT_READ] = ends
            if now >= validity.renew_at:
                found[Symptom.CERTIFICATE_EXPIRES_SOON] = ends
        return found

    def _uncoordinated(self, problems: Sequence[str]) -> str:
        """Return the store, what is wrong, and what is in force meanwhile."""
        options, driver = self._producer.config.coordination, self._producer.coordination
        store = "the store" if options is None else options.shown_store
        text = f"coordination fails at {store} ({', '.join(problems)})"
        shares = () if driver is None else driver.shares().values()
        if not shares:
            return text
        least, most = (f"{share:.3g}" for share in (min(shares), max(shares)))
        used = most if least == most else f"{least} to {most}"
        return f"{text}; this process may use {used} times the limit of each shard"

    def _kinesis(self) -> dict[Symptom, str]:
        found: dict[Symptom, str] = {}
        producer = self._producer
        now, counts = self._clock(), producer.statistics()
        # Without traffic nothing shows that an outage is over, so what was seen last counts for a time only.
        answers = {stream: answer for stream, answer in self._answers.items() if stream in counts}
        known = {
            stream
            for stream, (answered_at, _) in answers.items()
            if counts[stream].buffered or now - answered_at <= _FORGET_SECONDS
        }
        breakers = {name: breaker for name, breaker in producer.breakers().items() if name[0] in known}
        states = {name: breaker.known_state for name, breaker in breakers.items()}
        not_closed = [name for name, state in states.items() if state is not BreakerState.CLOSED]
        codes = {stream: answers[stream][1] for stream in known if answers[stream][1]}
        stopped = [stream for stream, shard in not_closed if shard == _WHOLE_STREAM]
        refused = [stream for stream in stopped if states[stream, _WHOLE_STREAM] is BreakerState.OPEN]
        # A half-open breaker closes some records after the first that is delivered.
        recovering = [each for each in stopped if breakers[each, _WHOLE_STREAM].is_recovering and each not in codes]
        used = {stream for stream in known if now - answers[stream][0] <= USED_SECONDS}
        # Its requests get 503, and it has no pipeline yet.
        lookup = self._streams.failed_lookup
        if lookup is not None and now - lookup.failed_at <= _FORGET_SECONDS:
            known.add(lookup.stream)
            codes[lookup.stream] = lookup.code
            if now - lookup.failed_at <= USED_SECONDS:
                used.add(lookup.stream)
        named = {stream: f"{stream} ({codes[stream]})" if stream in codes else stream for stream in known}
        # One stream in trouble is no reason to send the traffic of all elsewhere.
        works = used - codes.keys() - set(refused)
        spool = producer.spool_state
        if refused and not works and (spool is None or not spool.can_store):
            found[Symptom.STREAMS_REFUSED] = _named([named[stream] for stream in refused])
        # Every request gets 503: no stream is known, and the spool has records of none.
        if lookup is not None and lookup.stream in used and not works and not counts and self._knows_none(lookup):
            found[Symptom.NO_STREAM_KNOWN] = named[lookup.stream]
        if failing := [stream for stream in stopped if stream not in recovering]:
            found[Symptom.STREAM_BREAKER_OPEN] = _named([named[stream] for stream in failing])
        if recovering:
            found[Symptom.STREAM_BREAKER_HALF_OPEN] = _named(recovering)
        if codes:
            # Both, so that the part is not ok for a moment when the first of them ends.
            found[Symptom.SOME_REQUESTS_FAIL] = _named([named[stream] for stream in codes])
            if used and not works:
                found[Symptom.REQUESTS_FAIL] = found[Symptom.SOME_REQUESTS_FAIL]
        shards = [f"{stream} {shard}" for stream, shard in not_closed if shard != _WHOLE_STREAM]
        if shards:
            found[Symptom.SHARD_BREAKER_OPEN] = _named(shards)
        return found

    def _knows_none(self, lookup: FailedLookup) -> bool:
        # Clients that invent many names can make look-ups throttle.
        return not self._streams.known and REASON_BY_ERROR_CODE.get(lookup.code) != "throttled"

    def samples(self) -> Iterator[Sample]:
        """Return the state of each part, 1 or 0 for each state it could have, and how long the certificate is valid."""
        for status in list(self._parts.statuses):
            for state in PartState:
                yield Sample("kinesis_ingest_part", (status.part.value, state.value), float(status.state is state))
        if self._certificate is not None:
            seconds = self._certificate.validity.not_after - self._wall_clock()
            yield Sample("kinesis_ingest_certificate_days_left", (), seconds / _DAY_SECONDS)

    def readiness(self, *, verbose: bool) -> tuple[int, dict[str, Any]]:
        """Return status and JSON body of `/readyz`: whether this process accepts records, and each part."""
        parts = self.look()
        status, word = (200, "ready") if parts.accepts else (503, "not ready")
        if not verbose:
            shown = (each for each in parts.statuses if each.state is not PartState.NOT_CONFIGURED)
            checks = {each.part.value: {"ready": each.accepts, "detail": each.detail} for each in shown}
            return status, {"status": word, "checks": checks}
        now, wall_now = self._clock(), self._wall_clock()
        documents = {each.part.value: _document(each, now, wall_now) for each in parts.statuses}
        return status, {"status": word, "process_id": os.getpid(), "parts": documents}


def _document(status: PartStatus, now: float, wall_now: float) -> dict[str, Any]:
    seconds = max(0.0, now - status.since)
    return {
        "state": status.state.value,
        "accepts_records": status.accepts,
        "since": instant_text(wall_now - seconds),
        "seconds": round(seconds, 1),
        "detail": status.detail,
        "action": status.action,
    }


def _named(names: list[str]) -> str:
    more = len(names) - _MOST_NAMED
    return ", ".join(sorted(names)[:_MOST_NAMED]) + (f" and {more:,} more" if more > 0 else "")
