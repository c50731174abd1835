import json
import logging
from pathlib import PurePath

import pytest
from hypothesis import given, strategies as st
from opentelemetry.trace import NonRecordingSpan, SpanContext, TraceFlags, use_span

from kpl_core import ConfigError
from kpl_integrations.logging_handler import JsonFormatter
from kpl_integrations.logging_handler.oversize import split, truncate


def record(message="hello %s", *args, level=logging.INFO, **attributes):
    made = logging.LogRecord("orders", level, "/app/orders.py", 7, message, args, None, "place")
    made.created, made.msecs = 1_763_640_000.25, 250.0
    made.__dict__.update(attributes)
    return made


def encoded(json_format, made):
    return json.loads(JsonFormatter(json_format).encode(made))


def test_plain_has_time_level_logger_and_message():
    assert encoded("plain", record("hello %s", "world")) == {
        "time": 1763640000.25,
        "level": "INFO",
        "logger": "orders",
        "message": "hello world",
    }


def test_ecs_has_the_schemas_names():
    fields = encoded("ecs", record("hello"))
    assert fields["@timestamp"] == "2025-11-20T12:00:00.250Z"
    assert (fields["log.level"], fields["log.logger"], fields["message"]) == ("info", "orders", "hello")
    assert (fields["ecs.version"], fields["log.origin.file.line"]) == ("8.11.0", 7)


@pytest.mark.parametrize(
    ("level", "number"),
    [(5, 1), (logging.DEBUG, 5), (logging.INFO, 9), (25, 9), (logging.WARNING, 13), (logging.ERROR, 17), (60, 21)],
)
def test_otel_has_the_data_models_names_and_numbers(level, number):
    fields = encoded("otel", record("hello", level=level, order=42))
    assert fields["Timestamp"] == "1763640000250000000"
    assert fields["SeverityNumber"] == number
    assert (fields["Body"], fields["InstrumentationScope"]) == ("hello", {"Name": "orders"})
    assert fields["Attributes"]["order"] == 42
    assert fields["Attributes"]["code.line.number"] == 7


def test_extra_is_added_and_cannot_pass_for_the_level():
    fields = encoded("plain", record("hello", order=42, level_of_trust=object, logger="mine"))
    assert fields["order"] == 42
    assert fields["level_of_trust"] == "<class 'object'>"
    assert (fields["logger"], fields["extra.logger"]) == ("orders", "mine")


def test_what_another_formatter_left_on_the_record_is_no_extra():
    made = record("hello")
    logging.Formatter("%(asctime)s %(message)s").format(made)
    assert set(encoded("plain", made)) == {"time", "level", "logger", "message"}


def test_an_exception_comes_with_its_traceback():
    with pytest.raises(ZeroDivisionError) as raised:
        1 / 0  # noqa: B018
    fields = encoded("ecs", record("failed", exc_info=(raised.type, raised.value, raised.tb)))
    assert (fields["error.type"], fields["error.message"]) == ("ZeroDivisionError", "division by zero")
    assert fields["error.stack_trace"].startswith("Traceback")


def test_a_structured_message_becomes_fields():
    fields = encoded("plain", record({"event": "placed", "order": 42}))
    assert (fields["message"], fields["order"]) == ("placed", 42)


@pytest.mark.parametrize(
    ("json_format", "names"),
    [("plain", ("trace_id", "span_id")), ("ecs", ("trace.id", "span.id")), ("otel", ("TraceId", "SpanId"))],
)
def test_the_current_span_is_named(json_format, names):
    span = NonRecordingSpan(SpanContext(0xABC, 0xDEF, is_remote=False, trace_flags=TraceFlags(1)))
    with use_span(span):
        fields = encoded(json_format, record("hello"))
    assert [fields[name] for name in names] == [f"{0xABC:032x}", f"{0xDEF:016x}"]
    assert names[0] not in encoded(json_format, record("hello"))


def test_a_lone_surrogate_is_escaped():
    assert encoded("plain", record("bad \udc80"))["message"] == "bad \\udc80"


def test_a_lone_surrogate_in_the_text_of_an_object_is_escaped():
    assert encoded("plain", record("hello", file=PurePath("bad \udc80")))["file"] == "bad \\udc80"


def test_an_unknown_format_is_refused():
    with pytest.raises(ConfigError, match="'plain', 'ecs', 'otel'"):
        JsonFormatter("xml")  # type: ignore[arg-type]


@given(st.text(min_size=1, max_size=3_000), st.sampled_from(["plain", "ecs", "otel"]))
def test_a_truncated_record_fits_and_says_so(text, json_format):
    data = truncate(record(), text, JsonFormatter(json_format), original_bytes=9_999, max_bytes=700)
    fields = json.loads(data)
    marks = fields["Attributes"] if json_format == "otel" else fields
    assert (marks["truncated"], marks["original_bytes"]) == (True, 9_999)
    assert len(data) <= 700
    message = fields["Body"] if json_format == "otel" else fields["message"]
    assert text.encode(errors="backslashreplace").decode().startswith(message)


def test_what_is_too_large_beside_the_message_goes_too():
    data = truncate(record("hello", blob="x" * 5_000), "hello", JsonFormatter(), original_bytes=5_100, max_bytes=700)
    assert len(data) <= 700
    assert json.loads(data)["message"] == "hello"


@given(st.text(min_size=1, max_size=3_000), st.sampled_from(["plain", "ecs", "otel"]))
def test_the_pieces_of_a_split_record_fit_and_make_the_whole(text, json_format):
    pieces = split(record(), text, JsonFormatter(json_format), max_bytes=700)
    assert all(len(piece) <= 700 for piece in pieces)
    fields = [json.loads(piece) for piece in pieces]
    key = "Body" if json_format == "otel" else "message"
    marks = [(each["Attributes"] if json_format == "otel" else each)["split"] for each in fields]
    assert "".join(each[key] for each in fields) == text.encode(errors="backslashreplace").decode()
    assert [(mark["index"], mark["count"]) for mark in marks] == [(n, len(pieces)) for n in range(len(pieces))]
    assert len({mark["id"] for mark in marks}) == 1
