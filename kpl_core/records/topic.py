"""Typed topics: a stream, the type of its values, their partition key and their encoder, named in one place.

`Topic.bind` gives a producer's own put methods for values instead of bytes. It works for every producer that has
`put_nowait`, `put` and `put_many`, and keeps what they return: a delivery, or an awaitable of one.

A trace context travels inside the data, because a Kinesis record has no headers: as the members `traceparent` and
`tracestate` (W3C Trace Context; the names are those of CloudEvents) of the JSON object or MessagePack map.
"""

import math
import zlib
from collections.abc import Callable, Iterable, Mapping
from importlib import import_module
from io import BytesIO
from types import NoneType, UnionType
from typing import (
    Annotated,
    Any,
    Final,
    Generic,
    Literal,
    NamedTuple,
    Protocol,
    TypeVar,
    Union,
    get_args,
    get_origin,
    is_typeddict,
)

import msgspec

from kpl_core.errors import ConfigError
from kpl_core.options.validation import require_choice
from kpl_core.records.user_record import Tier, UserRecord, as_bytes

T = TypeVar("T")
# What put_nowait, put and put_many return.
Now_co = TypeVar("Now_co", covariant=True)
Put_co = TypeVar("Put_co", covariant=True)
Many_co = TypeVar("Many_co", covariant=True)

Format = Literal["json", "msgpack"]
CompressionCodec = Literal["gzip", "zstd"]
TraceContext = Mapping[str, str]

_GZIP_MAGIC: Final = b"\x1f\x8b"
_GZIP_WBITS: Final = 31
_ZSTD_MAGIC: Final = b"\x28\xb5\x2f\xfd"
# A Kinesis record has at most 10 MiB. A small one inflates to a thousand times its size and more.
MAX_INFLATED_BYTES: Final = 64 * 1024 * 1024
_PIECE_BYTES: Final = 128 * 1024
_FIRST_BYTES: Final = 512


class Compressed(NamedTuple):
    """Wraps an encoder: its bytes are compressed. "zstd" needs the extra `zstd`. `decompressed` is the reverse."""

    encoder: "Format | Callable[[Any], bytes]"
    codec: CompressionCodec
    # None: the default of the library.
    level: int | None = None

    def compressor(self) -> Callable[[bytes], bytes]:
        """Return the function that compresses, which any thread may call."""
        require_choice("codec", self.codec, ("gzip", "zstd"))
        if self.codec == "gzip":
            level = 6 if self.level is None else self.level
            return lambda data: zlib.compress(data, level, _GZIP_WBITS)
        compress = _zstandard().compress
        level = 3 if self.level is None else self.level
        return lambda data: compress(data, level)


def _zstandard() -> Any:  # noqa: ANN401 - an optional module
    try:
        return import_module("zstandard")
    except ImportError:
        message = "zstd needs a package that is not installed; pip install 'kpl-integrations[zstd]'"
        raise ConfigError(message) from None


def decompressed(data: bytes, *, max_bytes: int = MAX_INFLATED_BYTES) -> bytes:
    """Return the data of a record that `Compressed` made; other data as it is.

    Data of several gzip members or zstd frames is what all of them hold, one after the other.

    Raises:
        ValueError: it is damaged or cut off, or inflates to more than `max_bytes`.
        ConfigError: it is zstd, and the extra `zstd` is not installed.
    """
    if data.startswith(_GZIP_MAGIC):
        inflate: Callable[[bytes, int], bytes] = _from_gzip
    elif data.startswith(_ZSTD_MAGIC):
        inflate = _from_zstd
    else:
        return data
    plain = inflate(data, max_bytes)
    if len(plain) > max_bytes:
        message = (
            f"{len(data):,} bytes of compressed data inflate to more than max_bytes={max_bytes:,}; "
            f"if you trust the data, call decompressed(data, max_bytes=...) with a larger number"
        )
        raise ValueError(message)
    return plain


def _from_gzip(data: bytes, max_bytes: int) -> bytes:
    """Inflate all members, to one byte more than the bound at most."""
    import gzip  # noqa: PLC0415 - only a consumer needs it

    try:
        return gzip.GzipFile(fileobj=BytesIO(data)).read(max_bytes + 1)
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise _damaged(error) from error


def _from_zstd(data: bytes, max_bytes: int) -> bytes:
    """Inflate all frames. If they hold more than the bound, return only a little more."""
    zstandard = _zstandard()
    decompressor = zstandard.ZstdDecompressor()
    plain = bytearray()
    try:
        # The reader is bounded, and takes a frame that is cut off for a whole one. So the frames are read once more.
        reader = decompressor.stream_reader(data, read_across_frames=True)
        while len(plain) <= max_bytes and (piece := reader.read(_PIECE_BYTES)):
            plain += piece
        if len(plain) <= max_bytes:
            _require_whole_frames(data, decompressor.decompressobj)
    except zstandard.ZstdError as error:
        raise _damaged(error) from error
    return bytes(plain)


def _require_whole_frames(data: bytes, new_frame: Callable[[], Any]) -> None:
    view, at = memoryview(data), 0
    while at < len(view):
        frame, size = new_frame(), _FIRST_BYTES
        while not frame.eof and at < len(view):
            frame.decompress(view[at : at + size])
            at += size
            # Small at first, because what follows the frame is copied.
            size *= 2
        if not frame.eof:
            message = "it is cut off"
            raise _damaged(message)
        at = min(at, len(view)) - len(frame.unused_data)


def _damaged(reason: object) -> ValueError:
    return ValueError(f"the compressed data is damaged: {reason}")


def plain_value(value: object, mode: str = "json") -> object:
    """Return what msgspec can encode instead of `value`: the fields of a pydantic model, dumped in this mode.

    Raises:
        TypeError: it is not a pydantic model.
    """
    dump = getattr(value, "model_dump", None)
    if dump is None:
        message = f"a value of type {type(value).__name__} cannot be encoded; pass an encoder, a callable to bytes"
        raise TypeError(message)
    return dump(mode=mode)


_pack: Final = msgspec.msgpack.Encoder(enc_hook=plain_value).encode


def _encoder_of(kind: object, encoder: "Format | Callable[[T], bytes]") -> Callable[[T], bytes]:
    if callable(encoder):
        return encoder
    require_choice("encoder", encoder, ("json", "msgpack"))
    if _is_raw(kind):
        return _raw_bytes
    if encoder == "json":
        if hasattr(kind, "model_dump_json"):
            return _without_nan(lambda value: value.model_dump_json().encode())  # type: ignore[attr-defined]
        return _without_nan(msgspec.json.Encoder(enc_hook=plain_value).encode)
    return _pack


def _without_nan(encode: Callable[[T], bytes]) -> Callable[[T], bytes]:
    """Raise a ValueError for a float that JSON cannot express. Both encoders make null of it."""

    def encoded(value: T) -> bytes:
        data = encode(value)
        if b"null" in data and _may_have_nan(value):
            _require_finite(value)
        return data

    return encoded


def _may_have_nan(value: object) -> bool:
    """Return whether the value in MessagePack has the first bytes of an infinity or NaN. It costs one more encoding."""
    try:
        packed = _pack(value)
    except OverflowError:
        # JSON has integers of any size.
        return True
    return b"\xcb\x7f" in packed or b"\xcb\xff" in packed


def _require_finite(value: object) -> None:
    found = [msgspec.to_builtins(value, str_keys=True, enc_hook=_without_raw)]
    while found:
        each = found.pop()
        if isinstance(each, dict):
            found.extend(each.values())
        elif isinstance(each, list | tuple):
            found.extend(each)
        elif isinstance(each, float) and not math.isfinite(each):
            message = f"JSON cannot express this value (it has the float {each}); use None, a str, or encoder='msgpack'"
            raise ValueError(message)


def _without_raw(value: object) -> object:
    # It is JSON already.
    return None if isinstance(value, msgspec.Raw) else plain_value(value)


def _is_raw(kind: object) -> bool:
    return isinstance(kind, type) and issubclass(kind, bytes | bytearray | memoryview | str)


def _raw_bytes(value: object) -> bytes:
    return value.encode() if isinstance(value, str) else as_bytes(value)


def _with_members(data: bytes, members: TraceContext, encoded: Format) -> bytes:
    """Return a JSON object or MessagePack map with these members behind its own; other data as it is.

    Its own members take precedence. A `tracestate` belongs to its `traceparent`, so neither is added beside its own.
    """
    if any(name.encode() in data for name in members):
        own = msgspec.json.decode(data) if encoded == "json" else msgspec.msgpack.decode(data, strict=False)
        if isinstance(own, dict):
            members = {} if "traceparent" in own else {name: members[name] for name in members if name not in own}
    if not members:
        return data
    if encoded == "json":
        if not (data.startswith(b"{") and data.endswith(b"}")):
            return data
        inside = msgspec.json.encode(members)[1:]
        return data[:-1] + (b"," if data[1:-1].strip() else b"") + inside
    size = next((size for low, high, size in _MAP_HEADS if low <= data[0] <= high), None)
    if size is None:
        return data
    count = len(members) + (int.from_bytes(data[1:size]) if size > 1 else data[0] & 0x0F)
    pairs = b"".join(msgspec.msgpack.encode(text) for pair in members.items() for text in pair)
    return b"\xdf" + count.to_bytes(4) + data[size:] + pairs


# First byte, from and to, and size of the head of a MessagePack map.
_MAP_HEADS: Final = ((0x80, 0x8F, 1), (0xDE, 0xDE, 3), (0xDF, 0xDF, 5))


class _TraceMembers(msgspec.Struct):
    traceparent: str | None = None
    tracestate: str | None = None


_read_json: Final = msgspec.json.Decoder(_TraceMembers).decode
_read_msgpack: Final = msgspec.msgpack.Decoder(_TraceMembers).decode


def trace_context_of(data: bytes) -> dict[str, str]:
    """Return the trace context in the data of a record, for a propagator of OpenTelemetry; empty if it has none.

    It looks into compressed data too.
    """
    try:
        data = decompressed(data)
        members = _read_json(data) if data.startswith(b"{") else _read_msgpack(data)
    except Exception:  # noqa: BLE001 - data of any other form, and whatever a decompressor makes of it
        return {}
    found = {"traceparent": members.traceparent, "tracestate": members.tracestate}
    return {name: value for name, value in found.items() if value is not None}


class Puts(Protocol[Now_co, Put_co, Many_co]):
    """A producer of any kind: `Producer`, `BlockingProducer`, or the outbox of a request."""

    def put_nowait(
        self,
        stream: str,
        *,
        partition_key: str,
        data: bytes,
        explicit_hash_key: str | None = ...,
        flow: str | None = ...,
        tier: Tier = ...,
    ) -> Now_co:
        """Accept a user record now, or raise."""

    def put(
        self,
        stream: str,
        *,
        partition_key: str,
        data: bytes,
        explicit_hash_key: str | None = ...,
        flow: str | None = ...,
        tier: Tier = ...,
    ) -> Put_co:
        """Accept a user record, waiting for room."""

    def put_many(self, stream: str, records: Iterable[UserRecord]) -> Many_co:
        """Accept many user records, waiting for room."""


def _classes_of(kind: object) -> tuple[type, ...] | None:
    """Return the classes of which a value of this type is an instance; None if the type does not say them."""
    origin = get_origin(kind)
    if origin is Union or origin is UnionType:
        parts = [_classes_of(each) for each in get_args(kind)]
        return None if None in parts else tuple(each for part in parts if part is not None for each in part)
    if origin is Annotated:
        return _classes_of(get_args(kind)[0])
    if is_typeddict(kind):
        return (dict,)
    found = NoneType if kind is None else kind if origin is None else origin
    return (found,) if isinstance(found, type) else None


class Topic(Generic[T]):
    """A stream of values of one type.

    Args:
        stream: name or ARN of the stream.
        kind: the type of the values: bytes, str, dict, list, a dataclass, a msgspec Struct, a pydantic model.
        partition_key: returns the partition key of a value.
        encoder: "json" or "msgpack" by msgspec, a callable that returns bytes, or one of these `Compressed`.
            bytes and str (as UTF-8) are sent as they are.
        explicit_hash_key, flow: return these options of a put for a value.
        tier: the tier of all values.
        trace_context: returns the W3C trace context that each record carries. It needs encoder "json" or "msgpack",
            and values that are objects.

    Raises:
        ConfigError: the encoder is unknown, or cannot carry a trace context.
    """

    def __init__(
        self,
        stream: str,
        kind: type[T],
        *,
        partition_key: Callable[[T], str],
        encoder: Format | Callable[[T], bytes] | Compressed = "json",
        explicit_hash_key: Callable[[T], str | None] | None = None,
        flow: Callable[[T], str | None] | None = None,
        tier: Tier = "normal",
        trace_context: Callable[[], TraceContext] | None = None,
    ) -> None:
        self.stream = stream
        self.kind = kind
        self._classes = _classes_of(kind)
        self._partition_key = partition_key
        self._explicit_hash_key = explicit_hash_key
        self._flow = flow
        self._tier: Tier = tier
        compress = None
        if isinstance(encoder, Compressed):
            compress, encoder = encoder.compressor(), encoder.encoder
        encode = _encoder_of(kind, encoder)
        if trace_context is not None:
            encode = self._traced(encode, encoder, trace_context)
        self._encode: Callable[[T], bytes] = encode
        if compress is not None:
            self._encode = lambda value: compress(encode(value))

    def encode(self, value: T) -> bytes:
        """Return the data of a value.

        Raises:
            TypeError: the value is of another type than the topic's.
            ValueError: it has a float that JSON cannot express.
        """
        self._require_type(value)
        return self._encode(value)

    def _require_type(self, value: object) -> None:
        if self._classes is not None and not isinstance(value, self._classes):
            wanted = self.kind.__name__ if isinstance(self.kind, type) else self.kind  # type: ignore[redundant-expr]
            message = f"topic {self.stream!r} takes values of type {wanted}, not {type(value).__name__}"
            raise TypeError(message)

    def _traced(
        self, encode: Callable[[T], bytes], encoder: object, context: Callable[[], TraceContext]
    ) -> Callable[[T], bytes]:
        if callable(encoder) or _is_raw(self.kind):
            message = (
                f"trace_context is set, and the values of topic {self.stream!r} are not JSON or MessagePack; "
                f"use encoder='json' or 'msgpack', or put the context into the values yourself"
            )
            raise ConfigError(message)
        form: Format = "msgpack" if encoder == "msgpack" else "json"
        return lambda value: _with_members(encode(value), context(), form)

    def record(self, value: T) -> UserRecord:
        """Return the user record of a value.

        Raises:
            TypeError: the value is of another type than the topic's.
            ValueError: it has a float that JSON cannot express.
        """
        self._require_type(value)
        return UserRecord(
            self._partition_key(value),
            self._encode(value),
            None if self._explicit_hash_key is None else self._explicit_hash_key(value),
            None if self._flow is None else self._flow(value),
            self._tier,
        )

    def bind(self, producer: Puts[Now_co, Put_co, Many_co]) -> "BoundTopic[T, Now_co, Put_co, Many_co]":
        """Return the put methods of a producer for values of this topic."""
        return BoundTopic(self, producer)


class BoundTopic(Generic[T, Now_co, Put_co, Many_co]):
    """A topic with its producer. Results and exceptions are those of the producer's own methods."""

    __slots__ = ("_producer", "topic")

    def __init__(self, topic: Topic[T], producer: Puts[Now_co, Put_co, Many_co]) -> None:
        self.topic = topic
        self._producer = producer

    def put_nowait(self, value: T) -> Now_co:
        """Accept a value now, or raise."""
        return self._producer.put_nowait(self.topic.stream, **self._arguments(value))

    def put(self, value: T) -> Put_co:
        """Accept a value, waiting for room."""
        return self._producer.put(self.topic.stream, **self._arguments(value))

    def put_many(self, values: Iterable[T]) -> Many_co:
        """Accept many values, waiting for room; all are encoded and checked before any is put."""
        return self._producer.put_many(self.topic.stream, [self.topic.record(value) for value in values])

    def _arguments(self, value: T) -> dict[str, Any]:
        record = self.topic.record(value)
        return {
            "partition_key": record.partition_key,
            "data": record.data,
            "explicit_hash_key": record.explicit_hash_key,
            "flow": record.flow,
            "tier": record.tier,
        }
