"""A fake of Kinesis Data Streams in memory, without I/O.

Streams, shards, routing, per-shard write capacity, validation and error wording follow the service (AWS, Amazon
Kinesis Data Streams API Reference 2013-12-02). Read limits, consumers with enhanced fan-out, encryption, tags and
metrics are left out.

Time is an argument: `now` is in seconds of the caller's clock, which reads 0 at `epoch` seconds since 1970. Answers
state timestamps in milliseconds since 1970.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Final

from kpl_core.options.kinesis_limits import KIB, SHARDS_PER_PAGE
from kpl_core.records.put_records import PutRecordsEntry
from kpl_core.testing.fake_account import FakeAccount
from kpl_core.testing.fake_shard import shard_id_of
from kpl_core.testing.fake_stream import CREATING, PROVISIONED, PutRecord
from kpl_core.testing.faults import Faults, MergeDuringRequest, SplitDuringRequest
from kpl_core.testing.kinesis_api import (
    EXPIRED_ITERATOR,
    INVALID_ARGUMENT,
    RESOURCE_NOT_FOUND,
    KinesisError,
    RecordsPage,
    ServiceDurations,
    ServiceLimits,
    ShardCountChange,
    ShardDescription,
    ShardPage,
    StoredRecord,
    StreamDescription,
    StreamPage,
    StreamStatistics,
    StreamSummary,
    constraint_violated,
)
from kpl_core.testing.shard_listing import (
    LIFETIME_MS,
    ShardIterator,
    ShardListingFilter,
    continued_listing,
    decode_token,
    describe_shard,
    encode_token,
    listing_of,
    new_listing,
    shard_page,
)
from kpl_core.testing.shard_reader import everything, read, starting_position

_ITEMS_PER_PAGE: Final = 100
_RECORDS_PER_ANSWER: Final = 10_000
_NO_SUCH_SHARD: Final = "Shard {shard_id} in {stream} does not exist"


class FakeKinesis:
    """The state of the service. Every `stream` argument is a stream's name or its ARN.

    Args:
        streams: the first streams, name -> number of shards. They are ACTIVE at once.
        enforce_limits: enforce the shards' write capacity; may be changed at any time.
        limits, durations: the quotas, and how long changes of a stream last.
        chance: source of floats in [0, 1) for faults with a probability; seeded by default.
        arn_prefix: the part of a stream's ARN before its name. Error messages take region and account from it.
        epoch: seconds since 1970 at which the caller's clock reads 0.
        now: when the first streams were created.

    Every operation may raise `KinesisError`, worded as the service words it. Then nothing changed. Faults are armed
    in `faults`; this class applies the per-record errors and the reshards, and the code that serves the requests
    applies the others. `calls` counts operations by name.
    """

    def __init__(
        self,
        streams: Mapping[str, int] | None = None,
        *,
        enforce_limits: bool = True,
        limits: ServiceLimits | None = None,
        durations: ServiceDurations | None = None,
        chance: Callable[[], float] | None = None,
        arn_prefix: str = "arn:aws:kinesis:us-east-1:000000000000:stream/",
        epoch: float = 1_700_000_000.0,
        now: float = 0.0,
    ) -> None:
        self.enforce_limits = enforce_limits
        self.faults = Faults(chance)
        self.calls: Counter[str] = Counter()
        self._account = FakeAccount(
            limits=limits or ServiceLimits(),
            durations=ServiceDurations(),
            arn_prefix=arn_prefix,
            epoch=epoch,
        )
        for name, shard_count in (streams or {}).items():
            self._account.create(name, shard_count=shard_count, mode=PROVISIONED, max_record_size_kib=None, now=now)
        self._account.durations = durations or ServiceDurations()

    def __repr__(self) -> str:
        return f"<FakeKinesis {', '.join(map(repr, self._account.streams()))}>"

    # -- streams

    def create_stream(
        self,
        stream_name: str,
        *,
        shard_count: int | None = None,
        mode: str = PROVISIONED,
        max_record_size_kib: int | None = None,
        now: float,
    ) -> None:
        """Create a stream. Mode `ON_DEMAND` starts with 4 shards and accepts no `shard_count`."""
        self.calls["CreateStream"] += 1
        self._account.create(
            stream_name, shard_count=shard_count, mode=mode, max_record_size_kib=max_record_size_kib, now=now
        )

    def delete_stream(self, stream: str, *, now: float) -> None:
        """Delete a stream and all its records."""
        self.calls["DeleteStream"] += 1
        self._account.delete(stream, now)

    def describe_stream(
        self,
        stream: str,
        *,
        limit: int = _ITEMS_PER_PAGE,
        exclusive_start_shard_id: str | None = None,
        now: float,
    ) -> StreamDescription:
        """Describe a stream and at most 100 of its shards, including closed ones."""
        self.calls["DescribeStream"] += 1
        found = self._account.stream(stream, now, ready=False)
        summary = self._account.summary(found, now)
        if summary.stream_status == CREATING:
            return StreamDescription(summary, (), has_more_shards=False)
        first = 0 if exclusive_start_shard_id is None else found.shard(exclusive_start_shard_id).index + 1
        horizon_ms = found.horizon_ms(self._account.milliseconds(now))
        shards = [shard for shard in found.shards.listed(horizon_ms) if shard.index >= first]
        shown = tuple(describe_shard(shard) for shard in shards[: min(limit, _ITEMS_PER_PAGE)])
        return StreamDescription(summary, shown, has_more_shards=len(shown) < len(shards))

    def describe_stream_summary(self, stream: str, *, now: float) -> StreamSummary:
        """Describe a stream without its shards."""
        self.calls["DescribeStreamSummary"] += 1
        return self._account.summary(self._account.stream(stream, now, ready=False), now)

    def list_streams(
        self,
        *,
        limit: int = _ITEMS_PER_PAGE,
        exclusive_start_stream_name: str | None = None,
        next_token: str | None = None,
        now: float,
    ) -> StreamPage:
        """List streams by name, at most `limit` on a page."""
        self.calls["ListStreams"] += 1
        after = exclusive_start_stream_name or ""
        return self._account.page(limit=limit, after=after, next_token=next_token, now=now)

    def update_max_record_size(self, stream: str, *, max_record_size_kib: int, now: float) -> None:
        """Set the largest record (key and data) that the stream accepts: 1,024 to 10,240 KiB."""
        self.calls["UpdateMaxRecordSize"] += 1
        limits = self._account.limits
        least, most = limits.default_max_record_bytes // KIB, limits.max_record_bytes // KIB
        if not least <= max_record_size_kib <= most:
            bound = (
                f"greater than or equal to {least}" if max_record_size_kib < least else f"less than or equal to {most}"
            )
            raise constraint_violated(
                path="maxRecordSizeInKiB", constraint=f"Member must have value {bound}", value=str(max_record_size_kib)
            )
        found = self._account.active(stream, now)
        size = max_record_size_kib * KIB
        self._account.change(found, lambda _: setattr(found, "max_record_bytes", size), now)

    # -- shards

    def list_shards(
        self,
        stream: str | None = None,
        *,
        shard_filter: ShardListingFilter | None = None,
        exclusive_start_shard_id: str | None = None,
        max_results: int = SHARDS_PER_PAGE,
        next_token: str | None = None,
        now: float,
    ) -> ShardPage:
        """List shards, at most 1,000 on a page. A next token replaces stream, filter and start shard."""
        self.calls["ListShards"] += 1
        now_ms = self._account.milliseconds(now)
        if next_token is not None:
            by = "StreamARN" if stream is not None and stream.startswith("arn:") else "StreamName"
            beside = {by: stream, "ExclusiveStartShardId": exclusive_start_shard_id, "ShardFilter": shard_filter}
            listing = continued_listing(next_token, **beside)
            self._account.check_token_age(listing.issued_ms, now)
            found = self._account.stream(listing.stream_name, now)
        elif stream is None:
            raise KinesisError(INVALID_ARGUMENT, "StreamName, StreamARN or NextToken must be provided.")
        else:
            found = self._account.stream(stream, now)
            listing = new_listing(
                found, shard_filter=shard_filter, exclusive_start_shard_id=exclusive_start_shard_id, now_ms=now_ms
            )
        found.statistics.list_shards_requests += 1
        return shard_page(found, listing, max_results=max_results, now_ms=now_ms)

    def split_shard(self, stream: str, *, shard_id: str, new_starting_hash_key: int, now: float) -> None:
        """Replace an open shard by two. The second one's range starts at `new_starting_hash_key`."""
        self.calls["SplitShard"] += 1
        found = self._account.active(stream, now, provisioned=True)
        shard = found.checked_split(shard_id, new_starting_hash_key)
        self._account.check_room(1, now)
        self._account.change(found, lambda now_ms: found.shards.split(shard, new_starting_hash_key, now_ms), now)

    def merge_shards(self, stream: str, *, shard_id: str, adjacent_shard_id: str, now: float) -> None:
        """Replace two open shards by one. The range of `adjacent_shard_id` must follow that of `shard_id`."""
        self.calls["MergeShards"] += 1
        found = self._account.active(stream, now, provisioned=True)
        shard, adjacent = found.checked_merge(shard_id, adjacent_shard_id)
        self._account.change(found, lambda now_ms: found.shards.merge(shard, adjacent, now_ms), now)

    def update_shard_count(self, stream: str, *, target_shard_count: int, now: float) -> ShardCountChange:
        """Split and merge until there are `target_shard_count` even shards: half to double of those open now."""
        self.calls["UpdateShardCount"] += 1
        found = self._account.active(stream, now, provisioned=True)
        current = len(found.shards.open)
        found.check_shard_count(target_shard_count, room=self._account.room(now))
        self._account.change(found, lambda now_ms: found.shards.rescale(target_shard_count, now_ms), now)
        return ShardCountChange(found.name, found.arn, current, target_shard_count)

    def reshard(self, stream: str, effect: SplitDuringRequest | MergeDuringRequest, *, now: float) -> None:
        """Apply a split or merge fault at once, without the duration of an update."""
        found = self._account.stream(stream, now)
        found.reshard_at_once(effect, self._account.milliseconds(now))

    # -- records

    def put_records(self, stream: str, records: Sequence[PutRecord], *, now: float) -> list[PutRecordsEntry]:
        """Put 1 to 500 records, each `(partition key, explicit hash key or None, data)`.

        Returns one entry for each record, in order. A stored record has a shard and a sequence number; a record that
        is throttled or meets an armed fault has an error code.
        """
        self.calls["PutRecords"] += 1
        return self._put(stream, records, now=now, single=False)

    def put_record(self, stream: str, record: PutRecord, *, now: float) -> PutRecordsEntry:
        """Put one record. PutRecord raises the error that PutRecords would return for the record."""
        self.calls["PutRecord"] += 1
        (entry,) = self._put(stream, (record,), now=now, single=True)
        if entry.error_code is not None:
            raise KinesisError(entry.error_code, entry.error_message)
        return entry

    def _put(self, stream: str, records: Sequence[PutRecord], *, now: float, single: bool) -> list[PutRecordsEntry]:
        return self._account.stream(stream, now).put_records(
            records,
            now=now,
            now_ms=self._account.milliseconds(now),
            faults=self.faults,
            enforce_limits=self.enforce_limits,
            single=single,
        )

    def get_shard_iterator(
        self,
        stream: str,
        *,
        shard_id: str,
        iterator_type: str = "TRIM_HORIZON",
        starting_sequence_number: str | None = None,
        timestamp_ms: int | None = None,
        now: float,
    ) -> str:
        """Return an iterator that starts to read a shard at the given place. It expires after 300 seconds.

        Types: AT_SEQUENCE_NUMBER, AFTER_SEQUENCE_NUMBER (with a sequence number), TRIM_HORIZON,
        LATEST, AT_TIMESTAMP (with a timestamp).
        """
        self.calls["GetShardIterator"] += 1
        found = self._account.stream(stream, now)
        shard = found.shard(shard_id, missing=_NO_SUCH_SHARD)
        now_ms = self._account.milliseconds(now)
        position = starting_position(
            found,
            shard,
            iterator_type,
            sequence_number=starting_sequence_number,
            timestamp_ms=timestamp_ms,
            now_ms=now_ms,
        )
        return encode_token(ShardIterator(found.name, shard.index, position, now_ms))

    def get_records(self, shard_iterator: str, *, limit: int = _RECORDS_PER_ANSWER, now: float) -> RecordsPage:
        """Return records in sequence order: at most `limit`, and at most 10 MiB unless the first one is larger."""
        self.calls["GetRecords"] += 1
        iterator = decode_token(shard_iterator, ShardIterator)
        if iterator is None:
            raise KinesisError(INVALID_ARGUMENT, "Invalid ShardIterator.")
        now_ms = self._account.milliseconds(now)
        if now_ms - iterator.issued_ms >= LIFETIME_MS:
            message = (
                f"Iterator expired. The iterator was created {now_ms - iterator.issued_ms} milliseconds ago, "
                f"which is longer than the tolerated delay of {LIFETIME_MS} milliseconds."
            )
            raise KinesisError(EXPIRED_ITERATOR, message)
        found = self._account.find(iterator.stream_name, now)
        # A new stream with the name of a deleted one must not accept the deleted stream's iterators.
        if (
            found is None
            or iterator.issued_ms < found.created_ms
            or not found.shards.has_position(iterator.shard_index, iterator.position)
        ):
            message = _NO_SUCH_SHARD.format(
                shard_id=shard_id_of(iterator.shard_index),
                stream=f"stream {iterator.stream_name} under account {self._account.account_id}",
            )
            raise KinesisError(RESOURCE_NOT_FOUND, message)
        page = read(found, found.shards.all[iterator.shard_index], iterator.position, limit=limit, now_ms=now_ms)
        found.statistics.get_records_requests += 1
        found.statistics.records_read += len(page.records)
        return page

    # -- for tests

    @property
    def epoch(self) -> float:
        """Return the seconds since 1970 at which the caller's clock reads 0."""
        return self._account.epoch

    def arn(self, stream_name: str) -> str:
        """Return the ARN of a stream of this account, whether it exists or not."""
        return self._account.arn(stream_name)

    def stream_name(self, stream: str) -> str:
        """Return the name in an ARN, or the name itself."""
        return self._account.name_of(stream)

    def listing(self, next_token: str | None) -> tuple[str | None, int]:
        """Return the stream and the page (counted from 1) that ListShards returns for this token."""
        return listing_of(next_token)

    def statistics(self, stream: str) -> StreamStatistics:
        """Return the live counters of a stream."""
        return self._account.stream(stream, 0.0, ready=False).statistics

    def open_shards(self, stream: str, *, now: float = 0.0) -> tuple[ShardDescription, ...]:
        """Return the open shards in the order of their hash key ranges. `calls` does not count it."""
        return tuple(describe_shard(shard) for shard in self._account.stream(stream, now).shards.open)

    def records(self, stream: str) -> list[StoredRecord]:
        """Return all stored records of a stream, shard by shard in sequence order. `calls` does not count it."""
        found = self._account.stream(stream, 0.0, ready=False)
        return [record for shard in found.shards.all for record in everything(shard)]
