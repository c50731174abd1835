"""A log record as one JSON object, in the caller's thread, for about a microsecond.

    plain   {"time": 1763640000.123, "level": "INFO", "logger": "orders", "message": "...", <extra>}
    ecs     Elastic Common Schema (ecs-logging's field names)
    otel    OpenTelemetry's log data model, its field names in JSON

What `extra=` brings is added; what JSON cannot say becomes its `str` (`sayable`).
"""

import logging
import traceback
from collections.abc import Callable, Mapping
from time import gmtime, strftime
from typing import Any, Final, Literal, get_args

import msgspec

from kpl_core import ConfigError
from kpl_integrations.logging_handler.sayable import sayable, text_of
from kpl_integrations.logging_handler.trace_context import current_trace

__all__ = ["JsonFormat", "JsonFormatter"]

JsonFormat = Literal["plain", "ecs", "otel"]
Fields = dict[str, Any]

_STANDARD: Final = frozenset(vars(logging.makeLogRecord({})))
# Left behind by other handlers' formatters.
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


_encode = msgspec.json.Encoder(enc_hook=text_of).encode


class JsonFormatter(logging.Formatter):
    """Formats as JSON; `encode` gives bytes, `format` the same as text.

    Raises:
        ConfigError: the format is an unknown word.
    """

    def __init__(self, json_format: JsonFormat = "plain", *, static_fields: Mapping[str, Any] | None = None) -> None:
        super().__init__()
        if json_format not in get_args(JsonFormat):
            message = f"json_format is {json_format!r}; it must be one of {', '.join(map(repr, get_args(JsonFormat)))}"
            raise ConfigError(message)
        self._make = _MAKERS[json_format]
        self._add_extra = _add_attributes if json_format == "otel" else _add_fields
        self._error_names, self._trace_names = _ERROR_NAMES[json_format], _TRACE_NAMES[json_format]
        self._static_fields = dict(static_fields or {})

    def format(self, record: logging.LogRecord) -> str:
        """Return the JSON object as text."""
        return self.encode(record).decode()

    def encode(self, record: logging.LogRecord) -> bytes:
        """Return the JSON object; raises what a message's own formatting raises."""
        message = record.msg
        if message.__class__ is not str:
            return self._encode_structured(record)
        if record.args:
            message = message % record.args
        if len(record.__dict__) != _STANDARD_COUNT or record.exc_info or record.stack_info or self._static_fields:
            return self.encode_message(record, message, {})
        # What most lines are: nothing but what every line has.
        fields = self._make(record, message)
        trace = current_trace()
        if trace is not None:
            self._add_trace(fields, trace)
        try:
            return _encode(fields)
        except Exception:  # noqa: BLE001 - as below
            return _encode(sayable(fields))

    def _encode_structured(self, record: logging.LogRecord) -> bytes:
        """Encode a record whose message is an object: a mapping, as structlog hands it on, becomes fields."""
        extra: Fields = {}
        message: object = record.msg
        if isinstance(message, dict) and not record.args:
            extra = dict(message)
            message = extra.pop("event", None) or extra.pop("message", "")
        text = str(message)
        return self.encode_message(record, text % record.args if record.args else text, extra)

    def encode_message(self, record: logging.LogRecord, message: str, extra: Fields) -> bytes:
        """Return the JSON object of `record` with another message and further fields."""
        fields = self._make(record, message)
        trace = current_trace()
        if trace is not None:
            self._add_trace(fields, trace)
        extra = {**self._static_fields, **self._error_fields(record), **_extra_of(record), **extra}
        if extra:
            self._add_extra(fields, extra)
        try:
            return _encode(fields)
        except Exception:  # noqa: BLE001 - a lone surrogate, a cycle, an object of anybody's: no reason to lose the line
            return _encode(sayable(fields))

    def _add_trace(self, fields: Fields, trace: tuple[str, str]) -> None:
        fields[self._trace_names[0]], fields[self._trace_names[1]] = trace

    def encode_bare(self, record: logging.LogRecord, message: str, extra: Fields) -> bytes:
        """Return it without the record's own extra fields and traceback, which may be what is too large."""
        fields = self._make(record, message)
        self._add_extra(fields, extra)
        return _encode(sayable(fields))

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
    return {name: value for name, value in vars(record).items() if name not in _STANDARD and name not in _LEFT_BEHIND}


def _add_fields(fields: Fields, extra: Fields) -> None:
    for name, value in extra.items():
        # An extra field must not pass for the level or the message.
        fields[f"extra.{name}" if name in fields else name] = value


def _add_attributes(fields: Fields, extra: Fields) -> None:
    fields["Attributes"].update(extra)


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


# The text of the last second: strftime costs more than the rest of the record.
_last_second: tuple[int, str] = (-1, "")


def _timestamp(record: logging.LogRecord) -> str:
    global _last_second  # noqa: PLW0603 - one assignment, whole for every thread
    second = int(record.created)
    known, text = _last_second
    if known != second:
        text = strftime("%Y-%m-%dT%H:%M:%S", gmtime(second))
        _last_second = (second, text)
    return f"{text}.{int(record.msecs):03d}Z"


_MAKERS: Final[Mapping[str, Callable[[logging.LogRecord, str], Fields]]] = {"plain": _plain, "ecs": _ecs, "otel": _otel}
_ERROR_NAMES: Final = {
    "plain": ("error", "error_message", "traceback"),
    "ecs": ("error.type", "error.message", "error.stack_trace"),
    "otel": ("exception.type", "exception.message", "exception.stacktrace"),
}
_TRACE_NAMES: Final = {
    "plain": ("trace_id", "span_id"),
    "ecs": ("trace.id", "span.id"),
    "otel": ("TraceId", "SpanId"),
}
