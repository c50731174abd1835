"""One stream of the fake service: its status, its shards, and what happens to records put into it.

Errors are worded as the service words them. A violated constraint is a ValidationException. A hash key out of
range and a request that is too large are an InvalidArgumentException.
"""

from collections.abc import Callable, Sequence
from typing import Final

from kpl_core.options.kinesis_limits import MAX_HASH_KEY, MIB, PARTITION_KEY_CHARACTERS
from kpl_core.records.hash_key import CANONICAL_DECIMAL, hash_key_digest, hash_key_to_digest
from kpl_core.records.put_records import PutRecordsEntry
from kpl_core.testing.fake_shard import FakeShard, ShardFamily, shard_id_of
from kpl_core.testing.faults import Faults, MergeDuringRequest, SplitDuringRequest
from kpl_core.testing.kinesis_api import (
    INVALID_ARGUMENT,
    LIMIT_EXCEEDED,
    RESOURCE_NOT_FOUND,
    SERIALIZATION,
    SERVICE_ERRORS,
    THROUGHPUT_EXCEEDED,
    KinesisError,
    ServiceLimits,
    StreamStatistics,
    constraint_violated,
)

# partition key, explicit hash key or None, data
PutRecord = tuple[str, str | None, bytes]

HASH_KEY_PATTERN: Final = r"0|([1-9]\d{0,38})"


def route_records(
    records: Sequence[PutRecord], limits: ServiceLimits, *, max_record_bytes: int, single: bool = False
) -> list[tuple[bytes, int]]:
    """Check the records of one request before any is stored; return each one's hash key and size.

    The hash key is 16 bytes; the size counts key and data in bytes. With `single`, errors name the members as
    PutRecord does.

    Raises:
        KinesisError: a record, or the request as a whole, can never be stored.
    """
    count = len(records)
    if not 1 <= count <= limits.records_per_request:
        bound = "greater than or equal to 1" if not count else f"less than or equal to {limits.records_per_request}"
        constraint = f"Member must have length {bound}"
        raise constraint_violated(path="records", constraint=constraint, value=None if count else "[]")
    routed: list[tuple[bytes, int]] = []
    total = 0
    for partition_key, explicit_hash_key, data in records:
        try:
            encoded = partition_key.encode()
        except UnicodeEncodeError as error:
            message = f"PartitionKey is not valid Unicode: {error.reason}"
            raise KinesisError(SERIALIZATION, message) from None
        size = len(encoded) + len(data)
        if not 0 < len(partition_key) <= PARTITION_KEY_CHARACTERS or size > max_record_bytes:
            path = "" if single else f"records.{len(routed) + 1}.member."
            raise _constraint_error(path, partition_key, max_record_bytes)
        if explicit_hash_key is None:
            digest = hash_key_digest(encoded)
        else:
            digest = _explicit_digest(explicit_hash_key, "" if single else f"records.{len(routed) + 1}.member.")
        total += size
        routed.append((digest, size))
    if total > limits.request_bytes:
        raise KinesisError(INVALID_ARGUMENT, f"Records size exceeds {limits.request_bytes // MIB} MB limit")
    return routed


def _constraint_error(path: str, partition_key: str, max_record_bytes: int) -> KinesisError:
    if not partition_key:
        bound = "Member must have length greater than or equal to 1"
        return constraint_violated(path=f"{path}partitionKey", constraint=bound, value="")
    if len(partition_key) > PARTITION_KEY_CHARACTERS:
        bound = f"Member must have length less than or equal to {PARTITION_KEY_CHARACTERS}"
        return constraint_violated(path=f"{path}partitionKey", constraint=bound, value=partition_key)
    # The service counts the key too, but its error names the data.
    bound = f"Member must have length less than or equal to {max_record_bytes}"
    return constraint_violated(path=f"{path}data", constraint=bound)


def _explicit_digest(explicit_hash_key: str, path: str) -> bytes:
    if CANONICAL_DECIMAL.fullmatch(explicit_hash_key) is None:
        bound = f"Member must satisfy regular expression pattern: {HASH_KEY_PATTERN}"
        raise constraint_violated(path=f"{path}explicitHashKey", constraint=bound, value=explicit_hash_key)
    hash_key = int(explicit_hash_key)
    if hash_key > MAX_HASH_KEY:
        message = (
            f"Invalid ExplicitHashKey. ExplicitHashKey must be in the range: [0, 2^128-1]. "
            f"Specified value was {explicit_hash_key}"
        )
        raise KinesisError(INVALID_ARGUMENT, message)
    return hash_key_to_digest(hash_key)


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

    # -- status

    def status(self, now: float, now_ms: int) -> str:
        """Return the status at `now`. Applies a pending change first if it is due."""
        if self._status not in {ACTIVE, DELETING} and now >= self._changes_at:
            self._status = ACTIVE
            change, self._change = self._change, None
            if change is not None:
                change(now_ms)
        return self._status

    def gone(self, now: float) -> bool:
        """Return True if the deletion of this stream is complete."""
        return self._status == DELETING and now >= self._changes_at

    def begin(self, status: str, *, until: float, change: Callable[[int], object] | None = None) -> None:
        """Enter `status` until the instant `until`. Then `change` is called with the time in ms."""
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
        """Route and store records within the shards' capacity. Return one entry for each, in order.

        Raises:
            KinesisError: the request is invalid, and nothing was stored.
        """
        routed = route_records(records, self._limits, max_record_bytes=self.max_record_bytes, single=single)
        # The logs must stay in order even if the clock steps back.
        arrived_ms = self._latest_ms = max(self._latest_ms, now_ms)
        route = self.shards.route
        faulty = faults.on_records
        counter = self._counter
        stored = throttled = faulted = stored_bytes = 0
        entries: list[PutRecordsEntry] = []
        for (partition_key, _, data), (digest, size) in zip(records, routed, strict=True):
            shard = route(digest)
            if faulty:
                failed = self._fault(faults, partition_key, data, shard, now)
                if failed is not None:
                    faulted += 1
                    entries.append(failed)
                    continue
            if enforce_limits and not shard.capacity.take(size, now):
                throttled += 1
                entries.append(
                    PutRecordsEntry(error_code=THROUGHPUT_EXCEEDED, error_message=self.throttled_message(shard))
                )
                continue
            counter += 1
            copied = data if type(data) is bytes else bytes(data)
            number = shard.append(partition_key, copied, counter, arrived_ms)
            stored += 1
            stored_bytes += size
            entries.append(PutRecordsEntry(number, shard.shard_id))
        self._counter = counter
        statistics = self.statistics
        statistics.put_requests += 1
        statistics.records_offered += len(entries)
        statistics.records_stored += stored
        statistics.records_throttled += throttled
        statistics.records_faulted += faulted
        statistics.bytes_stored += stored_bytes
        if arrived_ms >= self._trim_at_ms:
            self._trim(arrived_ms)
        return entries

    def throttled_message(self, shard: FakeShard) -> str:
        """Return the service's message for a record above a shard's capacity."""
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
        return PutRecordsEntry(error_code=error.code, error_message=message)

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
        """Return a shard by its id. As in the service, only the number after the last hyphen counts.

        Raises:
            KinesisError: ResourceNotFoundException, worded by `missing` if the id has a number.
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
        """Return an open shard by its id.

        Raises:
            KinesisError: ResourceNotFoundException, or InvalidArgumentException if the shard is closed.
        """
        shard = self.shard(shard_id)
        if shard.closed_ms is not None:
            message = (
                f"Shard {shard.shard_id} in {self} has already been merged or split, "
                f"and thus is not eligible for merging or splitting."
            )
            raise KinesisError(INVALID_ARGUMENT, message)
        return shard

    # -- resharding

    def checked_split(self, shard_id: str, new_starting_hash_key: int) -> FakeShard:
        """Return the shard to split after checking what SplitShard checks.

        Raises:
            KinesisError: the shard is not open, or the hash key is not inside its range.
        """
        shard = self.open_shard(shard_id)
        if not shard.starting_hash_key + 1 < new_starting_hash_key < shard.ending_hash_key:
            message = (
                f"NewStartingHashKey {new_starting_hash_key} used in SplitShard() on shard {shard.shard_id} in {self} "
                f"is not both greater than one plus the shard's StartingHashKey {shard.starting_hash_key} "
                f"and less than the shard's EndingHashKey {shard.ending_hash_key}."
            )
            raise KinesisError(INVALID_ARGUMENT, message)
        return shard

    def checked_merge(self, shard_id: str, adjacent_shard_id: str) -> tuple[FakeShard, FakeShard]:
        """Return the two shards to merge after checking what MergeShards checks.

        Raises:
            KinesisError: a shard is not open, or the second one's range does not follow the first one's.
        """
        shard, adjacent = self.open_shard(shard_id), self.open_shard(adjacent_shard_id)
        if self.shards.neighbour(shard) is not adjacent:
            message = (
                f"Shards {shard.shard_id} and {adjacent.shard_id} in {self} "
                f"are not an adjacent pair of shards eligible for merging"
            )
            raise KinesisError(INVALID_ARGUMENT, message)
        return shard, adjacent

    def check_shard_count(self, target: int, *, room: int) -> None:
        """Check the target of UpdateShardCount. `room` is the number of shards that the account may still open.

        Raises:
            KinesisError: LimitExceededException; more than double, less than half, or above the account's quota.
        """
        now_open = len(self.shards.open)
        counts = f"Current open shard count: {now_open}, Target shard count: {target}"
        if target > now_open * 2:
            message = f"UpdateShardCount cannot scale up over double your current open shard count. {counts}"
            raise KinesisError(LIMIT_EXCEEDED, message)
        if target * 2 < now_open:
            message = f"UpdateShardCount cannot scale down below half your current open shard count. {counts}"
            raise KinesisError(LIMIT_EXCEEDED, message)
        if target - now_open > room:
            limit = now_open + room
            message = f"Target shard count or number of open shards cannot be greater than {limit}. {counts}"
            raise KinesisError(LIMIT_EXCEEDED, message)

    def reshard_at_once(self, effect: SplitDuringRequest | MergeDuringRequest, now_ms: int) -> None:
        """Apply a split or merge fault in the middle of a request.

        The fault does nothing if the shard is not open, or if it has no right neighbour (to merge) or only one hash
        key (to split).
        """
        family = self.shards
        named = next((shard for shard in family.open if shard.shard_id == effect.shard_id), None)
        if isinstance(effect, SplitDuringRequest):
            shard = family.widest() if effect.shard_id is None else named
            if shard is not None and shard.ending_hash_key > shard.starting_hash_key:
                middle = (shard.starting_hash_key + shard.ending_hash_key) // 2 + 1
                family.split(shard, middle, now_ms)
            return
        shard = family.open[0] if effect.shard_id is None else named
        neighbour = None if shard is None else family.neighbour(shard)
        if shard is not None and neighbour is not None:
            family.merge(shard, neighbour, now_ms)
