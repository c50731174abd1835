"""One stream of the fake service: its life, its shards, and what happens to records put into it."""

from collections.abc import Callable, Sequence
from typing import Final

from kpl_core.testing.fake_shard import FakeShard, shard_id_of
from kpl_core.testing.faults import Faults
from kpl_core.testing.kinesis_answers import PutRecordsEntry, StreamStatistics
from kpl_core.testing.kinesis_error import (
    INVALID_ARGUMENT,
    RESOURCE_NOT_FOUND,
    SERVICE_ERRORS,
    THROUGHPUT_EXCEEDED,
    KinesisError,
)
from kpl_core.testing.put_validation import PutRecord, route_records
from kpl_core.testing.service_limits import ServiceLimits
from kpl_core.testing.shard_family import ShardFamily

__all__ = ["ACTIVE", "CREATING", "DELETING", "PROVISIONED", "UPDATING", "FakeStream"]

ACTIVE: Final = "ACTIVE"
CREATING: Final = "CREATING"
DELETING: Final = "DELETING"
UPDATING: Final = "UPDATING"

PROVISIONED: Final = "PROVISIONED"

_LARGEST_SHARD_NUMBER: Final = 2**31 - 1
_TRIM_EVERY_MS: Final = 1_000


class FakeStream:
    """A stream. `now` is in seconds of the caller's clock, `*_ms` in milliseconds since 1970."""

    def __init__(
        self,
        name: str,
        *,
        arn: str,
        account_id: str,
        mode: str,
        shard_count: int,
        now_ms: int,
        limits: ServiceLimits,
    ) -> None:
        self.name = name
        self.arn = arn
        self.mode = mode
        self.created_ms = now_ms
        self.max_record_bytes = limits.default_max_record_bytes
        self.shards = ShardFamily(shard_count, now_ms=now_ms, limits=limits)
        self.statistics = StreamStatistics()
        self._account_id = account_id
        self._limits = limits
        self._status = ACTIVE
        self._changes_at = 0.0
        self._change: Callable[[int], object] | None = None
        self._counter = 0
        self._latest_ms = now_ms
        self._trim_at_ms = now_ms

    def __repr__(self) -> str:
        return f"<FakeStream {self.name} {self._status} {len(self.shards.open)} open shards>"

    def __str__(self) -> str:
        return f"stream {self.name} under account {self._account_id}"

    # -- life

    def status(self, now: float, now_ms: int) -> str:
        """Return the status at `now`, after a change whose time has come took effect."""
        if self._status not in {ACTIVE, DELETING} and now >= self._changes_at:
            self._status = ACTIVE
            change, self._change = self._change, None
            if change is not None:
                change(now_ms)
        return self._status

    def gone(self, now: float) -> bool:
        """Return whether the deletion of this stream is complete."""
        return self._status == DELETING and now >= self._changes_at

    def begin(self, status: str, *, until: float, change: Callable[[int], object] | None = None) -> None:
        """Enter `status` until an instant of the clock; `change` (given the time in ms) takes effect at its end."""
        self._status = status
        self._changes_at = until
        self._change = change

    # -- puts

    def put_records(
        self,
        records: Sequence[PutRecord],
        *,
        now: float,
        now_ms: int,
        faults: Faults,
        enforce_limits: bool,
        single: bool = False,
    ) -> list[PutRecordsEntry]:
        """Route, meter and store records; one answer for each, in order.

        Raises:
            KinesisError: the request is invalid as a whole; nothing was stored.
        """
        routed = route_records(records, self._limits, max_record_bytes=self.max_record_bytes, single=single)
        # A clock that steps back must not disorder the logs.
        arrived_ms = self._latest_ms = max(self._latest_ms, now_ms)
        route = self.shards.route
        faulty = faults.on_records
        counter = self._counter
        stored = throttled = faulted = stored_bytes = 0
        entries: list[PutRecordsEntry] = []
        for (partition_key, _, data), (digest, size) in zip(records, routed, strict=True):
            shard = route(digest)
            if faulty:
                refusal = self._fault(faults, partition_key, data, shard, now)
                if refusal is not None:
                    faulted += 1
                    entries.append(refusal)
                    continue
            if enforce_limits and not shard.capacity.take(size, now):
                throttled += 1
                entries.append(PutRecordsEntry(None, None, THROUGHPUT_EXCEEDED, self.throttled_message(shard)))
                continue
            counter += 1
            held = data if type(data) is bytes else bytes(data)
            number = shard.append(partition_key, held, counter, arrived_ms)
            stored += 1
            stored_bytes += size
            entries.append(PutRecordsEntry(shard.shard_id, number))
        self._counter = counter
        self._count(len(entries), stored, throttled, faulted, stored_bytes)
        if arrived_ms >= self._trim_at_ms:
            self._trim(arrived_ms)
        return entries

    def throttled_message(self, shard: FakeShard) -> str:
        """Return the service's words for a record above a shard's capacity."""
        return f"Rate exceeded for shard {shard.shard_id} in {self}."

    def _fault(
        self, faults: Faults, partition_key: str, data: bytes, shard: FakeShard, now: float
    ) -> PutRecordsEntry | None:
        error = faults.record_error(partition_key, data, stream=self.name, shard_id=shard.shard_id, now=now)
        if error is None:
            return None
        message = error.message
        if message is None:
            usual = SERVICE_ERRORS.get(error.code)
            throttled = error.code == THROUGHPUT_EXCEEDED
            message = self.throttled_message(shard) if throttled else usual.message if usual else error.code
        return PutRecordsEntry(None, None, error.code, message)

    def _count(self, offered: int, stored: int, throttled: int, faulted: int, stored_bytes: int) -> None:
        statistics = self.statistics
        statistics.put_requests += 1
        statistics.records_offered += offered
        statistics.records_stored += stored
        statistics.records_throttled += throttled
        statistics.records_faulted += faulted
        statistics.bytes_stored += stored_bytes

    def _trim(self, now_ms: int) -> None:
        self._trim_at_ms = now_ms + _TRIM_EVERY_MS
        horizon_ms = self.horizon_ms(now_ms)
        for shard in self.shards.all:
            shard.log.trim(horizon_ms)

    # -- shards

    def horizon_ms(self, now_ms: int) -> int:
        """Return the instant before which records are trimmed."""
        return now_ms - int(self._limits.retention_seconds * 1000)

    def shard(self, shard_id: str, *, missing: str = "Could not find shard {shard_id} in {stream}.") -> FakeShard:
        """Return a shard by its name; as in the service only the number behind the last hyphen counts.

        Raises:
            KinesisError: ResourceNotFoundException, worded by `missing` if the name has a number.
        """
        digits = shard_id.rpartition("-")[2]
        if not (digits.isascii() and digits.isdigit()) or int(digits) > _LARGEST_SHARD_NUMBER:
            raise KinesisError(RESOURCE_NOT_FOUND, f"Could not find shard {shard_id} in {self}.")
        index = int(digits)
        if index >= len(self.shards.all):
            message = missing.format(shard_id=shard_id_of(index), stream=self)
            raise KinesisError(RESOURCE_NOT_FOUND, message)
        return self.shards.all[index]

    def open_shard(self, shard_id: str) -> FakeShard:
        """Return an open shard by its name.

        Raises:
            KinesisError: ResourceNotFoundException, or InvalidArgumentException for a closed one.
        """
        shard = self.shard(shard_id)
        if shard.closed_ms is not None:
            message = (
                f"Shard {shard.shard_id} in {self} has already been merged or split, "
                f"and thus is not eligible for merging or splitting."
            )
            raise KinesisError(INVALID_ARGUMENT, message)
        return shard
