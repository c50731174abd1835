"""Formats a log record as one JSON object, in the caller's thread, in about a microsecond.

    plain   {"time": 1763640000.123, "level": "INFO", "logger": "orders", "message": "...", <extra>}
    ecs     Elastic Common Schema (ecs-logging's field names)
    otel    OpenTelemetry's log data model, its field names in JSON

The fields of `extra=` are added. A value that JSON cannot represent becomes its `str` (`json_safe`).
"""

import logging
import sys
import traceback
from collections.abc import Callable, Mapping
from time import gmtime, strftime
from typing import Any, Final, Literal, NamedTuple, get_args

import msgspec

from kpl_core.options.validation import require_choice

JsonFormat = Literal["plain", "ecs", "otel"]
Fields = dict[str, Any]

_STANDARD: Final = frozenset(vars(logging.makeLogRecord({})))
# Other handlers' formatters leave these attributes on a record.
_LEFT_BEHIND: Final = frozenset({"message", "asctime", "taskName"})
_STANDARD_COUNT: Final = len(_STANDARD)
_ECS_VERSION: Final = "8.11.0"
# Level: OpenTelemetry's SeverityNumber (logs data model, "Mapping of SeverityNumber").
_SEVERITY_NUMBERS: Final = (
    (logging.CRITICAL, 21),
    (logging.ERROR, 17),
    (logging.WARNING, 13),
    (logging.INFO, 9),
    (logging.DEBUG, 5),
)
_SEVERITY_TRACE: Final = 1
# A line with more text than this is encoded in the sender's thread.
_LARGE_CHARACTERS: Final = 64 * 1024
_MANY_FIELDS: Final = 1_000
# Of CPython: the bytes of a character beyond the Basic Multilingual Plane, and the most beside the text of an object.
_LONGEST_CHARACTER: Final = 4
_OBJECT_BYTES: Final = 80


# What stands for a container inside itself, as in Python's own `repr`, and for everything beyond the bounds.
_LEFT_OUT: Final = "..."
# Values that no other thread can change.
_IMMUTABLE: Final = frozenset({str, int, float, bool, type(None)})
_DEEPEST: Final = 32
# Objects that refer to each other in all directions form more paths than can be written.
_MOST_VALUES: Final = 10_000


def _trace_reader() -> Callable[[], tuple[str, str] | None]:
    try:
        from opentelemetry.context import get_current  # noqa: PLC0415 - optional
        from opentelemetry.trace import format_span_id, format_trace_id, get_current_span  # noqa: PLC0415
    except ImportError:
        return lambda: None

    def current() -> tuple[str, str] | None:
        context = get_current()
        # Outside of all spans, as most log lines are in an application that does not trace.
        if not context:
            return None
        span = get_current_span(context).get_span_context()
        return (format_trace_id(span.trace_id), format_span_id(span.span_id)) if span.is_valid else None

    return current


# Returns the current trace id and span id in lower-case hex, or None outside of a span and without opentelemetry-api.
current_trace = _trace_reader()


def text_of(value: object) -> str:
    """Return the `str` of an object without lone surrogates, which UTF-8 cannot encode; raises nothing itself."""
    try:
        text = str(value)
    except Exception:  # noqa: BLE001 - the object's own code
        text = f"<{type(value).__qualname__} whose str() fails>"
    return text if text.isascii() else text.encode(errors="backslashreplace").decode()


_encode = msgspec.json.Encoder(enc_hook=text_of).encode


def json_safe(value: object) -> Any:  # noqa: ANN401 - JSON of any shape
    """Return a copy of `value` that JSON can represent, in bounded time.

    The encoder handles nearly everything and asks `text_of` for the rest. This is for what makes it fail: a lone
    surrogate, a cycle, or too deep nesting.
    """
    return _JsonCopy().of(value)


class _JsonCopy:
    """One value that is copied for JSON, and the containers around the place that is copied now."""

    def __init__(self) -> None:
        self._inside: set[int] = set()
        self._left = _MOST_VALUES

    def of(self, value: object) -> Any:  # noqa: ANN401
        """Return the value, or what stands for it."""
        self._left -= 1
        if value is None or type(value) in {bool, int, float}:
            return value
        if isinstance(value, str):
            return text_of(value)
        if isinstance(value, Mapping | list | tuple | set | frozenset):
            return self._of_container(value)
        try:
            # The same text as without this copy.
            return msgspec.Raw(_encode(value))
        except Exception:  # noqa: BLE001 - as `text_of`
            return text_of(value)

    def _of_container(self, value: Any) -> Any:  # noqa: ANN401
        if id(value) in self._inside or len(self._inside) >= _DEEPEST or self._left < 0:
            return _LEFT_OUT
        try:
            # Another thread may change the container meanwhile.
            members = list(value.items() if isinstance(value, Mapping) else value)
        except Exception:  # noqa: BLE001 - as `text_of`
            return text_of(value)
        self._inside.add(id(value))
        try:
            if isinstance(value, Mapping):
                return {text_of(name): self.of(each) for name, each in members}
            return [self.of(each) for each in members]
        finally:
            self._inside.discard(id(value))


def _encode_safe(fields: Fields) -> bytes:
    try:
        return _encode(fields)
    except Exception:  # noqa: BLE001 - a lone surrogate, a cycle, a failing object: no reason to lose the line
        return _encode(json_safe(fields))


def _frozen(value: object) -> object:
    """Return `value` in a form that no other thread can change."""
    if isinstance(value, str):
        return value
    try:
        return msgspec.Raw(_encode(value))
    except Exception:  # noqa: BLE001 - as `_encode_safe`
        return json_safe(value)


def _all_frozen(fields: Fields) -> Fields:
    # Most fields are such values: thousands of them are looked at in C.
    if _IMMUTABLE.issuperset(map(type, fields.values())):
        return fields
    return {name: _frozen(value) for name, value in fields.items()}


def _text_length(fields: Fields) -> int:
    return sum([len(each) for each in fields.values() if each.__class__ is str])


def _memory_of(frozen: Fields) -> int:
    if len(frozen) > _MANY_FIELDS:
        # Not below the memory: `getsizeof` of each would take most of the caller's time.
        texts = [each for each in frozen.values() if each.__class__ is str]
        text = "".join(texts)
        others = sum([len(each) for each in frozen.values() if each.__class__ is msgspec.Raw])
        return len(text) * (1 if text.isascii() else _LONGEST_CHARACTER) + others + _OBJECT_BYTES * len(frozen)
    # `getsizeof` reports a wrong size for `Raw`.
    return sum([len(each) if each.__class__ is msgspec.Raw else sys.getsizeof(each) for each in frozen.values()])


class LargeLine:
    """The line of a log record, not yet encoded, because much text takes milliseconds.

    Its length is the memory that it takes. `shared` has the fields that every line has, `trace` those of its trace.
    `extra` may be what is too large: the extra fields and the traceback. So may `members`, those of a structured
    message; a part of such a line has the beginning of their text as its message.
    """

    def __init__(
        self,
        shared: Fields,
        trace: Fields,
        extra: Fields,
        members: Fields,
        *,
        add_extra: Callable[[Fields, Fields], None],
        size: int,
    ) -> None:
        self._shared, self._trace, self._extra, self._members = shared, trace, extra, members
        self._add_extra, self._size = add_extra, size
        # What another formatter made of the record.
        self.whole: bytes | None = None
        self._message_name = "Body" if "Body" in shared else "message"

    def __len__(self) -> int:
        return self._size + len(self.whole or b"")

    @property
    def message(self) -> str:
        """Return the message, without lone surrogates."""
        text = self._shared[self._message_name]
        if not self._members:
            return text_of(text)
        members = {
            name: msgspec.json.decode(each) if isinstance(each, msgspec.Raw) else each
            for name, each in self._members.items()
        }
        return text_of({"event": text, **members} if text else members)

    def encode(self) -> bytes:
        """Return the JSON object of the whole line."""
        return _encode_safe(self._fields({**self._extra, **self._members})) if self.whole is None else self.whole

    def encode_part(self, message: str, marks: Fields, *, bare: bool = False) -> bytes:
        """Return the JSON object with another message and further fields."""
        fields = dict(self._shared) if bare else self._fields(self._extra)
        fields[self._message_name] = message
        for name in marks:
            fields.pop(name, None)
        self._add_extra(fields, marks)
        return _encode_safe(fields)

    def _fields(self, extra: Fields) -> Fields:
        fields = {**self._shared, **self._trace}
        if extra:
            self._add_extra(fields, extra)
        return fields


class JsonFormatter(logging.Formatter):
    """Formats as JSON. `encode` returns bytes, `format` the same as text.

    Args:
        json_format: the names of the fields: "plain", "ecs" or "otel".
        static_fields: fields of every line, such as the service's name; a line's own field of that name wins.

    Raises:
        ConfigError: the format is an unknown word.
    """

    def __init__(self, json_format: JsonFormat = "plain", *, static_fields: Mapping[str, Any] | None = None) -> None:
        super().__init__()
        self._static_fields = dict(static_fields or {})
        require_choice("json_format", json_format, get_args(JsonFormat))
        self._make, self._add_extra, self._error_names, self._trace_names = _FORMATS[json_format]

    def format(self, record: logging.LogRecord) -> str:
        """Return the JSON object as text."""
        return self.encode(record).decode()

    def encode(self, record: logging.LogRecord) -> bytes:
        """Return the JSON object; raises what formatting the message raises."""
        line = self.line(record)
        return line if isinstance(line, bytes) else line.encode()

    def line(self, record: logging.LogRecord) -> "bytes | LargeLine":
        """Return the JSON object, or a line to encode later if the message is large; raises as `encode`."""
        message = record.msg
        if message.__class__ is not str:
            return self._structured_line(record)
        if record.args:
            message = message % record.args
        if (
            len(record.__dict__) != _STANDARD_COUNT
            or record.exc_info
            or record.stack_info
            or self._static_fields
            or len(message) > _LARGE_CHARACTERS
        ):
            return self._line(record, message, {})
        # Most lines: only the fields that every line has.
        fields = self._make(record, message)
        trace = current_trace()
        if trace is not None:
            self._add_trace(fields, trace)
        return _encode_safe(fields)

    def _structured_line(self, record: logging.LogRecord) -> "bytes | LargeLine":
        """Return the line of a record whose message is an object. A mapping, as structlog passes it, becomes fields."""
        extra: Fields = {}
        message: object = record.msg
        if isinstance(message, dict) and not record.args:
            extra = dict(message)
            message = extra.pop("event", None) or extra.pop("message", "")
        text = str(message)
        return self._line(record, text % record.args if record.args else text, extra)

    def _line(self, record: logging.LogRecord, message: str, extra: Fields) -> "bytes | LargeLine":
        own = self._own(record)
        if len(message) > _LARGE_CHARACTERS:
            return self._large(record, message, {**own, **extra}, {})
        if len(extra) > _MANY_FIELDS or _text_length(own) + _text_length(extra) > _LARGE_CHARACTERS:
            return self._large(record, message, own, extra)
        fields = self._make(record, message)
        trace = current_trace()
        if trace is not None:
            self._add_trace(fields, trace)
        if own or extra:
            self._add_extra(fields, {**own, **extra})
        return _encode_safe(fields)

    def large_line(self, record: logging.LogRecord, message: str) -> "LargeLine":
        """Return the line of a record with another message, to encode in any thread."""
        return self._large(record, message, self._own(record), {})

    def _large(self, record: logging.LogRecord, message: str, extra: Fields, members: Fields) -> "LargeLine":
        extra, members = _all_frozen(extra), _all_frozen(members)
        trace_fields: Fields = {}
        trace = current_trace()
        if trace is not None:
            self._add_trace(trace_fields, trace)
        size = sys.getsizeof(message) + _memory_of(extra) + _memory_of(members)
        shared = self._make(record, message)
        return LargeLine(shared, trace_fields, extra, members, add_extra=self._add_extra, size=size)

    def _own(self, record: logging.LogRecord) -> Fields:
        """Return the fields of the line beside those that every line has, without those of a structured message."""
        return {**self._static_fields, **self._error_fields(record), **_extra_of(record)}

    def _add_trace(self, fields: Fields, trace: tuple[str, str]) -> None:
        fields[self._trace_names[0]], fields[self._trace_names[1]] = trace

    def _error_fields(self, record: logging.LogRecord) -> Fields:
        kind, text, stack = self._error_names
        fields: Fields = {}
        if isinstance(record.exc_info, tuple) and record.exc_info[0] is not None:
            fields[kind] = record.exc_info[0].__qualname__
            fields[text] = text_of(record.exc_info[1])
            fields[stack] = "".join(traceback.format_exception(*record.exc_info)).rstrip("\n")
        elif record.exc_text:
            fields[stack] = record.exc_text
        if record.stack_info:
            fields["stack"] = record.stack_info
        return fields


def _extra_of(record: logging.LogRecord) -> Fields:
    fields = {name: value for name, value in vars(record).items() if name not in _STANDARD and name not in _LEFT_BEHIND}
    if isinstance(fields.get("extra"), dict):
        # loguru's bound fields.
        _add_fields(fields, fields.pop("extra"))
    return fields


def _add_fields(fields: Fields, extra: Fields) -> None:
    for name, value in extra.items():
        # An added field must not replace one that is there, such as the level or the message.
        fields[f"extra.{name}" if name in fields else name] = value


def _add_attributes(fields: Fields, extra: Fields) -> None:
    fields["Attributes"] = {**fields["Attributes"], **extra}


def _plain(record: logging.LogRecord, message: str) -> Fields:
    return {"time": record.created, "level": record.levelname, "logger": record.name, "message": message}


def _ecs(record: logging.LogRecord, message: str) -> Fields:
    return {
        "@timestamp": _timestamp(record),
        "log.level": record.levelname.lower(),
        "message": message,
        "ecs.version": _ECS_VERSION,
        "log.logger": record.name,
        "log.origin.file.name": record.filename,
        "log.origin.file.line": record.lineno,
        "log.origin.function": record.funcName,
        "process.pid": record.process,
        "process.thread.name": record.threadName,
    }


def _otel(record: logging.LogRecord, message: str) -> Fields:
    level = record.levelno
    return {
        "Timestamp": str(round(record.created * 1e6) * 1_000),
        "SeverityText": record.levelname,
        "SeverityNumber": next((number for least, number in _SEVERITY_NUMBERS if level >= least), _SEVERITY_TRACE),
        "Body": message,
        "InstrumentationScope": {"Name": record.name},
        "Attributes": {
            "code.file.path": record.pathname,
            "code.function.name": record.funcName,
            "code.line.number": record.lineno,
        },
    }


# The text of the latest second, because strftime costs more than the rest of the record.
_last_second: tuple[int, str] = (-1, "")


def _timestamp(record: logging.LogRecord) -> str:
    global _last_second  # noqa: PLW0603 - one assignment, whole for every thread
    second = int(record.created)
    known, text = _last_second
    if known != second:
        text = strftime("%Y-%m-%dT%H:%M:%S", gmtime(second))
        _last_second = (second, text)
    return f"{text}.{int(record.msecs):03d}Z"


class _Format(NamedTuple):
    make: Callable[[logging.LogRecord, str], Fields]
    add_extra: Callable[[Fields, Fields], None]
    error_names: tuple[str, str, str]
    trace_names: tuple[str, str]


_FORMATS: Final[Mapping[JsonFormat, _Format]] = {
    "plain": _Format(_plain, _add_fields, ("error", "error_message", "traceback"), ("trace_id", "span_id")),
    "ecs": _Format(_ecs, _add_fields, ("error.type", "error.message", "error.stack_trace"), ("trace.id", "span.id")),
    "otel": _Format(
        _otel,
        _add_attributes,
        ("exception.type", "exception.message", "exception.stacktrace"),
        ("TraceId", "SpanId"),
    ),
}
