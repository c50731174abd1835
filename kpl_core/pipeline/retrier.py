"""Retry: carries out what the table of `classification.py` says of every Kinesis record of an answer."""

import math
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Final

import msgspec

from kpl_core.backoff import ExponentialBackoff
from kpl_core.options.config import Config
from kpl_core.pipeline.bisection import Bisection
from kpl_core.pipeline.classification import THROTTLED, Action, Case, Row, classify, is_invalid
from kpl_core.pipeline.ledger import Ledger
from kpl_core.pipeline.shard_map import ShardMap
from kpl_core.records.kinesis_record import KinesisRecord, MovingUserRecord
from kpl_core.records.put_records import PutRecordsAnswer, PutRecordsEntry, PutRecordsRequest, RequestFailure
from kpl_core.records.record_result import EXPIRED, INTERNAL, RECORD_COUNT_MISMATCH, WRONG_SHARD, Attempt

__all__ = ["Retrier", "Retries"]

# How long an outcome on an unknown shard waits for the map that would explain it.
HOLD_SECONDS: Final = 2.0
# In arrival order, where the shard waits with it: what is decided without the map is overtaken by what the map moves.
HOLD_SECONDS_IN_ORDER: Final = 10.0


class Held(msgspec.Struct, frozen=True):
    """A stored record whose actual shard nobody knows yet."""

    record: KinesisRecord
    entry: PutRecordsEntry
    attempt: Attempt


class Retries:
    """What has to travel again, and what each shard said."""

    __slots__ = ("apart", "gone", "request_failed", "sent", "throttled", "whole")

    def __init__(self) -> None:
        # Whole Kinesis records, and the instant from which each may be sent.
        self.whole: list[tuple[float, KinesisRecord]] = []
        # User records that leave their Kinesis record and are aggregated again.
        self.apart: list[MovingUserRecord] = []
        # The request failed as a whole, and another attempt may cure that.
        self.request_failed = False
        # Kinesis records that are final or taken apart: in arrival order, the next of their shard may go.
        self.gone: list[KinesisRecord] = []
        # By predicted shard: Kinesis records answered one by one, and those refused for throughput.
        self.sent: Counter[str | None] = Counter()
        self.throttled: Counter[str | None] = Counter()


class Retrier:
    """The interpreter of the table: settles with the ledger what is final, returns what is not."""

    def __init__(self, config: Config, shard_map: ShardMap, ledger: Ledger, *, chance: Callable[[], float]) -> None:
        self._config = config
        self._shard_map = shard_map
        self._ledger = ledger
        self._chance = chance
        self._backoff = ExponentialBackoff(
            base_seconds=config.retry_backoff_base_ms / 1000, cap_seconds=config.retry_backoff_cap_ms / 1000
        )
        self._ttl_seconds = config.record_ttl_ms / 1000
        self._in_order = config.ordering == "per_key"
        self._hold_seconds = HOLD_SECONDS_IN_ORDER if self._in_order else HOLD_SECONDS
        self._held: list[Held] = []
        # What waits in it travels in requests of its own.
        self.bisection = Bisection()

    def answered(self, request: PutRecordsRequest, answer: PutRecordsAnswer, now: float) -> Retries:
        """Decide for every Kinesis record of a request."""
        retries = Retries()
        records = request.records
        if not isinstance(answer, RequestFailure) and len(answer) != len(records):
            text = f"{len(records)} records were sent, the answer speaks of {len(answer)}"
            answer = RequestFailure(RECORD_COUNT_MISMATCH, text)
        if isinstance(answer, RequestFailure):
            self._request_failed(request, answer, now, retries)
            self.bisection.returned(records)
            return retries
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
                row = classify(Case(error_code=failure.code), self._config)
                self._failed(record, row, _failed_attempt(failure, request.started_at, now), delays, retries)
            elif shard is None or shard == entry.shard_id:
                stored.append((record, entry))
                if self._in_order:
                    retries.gone.append(record)
                if shard is None and self._shard_map.known and not self._shard_map.knows(entry.shard_id or ""):
                    # The map has a gap: listed while the stream was made, or resharded. It would stay for good.
                    self._shard_map.invalidate(seen_at=request.started_at)
            else:
                self._stored_elsewhere(Held(record, entry, success), now, retries, waited=False)
        self._ledger.deliver_all(stored, success)
        return retries

    def _request_failed(
        self, request: PutRecordsRequest, failure: RequestFailure, now: float, retries: Retries
    ) -> None:
        records = request.records
        row = classify(Case(error_code=failure.code, request_of_many=len(records) > 1), self._config)
        attempt = _failed_attempt(failure, request.started_at, now)
        if row.action is Action.BISECT:
            for record in records:
                record.outcome.attempted(attempt)
            self.bisection.split(records)
            return
        # One delay for all: they were packed together, and will be again.
        delays: dict[str | None, float] = {}
        if row.action is Action.RETRY:
            retries.request_failed = True
            delay = self.backoff(max(record.failures for record in records) + 1)
            delays = dict.fromkeys((record.predicted_shard for record in records), delay)
        for record in records:
            self._failed(record, row, attempt, delays, retries)
        if row.action is Action.FAIL and is_invalid(failure.code) and self.bisection.refused_alone(records):
            text = (
                f"{failure.message} (said of others alone; this record was refused with them, and not asked for alone)"
            )
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
        if row.action is Action.FAIL:
            self._ledger.fail(record, attempt)
            retries.gone.append(record)
            return
        record.failures += 1
        delay = delays.get(record.predicted_shard)
        if delay is None:
            # Records of one shard were refused together; they come back together.
            delay = delays[record.predicted_shard] = self.backoff(record.failures)
        self._again(record, attempt, retries, delay=delay)

    def backoff(self, failures: int) -> float:
        """Draw the seconds to wait before the next attempt after so many failures."""
        return self._backoff.seconds(failures, self._chance)

    def _again(self, record: KinesisRecord, attempt: Attempt, retries: Retries, *, delay: float) -> None:
        record.outcome.attempted(attempt)
        now = attempt.ended_at
        if record.expires_at <= now and not self._in_order:
            # In arrival order it expires in its place, where those behind it wait for what is left of it.
            retries.apart += self.expire(record, now)
            retries.gone.append(record)
            return
        record.deadline = min(now + self._config.retry_delay_seconds, record.expires_at)
        retries.whole.append((min(now + delay, record.expires_at), record))

    def _stored_elsewhere(self, held: Held, now: float, retries: Retries, *, waited: bool) -> None:
        record, entry = held.record, held.entry
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
            # Once for the Kinesis record, however many user records it carries. A shard that the map does not have
            # is news, whenever the request began: also when the map came after the answer, listed before the shard was.
            self._shard_map.invalidate(seen_at=held.attempt.started_at if case.range_known else math.inf)
        if row.action is Action.FINISH:
            self._ledger.deliver(record, entry, held.attempt)
            retries.gone.append(record)
        elif row.action is Action.HOLD:
            self._held.append(held)
        elif row.action is Action.RETRY:
            self._take_apart(held, [False] * len(digests), now, retries)
        else:
            inside = [self._shard_map.is_inside(digest, actual) for digest in digests]
            self._take_apart(held, inside, now, retries)

    def _take_apart(self, held: Held, inside: list[bool], now: float, retries: Retries) -> None:
        """Finish the user records inside, and aggregate the others anew: as they are they would miss again."""
        if not held.record.aggregated:
            # The seed's rule; our own never retries a single record, which the service routed itself.
            self._again(held.record, _wrong_shard_attempt(held, now), retries, delay=0.0)
            return
        wrong = _wrong_shard_attempt(held, now)
        predicted_shard = held.record.predicted_shard
        for moving, is_inside in zip(held.record.take_apart(), inside, strict=True):
            if is_inside:
                self._ledger.settle_alone(moving, held.attempt, predicted_shard=predicted_shard, entry=held.entry)
            else:
                retried = moving.after(wrong)
                if self._is_expired(retried, now):
                    self._ledger.settle_alone(retried, expired_attempt(retried, now), predicted_shard=predicted_shard)
                else:
                    retries.apart.append(retried)
        self._ledger.leave(held.record)
        retries.gone.append(held.record)

    def _is_expired(self, moving: MovingUserRecord, now: float) -> bool:
        return moving.arrived_at + self._ttl_seconds <= now

    def expire(self, record: KinesisRecord, now: float) -> list[MovingUserRecord]:
        """Settle the expired user records of a Kinesis record; return their neighbours, who go on unharmed."""
        if max(record.arrivals) + self._ttl_seconds <= now:
            self._ledger.fail(record, _expired_after(now - min(record.arrivals), now))
            return []
        left = []
        for moving in record.take_apart():
            if self._is_expired(moving, now):
                self._ledger.settle_alone(moving, expired_attempt(moving, now), predicted_shard=record.predicted_shard)
            else:
                left.append(moving)
        self._ledger.leave(record)
        return left

    def shards_changed(self, now: float) -> Retries:
        """Decide the held outcomes, because the shard map was refreshed."""
        # In arrival order nothing may be held while others go on: a shard still unknown counts as outside at once.
        retries = self._release(lambda held: self._in_order or self._shard_map.knows(held.entry.shard_id or ""), now)
        if self._held:
            # Their shard is newer than this map, or the service has not listed it yet: nothing else may ask again.
            self._shard_map.invalidate(seen_at=math.inf)
        return retries

    def overdue(self, now: float) -> Retries:
        """Decide the outcomes held too long: the map did not come, so nobody can say they are inside."""
        return self._release(lambda held: held.attempt.ended_at + self._hold_seconds <= now, now)

    def _release(self, is_ready: Callable[[Held], bool], now: float) -> Retries:
        retries = Retries()
        ready = [held for held in self._held if is_ready(held)]
        self._held = [held for held in self._held if not is_ready(held)]
        for held in ready:
            self._stored_elsewhere(held, now, retries, waited=True)
        return retries

    def next_wakeup(self) -> float:
        """Return when the first held outcome is overdue, `math.inf` if none is held."""
        if not self._held:
            return math.inf
        return min(held.attempt.ended_at for held in self._held) + self._hold_seconds

    def take_held(self) -> Iterable[KinesisRecord]:
        """Remove and return the Kinesis records whose outcome is held."""
        held, self._held = self._held, []
        return [entry.record for entry in held]

    @property
    def held_user_records(self) -> int:
        """Return how many user records wait for a shard map to be judged by."""
        return sum(len(held.record.arrivals) for held in self._held)


def _failed_attempt(failure: RequestFailure, started_at: float, now: float) -> Attempt:
    return Attempt(False, failure.code, failure.message, started_at, now)  # noqa: FBT003


def _wrong_shard_attempt(held: Held, now: float) -> Attempt:
    text = (
        f"stored in {held.entry.shard_id}, predicted {held.record.predicted_shard}: "
        f"a consumer of that shard drops what is outside its hash key range"
    )
    return Attempt(False, WRONG_SHARD, text, held.attempt.started_at, now)  # noqa: FBT003


def expired_attempt(moving: MovingUserRecord, now: float) -> Attempt:
    """Return the attempt that ends a user record whose time to live is over."""
    return _expired_after(now - moving.arrived_at, now)


def _expired_after(age: float, now: float) -> Attempt:
    return Attempt(False, EXPIRED, f"not delivered within its time to live, {age:.3f} s after put", now, now)  # noqa: FBT003
