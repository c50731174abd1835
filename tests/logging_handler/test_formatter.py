import copy
import json
import logging
import sys
import time
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any

import pytest
from hypothesis import given, strategies as st
from opentelemetry.trace import NonRecordingSpan, SpanContext, TraceFlags, use_span

from kpl_core import ConfigError
from kpl_integrations.logging_handler import JsonFormatter
from kpl_integrations.logging_handler.entry import encode_large
from kpl_integrations.logging_handler.formatter import LargeLine


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


def test_ecs_uses_the_field_names_of_the_schema():
    fields = encoded("ecs", record("hello"))
    assert fields["@timestamp"] == "2025-11-20T12:00:00.250Z"
    assert (fields["log.level"], fields["log.logger"], fields["message"]) == ("info", "orders", "hello")
    assert (fields["ecs.version"], fields["log.origin.file.line"]) == ("8.11.0", 7)


@pytest.mark.parametrize(
    ("level", "number"),
    [(5, 1), (logging.DEBUG, 5), (logging.INFO, 9), (25, 9), (logging.WARNING, 13), (logging.ERROR, 17), (60, 21)],
)
def test_otel_uses_the_names_and_numbers_of_the_data_model(level, number):
    fields = encoded("otel", record("hello", level=level, order=42))
    assert fields["Timestamp"] == "1763640000250000000"
    assert fields["SeverityNumber"] == number
    assert (fields["Body"], fields["InstrumentationScope"]) == ("hello", {"Name": "orders"})
    assert fields["Attributes"]["order"] == 42
    assert fields["Attributes"]["code.line.number"] == 7


def test_extra_fields_are_added_and_cannot_replace_the_level():
    fields = encoded("plain", record("hello", order=42, level_of_trust=object, logger="mine"))
    assert fields["order"] == 42
    assert fields["level_of_trust"] == "<class 'object'>"
    assert (fields["logger"], fields["extra.logger"]) == ("orders", "mine")


def test_a_nested_extra_replaces_no_field():
    fields = encoded("plain", record("hello", order=42, extra={"order": 7, "level": "mine", "shop": "a"}))
    assert (fields["order"], fields["extra.order"], fields["shop"]) == (42, 7, "a")
    assert (fields["level"], fields["extra.level"]) == ("INFO", "mine")


def test_attributes_of_other_formatters_are_not_extra_fields():
    made = record("hello")
    logging.Formatter("%(asctime)s %(message)s").format(made)
    assert set(encoded("plain", made)) == {"time", "level", "logger", "message"}


def test_an_exception_is_formatted_with_its_traceback():
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


class Mute(Exception):  # noqa: N818 - also an extra field
    def __str__(self) -> str:
        raise ValueError


@dataclass
class Held:
    it: object


def cycle_of(kind: type[Any]) -> Any:
    made = kind()
    if kind is dict:
        made["me"] = made
    else:
        made.append(made)
    return made


def nested(depth: int) -> list[Any]:
    made: list[Any] = []
    for _ in range(depth):
        made = [made]
    return made


def all_to_all(count: int) -> dict[str, Any]:
    made: list[dict[str, Any]] = [{} for _ in range(count)]
    for each in made:
        each.update({str(name): other for name, other in enumerate(made)})
    return made[0]


# What JSON cannot say, and what is said.
UNSAYABLE: list[tuple[str, object, object]] = [
    ("a dictionary inside itself", cycle_of(dict), {"me": "..."}),
    ("a list inside itself", cycle_of(list), ["..."]),
    ("an object that holds one", Held(cycle_of(dict)), "Held(it={'me': {...}})"),
    ("an object without words", Mute(), "<Mute whose str() fails>"),
    ("a key without words", {Mute(): 1}, {"<Mute whose str() fails>": 1}),
    ("a lone surrogate in a set", {"bad \udc80"}, ["bad \\udc80"]),
    ("a lone surrogate in an object", Held("bad \udc80"), "Held(it='bad \\udc80')"),
    ("a key in pieces", {(1, 2): "\udc80"}, {"(1, 2)": "\\udc80"}),
]


@pytest.mark.parametrize("json_format", ["plain", "ecs", "otel"])
@pytest.mark.parametrize(("value", "said"), [row[1:] for row in UNSAYABLE], ids=[row[0] for row in UNSAYABLE])
def test_no_line_is_lost_for_one_of_its_fields(json_format, value, said):
    fields = encoded(json_format, record("hello", value=value, held=Held(7), order=42))
    fields = fields["Attributes"] if json_format == "otel" else fields
    assert (fields["value"], fields["held"], fields["order"]) == (said, {"it": 7}, 42)


# The encoder of Python 3.12 and later takes 10,000 levels.
@pytest.mark.parametrize("value", [nested(50_000), all_to_all(40)], ids=["depth", "all to all"])
def test_endless_nesting_is_cut_at_a_bound(value):
    data = JsonFormatter().encode(record("hello", value=value))
    assert b'"..."' in data
    assert len(data) < 200_000
    assert json.loads(data)["message"] == "hello"


def test_an_exception_without_a_message_is_formatted_with_its_traceback():
    with pytest.raises(Mute) as raised:
        raise Mute
    fields = encoded("plain", record("failed", exc_info=(raised.type, raised.value, raised.tb)))
    assert fields["error_message"] == "<Mute whose str() fails>"
    assert fields["traceback"].startswith("Traceback")


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary() | st.builds(Mute),
    lambda inner: (
        st.lists(inner) | st.dictionaries(st.text() | st.integers(), inner) | st.tuples(inner) | st.builds(Held, inner)
    ),
    max_leaves=20,
)


@given(st.dictionaries(st.text(min_size=1), VALUES, max_size=5), st.sampled_from(["plain", "ecs", "otel"]))
def test_every_extra_field_gives_one_json_object(extra, json_format):
    message = encoded(json_format, record("hello", **{f"x_{name}": value for name, value in extra.items()}))
    assert message["Body" if json_format == "otel" else "message"] == "hello"


def test_an_unknown_format_raises():
    with pytest.raises(ConfigError, match="'plain', 'ecs', 'otel'"):
        JsonFormatter("xml")  # type: ignore[arg-type]


def test_static_fields_are_in_every_line_and_give_way_to_the_lines_own():
    formatter = JsonFormatter(static_fields={"service": "orders", "region": "eu"})
    line = json.loads(formatter.encode(record("hello")))
    assert (line["service"], line["region"]) == ("orders", "eu")
    line = json.loads(formatter.encode(record("hello", region="us")))
    assert (line["service"], line["region"]) == ("orders", "us")


@given(st.text(min_size=1, max_size=3_000), st.sampled_from(["plain", "ecs", "otel"]))
def test_a_truncated_record_fits_and_is_marked(text, json_format):
    line = JsonFormatter(json_format).large_line(record(), text)
    line.whole = bytes(9_999)
    data = encode_large(line, rule="truncate", max_bytes=700)
    assert isinstance(data, bytes)
    fields = json.loads(data)
    marks = fields["Attributes"] if json_format == "otel" else fields
    assert (marks["truncated"], marks["original_bytes"]) == (True, 9_999)
    assert len(data) <= 700
    message = fields["Body"] if json_format == "otel" else fields["message"]
    assert text.encode(errors="backslashreplace").decode().startswith(message)


def test_extra_fields_that_are_too_large_are_removed():
    line = JsonFormatter().large_line(record("hello", blob="x" * 5_000), "hello")
    data = encode_large(line, rule="truncate", max_bytes=700)
    assert isinstance(data, bytes)
    assert len(data) <= 700
    assert json.loads(data)["message"] == "hello"


@given(st.text(min_size=1, max_size=3_000), st.sampled_from(["plain", "ecs", "otel"]))
def test_the_pieces_of_a_split_record_fit_and_make_the_whole(text, json_format):
    line = JsonFormatter(json_format).large_line(record(), text)
    line.whole = bytes(701)
    pieces = encode_large(line, rule="split", max_bytes=700)
    assert isinstance(pieces, tuple)
    assert all(len(piece) <= 700 for piece in pieces)
    fields = [json.loads(piece) for piece in pieces]
    key = "Body" if json_format == "otel" else "message"
    marks = [(each["Attributes"] if json_format == "otel" else each)["split"] for each in fields]
    assert "".join(each[key] for each in fields) == text.encode(errors="backslashreplace").decode()
    assert [(mark["index"], mark["count"]) for mark in marks] == [(n, len(pieces)) for n in range(len(pieces))]
    assert len({mark["id"] for mark in marks}) == 1


@pytest.mark.parametrize("json_format", ["plain", "ecs", "otel"])
@pytest.mark.parametrize("text", ["x" * 70_000, "line\n" * 20_000, 'a"b\\' * 20_000, "\ud800" + "ä€😀" * 30_000])
def test_a_large_line_is_encoded_later_to_the_same_bytes(json_format, text):
    formatter = JsonFormatter(json_format, static_fields={"service": "orders"})
    mutable, circle = {"tags": ["new"]}, list[object]()
    made = record(text, **mutable, number=7, circle=circle)
    circle.append(circle)
    line = formatter.line(made)
    assert isinstance(line, LargeLine)
    expected = formatter.encode(made)
    mutable["tags"].append("changed later")
    made.msg = made.levelname = "changed later"
    assert line.encode() == expected
    fields = json.loads(expected)
    assert (fields["Body"] if json_format == "otel" else fields["message"]) == text.encode(
        errors="backslashreplace"
    ).decode()
    assert sys.getsizeof(text) <= len(line) <= sys.getsizeof(text) + 1_000


def test_a_structured_message_becomes_a_large_line_with_its_fields():
    line = JsonFormatter().line(record({"event": "x" * 70_000, "order": 7}))
    assert isinstance(line, LargeLine)
    fields = json.loads(line.encode())
    assert (len(fields["message"]), fields["order"]) == (70_000, 7)


@pytest.mark.parametrize("json_format", ["plain", "ecs", "otel"])
@pytest.mark.parametrize(
    ("message", "extra", "part"),
    [
        ("m", {"large": "x" * 70_000, "tags": ["a"]}, "m"),
        ({"event": "m", "large": "x" * 70_000, "tags": ["a"]}, {"number": 7}, "{'event': 'm', 'large': 'xxx"),
        ({"large": "x" * 70_000}, {}, "{'large': 'xxx"),
        (dict.fromkeys(map(str, range(1_001)), 1), {}, "{'0': 1, '1': 1"),
        ({"event": "x" * 70_000, "number": 7}, {}, "xxx"),
    ],
    ids=["extra", "structured", "without an event", "many members", "a large event"],
)
def test_large_text_anywhere_is_encoded_later_to_the_same_bytes(json_format, message, extra, part):
    """The caller took 9 to 40 ms for 3 MB."""
    message, extra = copy.deepcopy((message, extra))
    formatter = JsonFormatter(json_format, static_fields={"service": "orders"})
    made = record(message, **extra)
    line = formatter.line(made)
    assert isinstance(line, LargeLine)
    expected = JsonFormatter(json_format, static_fields={"service": "orders"}).encode(made)
    if isinstance(message, dict):
        message.clear()
    extra.get("tags", []).append("changed later")
    made.msg = made.levelname = "changed later"
    assert line.encode() == expected
    assert line.message.startswith(part)
    truncated = encode_large(line, rule="truncate", max_bytes=60_000)
    assert isinstance(truncated, bytes)
    assert len(truncated) <= 60_000
    pieces = encode_large(line, rule="split", max_bytes=4_000)
    assert isinstance(pieces, tuple)
    fields = [json.loads(piece) for piece in pieces]
    assert "".join(each["Body" if json_format == "otel" else "message"] for each in fields) == line.message


@pytest.mark.parametrize("json_format", ["plain", "ecs", "otel"])
def test_the_large_text_of_an_exception_is_encoded_later(json_format):
    error = ValueError("x" * 70_000)
    made = record("m")
    made.exc_info = type(error), error, None
    formatter = JsonFormatter(json_format)
    line = formatter.line(made)
    assert isinstance(line, LargeLine)
    assert line.message == "m"
    fields = json.loads(line.encode())
    assert (
        sum(text.count("x" * 70_000) for text in (fields.get("Attributes") or fields).values() if str(text) == text)
        == 2
    )
    truncated = encode_large(line, rule="truncate", max_bytes=1_000)
    assert isinstance(truncated, bytes)
    assert json.loads(truncated)["Body" if json_format == "otel" else "message"] == "m"


def test_a_large_line_takes_the_caller_no_time_in_proportion():
    """Of each, 3 MB: less than 5 ms of its thread's CPU, but for a much slower machine."""
    text = "x" * 3_000_000
    formatter = JsonFormatter()
    for made in (record(text), record({"large": text}), record("m", large=text)):
        took = []
        for _ in range(5):
            began = time.thread_time()
            formatter.line(made)
            took.append(time.thread_time() - began)
        assert min(took) < 0.005


TEXTS = st.text(st.sampled_from('ab"\\\n\x00\x1fä€😀u'), min_size=1, max_size=40)


@given(TEXTS, st.integers(1, 60))
def test_a_truncated_message_is_the_longest_that_fits(text, free_bytes):
    line = JsonFormatter().large_line(record(), text)
    marks = {"truncated": True, "original_bytes": 9_999}
    line.whole = bytes(9_999)
    shell = len(line.encode_part("", marks))
    data = encode_large(line, rule="truncate", max_bytes=shell + 5 + free_bytes)
    assert isinstance(data, bytes)
    kept = json.loads(data)["message"]
    fitting = [text[:end] for end in range(1, len(text) + 1) if len(line.encode_part(text[:end], marks)) <= len(data)]
    assert len(data) <= shell + 5 + free_bytes
    assert kept == fitting[-1]
    if kept != text:
        assert len(line.encode_part(text[: len(kept) + 1], marks)) > shell + 5 + free_bytes
