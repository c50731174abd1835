"""Retry: carries out what the table of `classification.py` says for each Kinesis record of an answer.

`Retrier._failed` draws the backoff of a record that was throttled or failed, and the record waits in a `BackoffQueue`.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from heapq import heapify, heappop, heappush
from typing import Final, assert_never

import msgspec

from kpl_core.backoff_formula import ExponentialBackoff
from kpl_core.options.config import Config
from kpl_core.pipeline.classification import NO_STREAM, THROTTLED, Action, Case, Row, classify, is_invalid
from kpl_core.pipeline.ledger import Ledger
from kpl_core.pipeline.send_queue import Bisection
from kpl_core.pipeline.shard_map import ShardMap
from kpl_core.records.expiry import has_expired
from kpl_core.records.kinesis_record import DetachedUserRecord, KinesisRecord
from kpl_core.records.outcome import History
from kpl_core.records.put_records import PutRecordsAnswer, PutRecordsEntry, PutRecordsRequest, RequestFailure
from kpl_core.records.record_result import EXPIRED, INTERNAL, RECORD_COUNT_MISMATCH, WRONG_SHARD, Attempt

# How long an outcome on an unknown shard waits for the shard map.
MAP_WAIT_SECONDS: Final = 2.0
# In arrival order, where the whole shard waits. A record decided without the map could be overtaken by records that the
# map moves.
MAP_WAIT_SECONDS_IN_ORDER: Final = 10.0
# How much of the last error the message of an expired record quotes.
_QUOTED_CHARACTERS: Final = 300
# User records handed out by one call. More may be due at one instant, and other tasks of the loop must get their turn.
DUE_AT_ONCE: Final = 500


class AwaitingMap(msgspec.Struct, frozen=True):
    """A stored record whose actual shard is not in the shard map yet."""

    record: KinesisRecord
    entry: PutRecordsEntry
    attempt: Attempt


class Retries:
    """What must travel again, and the counts of each shard."""

    __slots__ = ("finished", "reaggregate", "request_failed", "resend", "sent", "stream_deleted", "throttled")

    def __init__(self) -> None:
        # Kinesis records to send again as they are, and the time from which each may be sent.
        self.resend: list[tuple[float, KinesisRecord]] = []
        # User records that leave their Kinesis record and are aggregated again.
        self.reaggregate: list[DetachedUserRecord] = []
        # The request failed as a whole, and a retry may fix that.
        self.request_failed = False
        # The stream is deleted. One that is made under its name has other shards, with the same ids.
        self.stream_deleted = False
        # Kinesis records that are final or taken apart: in arrival order, the next of their shard may leave.
        self.finished: list[KinesisRecord] = []
        # By predicted shard: Kinesis records answered one by one, and those refused for throughput.
        self.sent: Counter[str | None] = Counter()
        self.throttled: Counter[str | None] = Counter()


class BackoffQueue:
    """Kinesis records that wait for a time: a heap, and a count for each predicted shard."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, KinesisRecord]] = []
        self._by_shard: Counter[str | None] = Counter()
        # When the first wait ends, `math.inf` if the queue is empty.
        self.next_at = math.inf

    def __bool__(self) -> bool:
        return bool(self._heap)

    def __iter__(self) -> Iterator[KinesisRecord]:
        return (record for _, _, record in self._heap)

    def add(self, record: KinesisRecord, at: float) -> None:
        """Keep a record until `at`."""
        heappush(self._heap, (at, record.sequence, record))
        self._by_shard[record.predicted_shard] += 1
        self.next_at = self._heap[0][0]

    def take_due(self, now: float) -> list[KinesisRecord]:
        """Remove and return the records whose wait is over: 500 user records, or a few more, in one call."""
        due: list[KinesisRecord] = []
        count = 0
        while self._heap and self._heap[0][0] <= now and count < DUE_AT_ONCE:
            record = heappop(self._heap)[2]
            self._by_shard[record.predicted_shard] -= 1
            due.append(record)
            count += len(record.arrivals)
        self.next_at = self._heap[0][0] if self._heap else math.inf
        return due

    def take_except(self, shard_ids: set[str]) -> list[KinesisRecord]:
        """Remove and return the records of all other shards, and those without a prediction."""
        taken = [record for record in self if record.predicted_shard not in shard_ids]
        self._heap = [entry for entry in self._heap if entry[2].predicted_shard in shard_ids]
        heapify(self._heap)
        self._by_shard = Counter(record.predicted_shard for record in self)
        self.next_at = self._heap[0][0] if self._heap else math.inf
        return taken

    def has_shard(self, shard_id: str | None) -> bool:
        """Return True if a record of this shard is in the queue."""
        # `get`: a counter's own look-up of a missing key is ten times slower, and every put with a fair intake asks.
        return self._by_shard.get(shard_id, 0) > 0

    @property
    def user_record_count(self) -> int:
        """Return how many user records are in the queue."""
        return sum(len(record.arrivals) for record in self)


class Retrier:
    """Interprets the table: settles final records in the ledger, returns the others."""

    def __init__(self, config: Config, shard_map: ShardMap, ledger: Ledger, *, chance: Callable[[], float]) -> None:
        self._config = config
        self._shard_map = shard_map
        self._ledger = ledger
        self._chance = chance
        self._ttl_seconds = config.record_ttl_ms / 1000
        self._backoff = ExponentialBackoff(
            base_seconds=config.retry_backoff_base_ms / 1000,
            # A record that is put during a wait, also that of an outage, is sent before it expires.
            cap_seconds=min(config.retry_backoff_cap_ms / 1000, self._ttl_seconds / 2),
        )
        self._in_order = config.ordering == "per_key"
        self._map_wait_seconds = MAP_WAIT_SECONDS_IN_ORDER if self._in_order else MAP_WAIT_SECONDS
        self._awaiting_map: list[AwaitingMap] = []
        # When the first of them has waited too long, `math.inf` if there is none.
        self.next_at = math.inf
        # The newest failed attempt of any record, for records that expire without one of their own.
        self._last_failure: Attempt | None = None
        # Its records travel in requests of their own.
        self.bisection = Bisection()

    def answered(self, request: PutRecordsRequest, answer: PutRecordsAnswer, now: float) -> Retries:
        """Decide for every Kinesis record of a request."""
        retries = Retries()
        records = request.records
        if not isinstance(answer, RequestFailure) and len(answer) != len(records):
            text = f"{len(records)} records were sent, the answer has {len(answer)}"
            answer = RequestFailure(RECORD_COUNT_MISMATCH, text)
        if isinstance(answer, RequestFailure):
            self._request_failed(request, answer, now, retries)
            self.bisection.returned(records)
            return retries
        self._shard_map.answered(now)
        self.bisection.stored()
        self.bisection.returned(records)
        success = Attempt(True, None, None, request.started_at, now)  # noqa: FBT003
        delays: dict[str | None, float] = {}
        stored: list[tuple[KinesisRecord, PutRecordsEntry]] = []
        retries.sent.update([record.predicted_shard for record in records])
        for record, entry in zip(records, answer, strict=True):
            shard = record.predicted_shard
            if entry.error_code or not entry.sequence_number:
                if entry.error_code == THROTTLED:
                    retries.throttled[shard] += 1
                text = entry.error_message or ("" if entry.error_code else "neither a sequence number nor an error")
                failure = RequestFailure(entry.error_code or INTERNAL, text)
                repeated = _last_code(record.outcome.history) == failure.code
                row = classify(Case(error_code=failure.code, repeated=repeated), self._config)
                attempt = self._last_failure = _failed_attempt(failure, request.started_at, now)
                self._failed(record, row, attempt, delays, retries)
            elif shard is None or shard == entry.shard_id:
                stored.append((record, entry))
                if self._in_order:
                    retries.finished.append(record)
                if shard is None and self._shard_map.known and not self._shard_map.knows(entry.shard_id or ""):
                    # The map has a gap: listed while the stream was made, or resharded. Then it would never be sent.
                    self._shard_map.invalidate(seen_at=request.started_at)
            else:
                self._stored_elsewhere(AwaitingMap(record, entry, success), now, retries, waited=False)
        self._ledger.deliver_all(stored, success)
        return retries

    def _request_failed(
        self, request: PutRecordsRequest, failure: RequestFailure, now: float, retries: Retries
    ) -> None:
        records = request.records
        rows = {
            repeated: classify(
                Case(error_code=failure.code, request_of_many=len(records) > 1, repeated=repeated), self._config
            )
            for repeated in (False, True)
        }
        row = rows[False]
        attempt = _failed_attempt(failure, request.started_at, now)
        self._last_failure = attempt
        retries.stream_deleted = failure.code == NO_STREAM and bool(self._shard_map.open_shards)
        if row.action is Action.BISECT:
            for record in records:
                record.outcome.attempted(attempt)
            self.bisection.split(records)
            return
        # One delay for all: they were packed together, and will be again.
        delays: dict[str | None, float] = {}
        if row.action is Action.RETRY:
            # Not for what is tried once more only: the next request may be signed with another time.
            retries.request_failed = rows[True].action is Action.RETRY
            delay = self.backoff(max(record.failures for record in records) + 1)
            delays = dict.fromkeys((record.predicted_shard for record in records), delay)
        for record in records:
            repeated = _last_code(record.outcome.history) == failure.code
            self._failed(record, rows[repeated], attempt, delays, retries)
        if row.action is Action.FAIL and is_invalid(failure.code) and self.bisection.refused_alone(records):
            text = f"{failure.message} (the answer to other records; this one was refused with them and not sent alone)"
            for record in self.bisection.take_all():
                self._failed(record, row, Attempt(False, failure.code, text, now, now), delays, retries)  # noqa: FBT003

    def _failed(
        self,
        record: KinesisRecord,
        row: Row,
        attempt: Attempt,
        delays: dict[str | None, float],
        retries: Retries,
    ) -> None:
        match row.action:
            case Action.FAIL:
                self._ledger.fail(record, attempt)
                retries.finished.append(record)
            case Action.RETRY:
                record.failures += 1
                delay = delays.get(record.predicted_shard)
                if delay is None:
                    # Records of one shard were refused together, so they return together.
                    delay = delays[record.predicted_shard] = self.backoff(record.failures)
                self._again(record, attempt, retries, delay=delay)
            case Action.FINISH | Action.RETRY_OUTSIDE | Action.AWAIT_MAP | Action.BISECT:
                raise AssertionError(row.outcome)  # never the action for the error of one record
            case _:
                assert_never(row.action)

    def backoff(self, failures: int) -> float:
        """Draw how long to wait before the next attempt, in seconds."""
        return self._backoff.seconds(failures, self._chance)

    def _again(self, record: KinesisRecord, attempt: Attempt, retries: Retries, *, delay: float) -> None:
        record.outcome.attempted(attempt)
        now = attempt.ended_at
        if has_expired(record.expires_at, now) and not self._in_order:
            # In arrival order it expires in its place, and the records behind it wait for what is left of it.
            retries.reaggregate += self.expire(record, now)
            retries.finished.append(record)
            return
        record.deadline = min(now + self._config.retry_delay_seconds, record.expires_at)
        retries.resend.append((min(now + delay, record.expires_at), record))

    def _stored_elsewhere(self, stored: AwaitingMap, now: float, retries: Retries, *, waited: bool) -> None:
        record, entry = stored.record, stored.entry
        actual = entry.shard_id or ""
        digests = record.digests()
        case = Case(
            aggregated=record.aggregated,
            expected_shard=False,
            range_known=self._shard_map.knows(actual),
            all_inside=all(self._shard_map.is_inside(digest, actual) for digest in digests),
            waited=waited,
        )
        row = classify(case, self._config)
        if row.refresh:
            # Once for the Kinesis record, however many user records it carries. A shard missing from the map asks for
            # a refresh even if the map is newer than the request: it may have been listed before the shard was there.
            self._shard_map.invalidate(seen_at=stored.attempt.started_at if case.range_known else math.inf)
        match row.action:
            case Action.FINISH:
                self._ledger.deliver(record, entry, stored.attempt)
                retries.finished.append(record)
            case Action.AWAIT_MAP:
                self._awaiting_map.append(stored)
                self._note_wakeup()
            case Action.RETRY:
                self._take_apart(stored, [False] * len(digests), now, retries)
            case Action.RETRY_OUTSIDE:
                inside = [self._shard_map.is_inside(digest, actual) for digest in digests]
                self._take_apart(stored, inside, now, retries)
            case Action.FAIL | Action.BISECT:
                raise AssertionError(row.outcome)  # never the action for a success
            case _:
                assert_never(row.action)

    def _take_apart(self, stored: AwaitingMap, inside: list[bool], now: float, retries: Retries) -> None:
        """Finish the user records inside the shard's range, and aggregate the others again."""
        if not stored.record.aggregated:
            # Only the KPL's rule comes here. Ours never retries a single record: the service routed it by its hash key.
            self._again(stored.record, _wrong_shard_attempt(stored, now), retries, delay=0.0)
            return
        wrong = _wrong_shard_attempt(stored, now)
        predicted_shard = stored.record.predicted_shard
        for detached, is_inside in zip(stored.record.take_apart(), inside, strict=True):
            if is_inside:
                self._ledger.settle_alone(detached, stored.attempt, predicted_shard=predicted_shard, entry=stored.entry)
            else:
                retried = detached.after(wrong)
                if self._is_expired(retried, now):
                    expired = self.expired_attempt(retried, now)
                    self._ledger.settle_alone(retried, expired, predicted_shard=predicted_shard)
                else:
                    retries.reaggregate.append(retried)
        self._ledger.detach(stored.record)
        retries.finished.append(stored.record)

    def _is_expired(self, detached: DetachedUserRecord, now: float) -> bool:
        return has_expired(detached.arrived_at + self._ttl_seconds, now)

    def expire(self, record: KinesisRecord, now: float) -> list[DetachedUserRecord]:
        """Fail the expired user records of a Kinesis record; return the others, which travel on."""
        if has_expired(max(record.arrivals) + self._ttl_seconds, now):
            outcome = record.outcome
            # Without an attempt of its own, those of user records that moved here.
            history = outcome.history or next(iter((outcome.histories or {}).values()), None)
            self._ledger.fail(record, self._expired(min(record.arrivals), history, now))
            return []
        left = []
        for detached in record.take_apart():
            if self._is_expired(detached, now):
                self._ledger.settle_alone(
                    detached, self.expired_attempt(detached, now), predicted_shard=record.predicted_shard
                )
            else:
                left.append(detached)
        self._ledger.detach(record)
        return left

    def expired_attempt(self, detached: DetachedUserRecord, now: float) -> Attempt:
        """Return the attempt that fails a user record whose time to live is over. It quotes the last real error."""
        return self._expired(detached.arrived_at, detached.history, now)

    def _expired(self, arrived_at: float, history: History | None, now: float) -> Attempt:
        text = f"not delivered within its time to live, {now - arrived_at:.3f} s after put"
        if history is not None:
            text += f"; the last attempt: {_quoted(history.attempt)}"
        elif self._last_failure is not None and self._last_failure.ended_at >= arrived_at:
            text += f"; it was not sent; meanwhile others of its stream failed: {_quoted(self._last_failure)}"
        return Attempt(False, EXPIRED, text, now, now)  # noqa: FBT003

    def shards_changed(self, now: float) -> Retries:
        """Decide the outcomes that await the shard map, because it was refreshed."""
        # In arrival order none may wait while others travel on: a shard still unknown counts as outside at once.
        retries = self._decide(lambda stored: self._in_order or self._shard_map.knows(stored.entry.shard_id or ""), now)
        if self._awaiting_map:
            # Their shard is newer than this map, or the service has not listed it yet. Ask again.
            self._shard_map.invalidate(seen_at=math.inf)
        return retries

    def overdue(self, now: float) -> Retries:
        """Decide the outcomes that waited too long: without the map no record counts as inside."""
        return self._decide(lambda stored: stored.attempt.ended_at + self._map_wait_seconds <= now, now)

    def _decide(self, is_ready: Callable[[AwaitingMap], bool], now: float) -> Retries:
        retries = Retries()
        ready = [stored for stored in self._awaiting_map if is_ready(stored)]
        self._awaiting_map = [stored for stored in self._awaiting_map if not is_ready(stored)]
        self._note_wakeup()
        for stored in ready:
            self._stored_elsewhere(stored, now, retries, waited=True)
        return retries

    def _note_wakeup(self) -> None:
        first = min((stored.attempt.ended_at for stored in self._awaiting_map), default=math.inf)
        self.next_at = first + self._map_wait_seconds

    def take_awaiting_map(self) -> Iterable[KinesisRecord]:
        """Remove and return the Kinesis records whose outcome awaits the shard map."""
        taken, self._awaiting_map = self._awaiting_map, []
        self._note_wakeup()
        return [stored.record for stored in taken]

    @property
    def user_records_awaiting_map(self) -> int:
        """Return how many user records wait for a shard map to be decided by."""
        return sum(len(stored.record.arrivals) for stored in self._awaiting_map)


def _failed_attempt(failure: RequestFailure, started_at: float, now: float) -> Attempt:
    return Attempt(False, failure.code, failure.message, started_at, now)  # noqa: FBT003


def _wrong_shard_attempt(stored: AwaitingMap, now: float) -> Attempt:
    text = (
        f"stored in {stored.entry.shard_id}, predicted {stored.record.predicted_shard}: "
        f"a consumer of that shard drops what is outside its hash key range"
    )
    return Attempt(False, WRONG_SHARD, text, stored.attempt.started_at, now)  # noqa: FBT003


def _last_code(history: History | None) -> str | None:
    return None if history is None else history.attempt.error_code


def _quoted(attempt: Attempt) -> str:
    """Return code and message of a failed attempt, the message shortened."""
    # A transport of the user may give anything.
    message = str(attempt.error_message or "")
    shown = message if len(message) <= _QUOTED_CHARACTERS else f"{message[:_QUOTED_CHARACTERS]}..."
    return f"{attempt.error_code}: {shown}" if shown else str(attempt.error_code)
