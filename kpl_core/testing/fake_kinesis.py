"""A Kinesis Data Streams without I/O: what the service would answer, computed.

Streams, shards, routing, per-shard write capacity, validation and error wording follow the
service (AWS, Amazon Kinesis Data Streams API Reference 2013-12-02). It leaves out read limits,
consumers with enhanced fan-out, encryption, tags and metrics.

Time is an argument: `now` is in seconds of the caller's clock, and `epoch` says which second
since 1970 the clock's 0 is; what is reported as a timestamp is in milliseconds since 1970.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Final

from kpl_core.options.kinesis_limits import KIB, SHARDS_PER_PAGE
from kpl_core.testing.fake_account import FakeAccount
from kpl_core.testing.fake_shard import shard_id_of
from kpl_core.testing.fake_stream import CREATING, PROVISIONED
from kpl_core.testing.fault_effects import MergeDuringRequest, SplitDuringRequest
from kpl_core.testing.faults import Faults
from kpl_core.testing.kinesis_answers import (
    PutRecordsEntry,
    RecordsPage,
    ShardCountChange,
    ShardDescription,
    ShardPage,
    StoredRecord,
    StreamDescription,
    StreamPage,
    StreamStatistics,
    StreamSummary,
)
from kpl_core.testing.kinesis_error import (
    EXPIRED_ITERATOR,
    INVALID_ARGUMENT,
    RESOURCE_NOT_FOUND,
    KinesisError,
    constraint_violated,
)
from kpl_core.testing.list_token import LIFETIME_MS, ShardIterator, decode_token, encode_token
from kpl_core.testing.put_validation import PutRecord
from kpl_core.testing.resharding import checked_merge, checked_shard_count, checked_split, reshard_at_once
from kpl_core.testing.service_limits import ServiceDurations, ServiceLimits
from kpl_core.testing.shard_filter import ShardFilter
from kpl_core.testing.shard_listing import continued_listing, describe_shard, listing_of, new_listing, shard_page
from kpl_core.testing.shard_reader import everything, read, starting_position

__all__ = ["FakeKinesis"]

_ITEMS_PER_PAGE: Final = 100
_RECORDS_PER_ANSWER: Final = 10_000
_NO_SUCH_SHARD: Final = "Shard {shard_id} in {stream} does not exist"


class FakeKinesis:
    """The service's state. `stream` is everywhere a stream's name or its ARN.

    Args:
        streams: streams to begin with, name -> number of shards, active at once.
        enforce_limits: meter the shards' write capacity; may be changed at any time.
        limits, durations: the quotas, and how long changes of a stream last.
        chance: source of floats in [0, 1) for faults with a probability; seeded by default.
        arn_prefix: what a stream's ARN is before its name; region and account of error messages.
        epoch: seconds since 1970 at which the caller's clock reads 0.
        now: when the streams to begin with were created.

    Every operation may raise `KinesisError`, worded as the service does; then nothing changed.
    `faults` are the fault switches: per-record errors and reshards are carried out here, the
    rest by who serves the requests. `calls` counts operations by name.
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
        """Create a stream; `ON_DEMAND` starts with 4 shards and takes no `shard_count`."""
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
        """Describe a stream and at most 100 of its shards, closed ones too."""
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
        """List streams by name, `limit` a page."""
        self.calls["ListStreams"] += 1
        after = exclusive_start_stream_name or ""
        return self._account.page(limit=limit, after=after, next_token=next_token, now=now)

    def update_max_record_size(self, stream: str, *, max_record_size_kib: int, now: float) -> None:
        """Set the largest record, key and data, that the stream takes: 1,024 .. 10,240 KiB."""
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
        shard_filter: ShardFilter | None = None,
        exclusive_start_shard_id: str | None = None,
        max_results: int = SHARDS_PER_PAGE,
        next_token: str | None = None,
        now: float,
    ) -> ShardPage:
        """List shards, at most 1,000 a page; a next token stands alone for stream, filter and start."""
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
        """Replace an open shard by two; the second one's range starts at `new_starting_hash_key`."""
        self.calls["SplitShard"] += 1
        found = self._account.active(stream, now, provisioned=True)
        shard = checked_split(found, shard_id, new_starting_hash_key)
        self._account.check_room(1, now)
        self._account.change(found, lambda now_ms: found.shards.split(shard, new_starting_hash_key, now_ms), now)

    def merge_shards(self, stream: str, *, shard_id: str, adjacent_shard_id: str, now: float) -> None:
        """Replace two open shards by one; the adjacent one's range follows the first one's."""
        self.calls["MergeShards"] += 1
        found = self._account.active(stream, now, provisioned=True)
        shard, adjacent = checked_merge(found, shard_id, adjacent_shard_id)
        self._account.change(found, lambda now_ms: found.shards.merge(shard, adjacent, now_ms), now)

    def update_shard_count(self, stream: str, *, target_shard_count: int, now: float) -> ShardCountChange:
        """Reach `target_shard_count` even shards, from half to double of those open now."""
        self.calls["UpdateShardCount"] += 1
        found = self._account.active(stream, now, provisioned=True)
        current = len(found.shards.open)
        checked_shard_count(found, target_shard_count, room=self._account.room(now))
        self._account.change(found, lambda now_ms: found.shards.rescale(target_shard_count, now_ms), now)
        return ShardCountChange(found.name, found.arn, current, target_shard_count)

    def reshard(self, stream: str, effect: SplitDuringRequest | MergeDuringRequest, *, now: float) -> None:
        """Carry out an armed split or merge at once, whatever the durations say."""
        found = self._account.stream(stream, now)
        reshard_at_once(found, effect, self._account.milliseconds(now))

    # -- records

    def put_records(self, stream: str, records: Sequence[PutRecord], *, now: float) -> list[PutRecordsEntry]:
        """Put 1 .. 500 records, each `(partition key, explicit hash key or None, data)`.

        Returns one entry for each, in order: stored with shard and sequence number, or refused
        alone with an error code (throttled, or by an armed fault).
        """
        self.calls["PutRecords"] += 1
        return self._put(stream, records, now=now, single=False)

    def put_record(self, stream: str, record: PutRecord, *, now: float) -> PutRecordsEntry:
        """Put one record; what PutRecords says per record, PutRecord raises."""
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
        """Return where to start reading a shard; the iterator lives for 300 seconds.

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
        """Return records in sequence order: at most `limit`, and at most 10 MiB unless the first is larger."""
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
        # An iterator of a deleted stream is none of the stream that has its name now.
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
        """Return the stream and the page (from 1) that ListShards with this token asks for."""
        return listing_of(next_token)

    def statistics(self, stream: str) -> StreamStatistics:
        """Return the live counters of a stream."""
        return self._account.stream(stream, 0.0, ready=False).statistics

    def open_shards(self, stream: str, *, now: float = 0.0) -> tuple[ShardDescription, ...]:
        """Return the open shards in the order of their hash key ranges; counts as no call."""
        return tuple(describe_shard(shard) for shard in self._account.stream(stream, now).shards.open)

    def records(self, stream: str) -> list[StoredRecord]:
        """Return all records a stream holds, shard by shard in sequence order; counts as no call."""
        found = self._account.stream(stream, 0.0, ready=False)
        return [record for shard in found.shards.all for record in everything(shard)]
