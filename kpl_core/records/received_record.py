"""The reading side: the user records in what a consumer received, aggregated or not, in their order.

The source is the event of an AWS Lambda function, the answer of boto3's `get_records`, one or more records of either,
or the data of one Kinesis record.
"""

from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from hashlib import blake2b
from typing import Any

import msgspec
from pybase64 import b64decode

from kpl_core.errors import ConfigError
from kpl_core.records.aggregated_record import decode
from kpl_core.records.topic import decompressed, trace_context_of
from kpl_core.records.user_record import UserRecord

Source = bytes | bytearray | memoryview | Mapping[str, Any] | Iterable[Mapping[str, Any]]


class ReceivedRecord(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """One user record that a consumer received.

    `sequence_number`, `shard_id` and `arrived_at` (seconds since 1970) are those of the Kinesis record, None if the
    source does not say them; boto3 never says the shard. `sub_sequence_number` is the place within an aggregated
    record, else 0. The partition key is "" if the source is the data of a plain record.
    """

    partition_key: str
    data: bytes
    explicit_hash_key: str | None = None
    sequence_number: str | None = None
    sub_sequence_number: int = 0
    is_aggregated: bool = False
    shard_id: str | None = None
    arrived_at: float | None = None

    @property
    def decompressed(self) -> bytes:
        """Return the data, decompressed if a topic compressed it, to 64 MiB at most; raises as `decompressed`."""
        return decompressed(self.data)

    @property
    def trace_context(self) -> dict[str, str]:
        """Return the W3C trace context that a topic put into the data; empty if there is none."""
        return trace_context_of(self.data)


def place_of(record: ReceivedRecord) -> tuple[str | None, str, int] | None:
    """Return shard, sequence number and sub-sequence number of a record; None if the source does not say them."""
    number = record.sequence_number
    return None if number is None else (record.shard_id, number, record.sub_sequence_number)


def content_of(record: ReceivedRecord) -> bytes:
    """Return a digest of the keys and the data of a record, which two different events may have in common."""
    digest = blake2b(record.data, digest_size=16)
    digest.update(f"{len(record.data)} {record.explicit_hash_key} {record.partition_key}".encode())
    return digest.digest()


class DuplicateFilter:
    """Remembers the records of a window, so that `user_records` drops those that come again.

    Two records are the same if they have the same place in the stream: a consumer such as Lambda repeats a batch that
    failed. A record that the producer sent twice has two places. To drop it too, give a key from the data. Keep one
    filter for each stream for the lifetime of the process, and one for each shard if the source does not say the
    shard. It is for one thread.

    Args:
        window_seconds: two records are duplicates if they arrived at Kinesis within this time.
        max_records: how many records it remembers; each takes about 400 bytes.
        key: returns what duplicates have in common, such as an id in the data; None: this record is not a duplicate.
            By default shard, sequence number and sub-sequence number; `content_of` compares keys and data.

    Raises:
        ConfigError: the window is not above 0.
    """

    def __init__(
        self,
        *,
        window_seconds: float = 300.0,
        max_records: int = 100_000,
        key: Callable[[ReceivedRecord], Hashable] = place_of,
    ) -> None:
        if not (window_seconds > 0 and max_records > 0):
            message = f"window_seconds is {window_seconds!r} and max_records {max_records!r}; both must be above 0"
            raise ConfigError(message)
        self._window_seconds = window_seconds
        self._max_records = max_records
        self._key = key
        # When each arrived, in the order in which they were handled.
        self._seen: OrderedDict[Hashable, float | None] = OrderedDict()
        self.dropped: list[ReceivedRecord] = []
        """The duplicates dropped by the latest call of `user_records` or `unseen`."""

    def unseen(self, records: Iterable[ReceivedRecord]) -> Iterator[ReceivedRecord]:
        """Yield the records that are no duplicates; `dropped` has the others.

        A record is remembered when the caller asks for the next one. One whose handling failed, so that the loop
        ended, comes again.
        """
        self.dropped = []
        return self._unseen(records, self.dropped)

    def _unseen(self, records: Iterable[ReceivedRecord], dropped: list[ReceivedRecord]) -> Iterator[ReceivedRecord]:
        for record in records:
            key, now = self._key(record), record.arrived_at
            if key is not None and key in self._seen and self._is_near(self._seen[key], now):
                dropped.append(record)
                continue
            yield record
            if key is None:
                continue
            self._seen[key] = now
            self._seen.move_to_end(key)
            # Not by time: the records of one shard may be hours behind those of another.
            if len(self._seen) > self._max_records:
                self._seen.popitem(last=False)

    def _is_near(self, arrived_at: float | None, now: float | None) -> bool:
        return arrived_at is None or now is None or abs(now - arrived_at) <= self._window_seconds


def user_records(source: Source, *, duplicates: DuplicateFilter | None = None) -> Iterator[ReceivedRecord]:
    """Yield the user records of a Lambda event, of an answer of `get_records`, or of a record's data, in their order.

    Args:
        source: the event or answer, a list of its records, or bytes.
        duplicates: drops records that came before.

    Raises:
        TypeError: the source is none of these.
        MalformedAggregatedRecord: see `decode`. The records before it have come; the iteration ends. To know which
            Kinesis record it is, pass the records of the event one by one.
    """
    records = (record for received in _kinesis_records(source) for record in _inside(received))
    return records if duplicates is None else duplicates.unseen(records)


def _kinesis_records(source: Source) -> Iterator[ReceivedRecord]:
    if isinstance(source, bytes | bytearray | memoryview):
        yield ReceivedRecord(partition_key="", data=bytes(source))
        return
    records: Iterable[Mapping[str, Any]] = source.get("Records", [source]) if isinstance(source, Mapping) else source
    for each in records:
        if "kinesis" in each:
            kinesis = each["kinesis"]
            yield ReceivedRecord(
                partition_key=kinesis["partitionKey"],
                data=b64decode(kinesis["data"], validate=True),
                sequence_number=kinesis["sequenceNumber"],
                # Shard and sequence number, with a colon between them.
                shard_id=each["eventID"].partition(":")[0] if "eventID" in each else None,
                arrived_at=kinesis.get("approximateArrivalTimestamp"),
            )
        elif "Data" in each:
            arrived_at = each.get("ApproximateArrivalTimestamp")
            yield ReceivedRecord(
                partition_key=each["PartitionKey"],
                data=each["Data"],
                sequence_number=each.get("SequenceNumber"),
                arrived_at=None if arrived_at is None else arrived_at.timestamp(),
            )
        else:
            message = (
                f"a record has the fields {sorted(each)}, and neither 'kinesis' nor 'Data'; give the event of a Lambda "
                f"function for Kinesis, an answer of boto3's get_records, or bytes"
            )
            raise TypeError(message)


def _inside(received: ReceivedRecord) -> Iterator[ReceivedRecord]:
    inside: tuple[UserRecord, ...] | None = decode(received.data)
    if inside is None:
        yield received
        return
    for number, record in enumerate(inside):
        yield msgspec.structs.replace(
            received,
            partition_key=record.partition_key,
            data=record.data,
            explicit_hash_key=record.explicit_hash_key,
            sub_sequence_number=number,
            is_aggregated=True,
        )
