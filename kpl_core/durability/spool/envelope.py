"""What is stored of a user record: pure data and its encoding, and the calls that put it back into a producer.

A `SpooledRecord` is what the caller put. A `DeadLetter` adds the outcome. Both are positional MessagePack arrays. A
field with a default may be added at the end: old rows stay readable, and old code ignores new fields. Any other change
is a new schema version with a migration.

Instants are Unix seconds, because a monotonic instant has no meaning after a restart.
"""

import zlib
from collections.abc import Callable, Mapping
from datetime import datetime
from typing import Any, Final, Protocol, TypeVar, runtime_checkable

import msgspec

from kpl_core.records.record_result import Reason, RecordResult
from kpl_core.records.user_record import Tier


class SpooledRecord(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One user record as it was accepted. `accepted_at` is Unix seconds."""

    stream: str
    partition_key: str
    data: bytes
    accepted_at: float
    explicit_hash_key: str | None = None
    flow: str | None = None
    tier: Tier = "normal"
    metadata: dict[Any, Any] | None = None

    @property
    def size_bytes(self) -> int:
        """Key + data, the size that Kinesis counts (slightly less for a key outside ASCII)."""
        return len(self.partition_key) + len(self.data)


class DeadLetter(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A user record that was not delivered, and why. Its source timestamp is never changed.

    `first_seen` and `last_attempt` are Unix seconds. `source_timestamp`, `severity` and `traceparent` are the caller's
    `metadata` entries "timestamp", "severity" and "traceparent"; all other entries stay in `metadata`.
    """

    id: str
    stream: str
    partition_key: str
    explicit_hash_key: str | None
    data: bytes
    tenant: str | None
    tier: Tier
    severity: str | int | None
    source_timestamp: str | int | float | None
    first_seen: float
    last_attempt: float | None
    attempts: int
    error_code: str | None
    error_message: str | None
    shard_id: str | None
    reason: Reason
    traceparent: str | None
    producer_version: str
    metadata: dict[Any, Any] | None = None

    def as_record(self) -> SpooledRecord:
        """Return the user record, ready to be put again."""
        metadata = dict(self.metadata or {})
        for name in ("severity", "traceparent"):
            if (value := getattr(self, name)) is not None:
                metadata[name] = value
        if self.source_timestamp is not None:
            metadata["timestamp"] = self.source_timestamp
        return SpooledRecord(
            stream=self.stream,
            partition_key=self.partition_key,
            data=self.data,
            accepted_at=self.first_seen,
            explicit_hash_key=self.explicit_hash_key,
            flow=self.tenant,
            tier=self.tier,
            metadata=metadata or None,
        )


_Contents = TypeVar("_Contents", SpooledRecord, DeadLetter)


def _encodable(value: object) -> str | bytes:
    """Convert what MessagePack does not support: subclasses of str and bytes to their base type, the rest to text."""
    if isinstance(value, str):
        return _text(value, str.__str__)
    return bytes(memoryview(value)) if isinstance(value, bytes) else _text(value)


def _text(value: object, say: Callable[[Any], str] = repr) -> str:
    """Return text for a value that MessagePack does not support; its `repr` or `str` may be any code."""
    try:
        text = say(value)
    except Exception as error:  # noqa: BLE001 - bad metadata must not lose the record
        text = f"<{type(value).__name__} that raises {type(error).__name__}>"
    return text.encode(errors="backslashreplace").decode()


_NOT_ENCODABLE: Final = (TypeError, ValueError, OverflowError, RecursionError)
# Metadata may contain any object.
_encoder: Final = msgspec.msgpack.Encoder(enc_hook=_encodable)
_record_decoder: Final = msgspec.msgpack.Decoder(SpooledRecord)
_letter_decoder: Final = msgspec.msgpack.Decoder(DeadLetter)


def decode_record(checksum: int, envelope: bytes) -> SpooledRecord | None:
    """Return the record, None if the bytes changed since they were written."""
    return _open(_record_decoder, checksum, envelope)


def decode_letter(checksum: int, envelope: bytes) -> DeadLetter | None:
    """Return the dead letter, None if the bytes changed since they were written."""
    return _open(_letter_decoder, checksum, envelope)


def encode(contents: SpooledRecord | DeadLetter) -> tuple[int, bytes]:
    """Return the checksum (CRC-32) and the bytes of a record or a dead letter."""
    try:
        envelope = _encoder.encode(contents)
    except _NOT_ENCODABLE as error:
        if contents.metadata is None:
            raise
        # For example an integer of 70 bits, a lone surrogate or a mapping inside itself: drop the metadata, keep the
        # record.
        envelope = _encoder.encode(msgspec.structs.replace(contents, metadata=_unserialisable(error)))
    return zlib.crc32(envelope), envelope


def _unserialisable(error: Exception) -> dict[Any, Any]:
    return {"unserialisable": f"{type(error).__name__}: {_text(error, str)}"[:500]}


def _open(decoder: "msgspec.msgpack.Decoder[_Contents]", checksum: int, envelope: bytes) -> "_Contents | None":
    # SQLite does not checksum its pages, so without this a flipped bit would be delivered as data.
    if zlib.crc32(envelope) != checksum:
        return None
    try:
        return decoder.decode(envelope)
    except (msgspec.DecodeError, RecursionError):
        # The metadata is nested too deeply for the present stack.
        return None


def spooled_record_of(
    stream: str,
    partition_key: str,
    data: bytes,
    *,
    accepted_at: float,
    explicit_hash_key: str | None = None,
    flow: str | None = None,
    tier: Tier = "normal",
    metadata: Mapping[str, Any] | None = None,
) -> SpooledRecord:
    """Return the record with a copy of its metadata."""
    try:
        copied = None if metadata is None else dict(metadata)
    except Exception as error:  # noqa: BLE001 - the mapping may be the caller's own class
        copied = _unserialisable(error)
    return SpooledRecord(stream, partition_key, data, accepted_at, explicit_hash_key, flow, tier, copied)


def letter_id(now: float, entropy: bytes) -> str:
    """Return an id that sorts by time: 48 bits of Unix milliseconds, then `entropy`, in hexadecimal."""
    return f"{int(now * 1000) & 0xFFFF_FFFF_FFFF:012x}{entropy.hex()}"


def dead_letter_of(
    record: SpooledRecord,
    *,
    id: str,  # noqa: A002 - the field's name in the envelope
    reason: Reason,
    producer_version: str,
    result: RecordResult | None = None,
    wall_offset: float = 0.0,
) -> DeadLetter:
    """Return the dead letter of `record`.

    `result` is the producer's result, None if the record was never put. `wall_offset` is Unix time minus the producer's
    monotonic time; it turns the last attempt's instant into a date.
    """
    metadata = dict(record.metadata or {})
    timestamp = metadata.pop("timestamp", None)
    severity = metadata.pop("severity", None)
    traceparent = metadata.pop("traceparent", None)
    attempts = () if result is None else result.attempts
    return DeadLetter(
        id=id,
        stream=record.stream,
        partition_key=record.partition_key,
        explicit_hash_key=record.explicit_hash_key,
        data=record.data,
        tenant=record.flow,
        tier=record.tier,
        severity=_field_value(severity),
        source_timestamp=_timestamp(timestamp),
        first_seen=record.accepted_at,
        last_attempt=attempts[-1].ended_at + wall_offset if attempts else None,
        attempts=len(attempts),
        error_code=_utf8(None if result is None else result.error_code),
        error_message=_utf8(None if result is None else result.error_message),
        shard_id=None if result is None else result.shard_id,
        reason=reason,
        traceparent=None if traceparent is None else _text(traceparent, str),
        producer_version=producer_version,
        metadata=metadata or None,
    )


def _timestamp(value: object) -> str | int | float | None:
    if isinstance(value, datetime):
        return value.isoformat()
    return value if isinstance(value, float) else _field_value(value)


def _field_value(value: object) -> str | int | None:
    """Return a value that fits a field of the envelope: text, or an integer in MessagePack's range."""
    if value is None or (isinstance(value, int) and -(1 << 63) <= value < 1 << 64):
        return value
    return _text(value, str)


def _utf8(text: str | None) -> str | None:
    return None if text is None else _text(text, str)


def letter_to_json(letter: DeadLetter) -> bytes:
    """Return one JSON object with the envelope's field names; `data` is base64."""
    return _json({name: getattr(letter, name) for name in letter.__struct_fields__})


def record_to_json(record: SpooledRecord) -> bytes:
    """Return one JSON object with the envelope's field names; data that is not UTF-8 is in `data_base64` instead."""
    fields: dict[str, Any] = {name: getattr(record, name) for name in record.__struct_fields__}
    try:
        fields["data"] = record.data.decode()
    except UnicodeDecodeError:
        fields["data_base64"] = fields.pop("data")
    return _json(fields)


def _json(fields: dict[str, Any]) -> bytes:
    try:
        return msgspec.json.encode(fields, enc_hook=_encodable)
    except _NOT_ENCODABLE as error:
        if fields["metadata"] is None:
            raise
        # As in the file: the metadata of one row must not cost the other rows of its batch.
        return msgspec.json.encode({**fields, "metadata": _unserialisable(error)})


class SpooledPut(Protocol):
    """Puts a record, and calls back once with its result, later on the same loop.

    It takes a callback because an awaitable would cost one task per record.
    """

    def __call__(self, record: SpooledRecord, finished: Callable[[RecordResult], None], /) -> object:
        """Put `record`; the return value is ignored.

        Raises:
            BufferFull: there is no room now; `finished` will not be called.
            InvalidUserRecord: the record can never be put; `finished` will not be called.
            ProducerClosed: nothing can be put any more; `finished` will not be called.
        """


@runtime_checkable
class SharedPut(Protocol):
    """A `SpooledPut` that knows which records travel together, so that either all of them are delivered or none.

    With it, several records of one partition key can be in flight and still arrive in order.
    """

    def __call__(self, record: SpooledRecord, finished: Callable[[RecordResult], None], ticket: Any = None, /) -> Any:  # noqa: ANN401 - its own
        """Put `record` and return its ticket; raises as `SpooledPut`.

        With the `ticket` of an earlier record, for which `joins` has just returned True, it travels with that one.
        """

    def joins(self, record: SpooledRecord, ticket: Any, /) -> bool:  # noqa: ANN401
        """Return True if `record`, put now with this ticket, would travel with the record that got it."""

    def send_now(self) -> None:
        """Send what was put without waiting for more: no record joins it before it has its result."""
