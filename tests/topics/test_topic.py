import gzip
import itertools
import json
import math
import time
import tracemalloc
from collections.abc import Callable
from datetime import datetime
from typing import Annotated, Any, Literal, TypedDict, Union, cast

import msgspec
import pydantic
import pytest
import zstandard

from kpl_core import Compressed, ConfigError, Topic, UserRecord
from kpl_core.records.topic import CompressionCodec, decompressed, trace_context_of
from tests.support.orders import KINDS, ORDER, OrderStruct

TRACE = {"traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01", "tracestate": "vendor=1"}
DECODERS: dict[str, Callable[[bytes], Any]] = {"json": msgspec.json.decode, "msgpack": msgspec.msgpack.decode}


class Keyed(TypedDict):
    key: str


def topic(kind: Any = OrderStruct, **options: Any) -> Topic[Any]:
    return Topic("orders", kind, partition_key=lambda _: "c-1", **options)


@pytest.mark.parametrize("encoder", ["json", "msgpack"])
@pytest.mark.parametrize(("kind", "value"), KINDS)
def test_each_type_of_value_is_encoded(kind: Any, value: Any, encoder: str) -> None:
    record = topic(kind, encoder=encoder).record(value)
    assert record.partition_key == "c-1"
    assert DECODERS[encoder](record.data) == ORDER


@pytest.mark.parametrize("encoder", ["json", "msgpack"])
@pytest.mark.parametrize(
    ("kind", "value"), [(bytes, b"raw"), (bytearray, bytearray(b"raw")), (memoryview, memoryview(b"raw")), (str, "raw")]
)
def test_bytes_and_text_are_sent_as_they_are(kind: Any, value: Any, encoder: str) -> None:
    record = topic(kind, encoder=encoder).record(value)
    assert record.data == b"raw"
    assert type(record.data) is bytes


def test_lists_and_models_inside_of_other_values_are_encoded() -> None:
    class Line(pydantic.BaseModel):
        item: str

    values = [Line(item="a"), {"nested": Line(item="b")}]
    assert msgspec.json.decode(topic(list).encode(values)) == [{"item": "a"}, {"nested": {"item": "b"}}]


def test_an_encoder_may_be_any_callable() -> None:
    assert topic(int, encoder=lambda number: b"%d" % number).record(7).data == b"7"


def test_the_options_of_a_put_come_from_the_value() -> None:
    orders = Topic(
        "orders",
        OrderStruct,
        partition_key=lambda order: order.customer,
        explicit_hash_key=lambda order: str(order.total),
        flow=lambda order: order.customer.upper(),
        tier="critical",
    )
    assert orders.record(OrderStruct(**ORDER)) == UserRecord(
        "c-1", b'{"customer":"c-1","total":12}', "12", "C-1", "critical"
    )


def test_a_value_of_another_type_is_rejected() -> None:
    with pytest.raises(TypeError, match=r"topic 'orders' takes values of type OrderStruct, not dict"):
        topic().record(ORDER)
    with pytest.raises(TypeError, match="a value of type object cannot be encoded; pass an encoder"):
        topic(object).record(object())


def test_an_unknown_encoder_or_codec_is_rejected() -> None:
    with pytest.raises(ConfigError, match="encoder is 'xml'"):
        topic(encoder="xml")
    with pytest.raises(ConfigError, match="codec is 'lz4'"):
        topic(encoder=Compressed("json", cast("CompressionCodec", "lz4")))


@pytest.mark.parametrize("level", [None, 1])
@pytest.mark.parametrize(("codec", "decompress"), [("gzip", gzip.decompress), ("zstd", zstandard.decompress)])
def test_compressed_data_is_read_by_the_codecs_own_library(
    codec: CompressionCodec, decompress: Any, level: int | None
) -> None:
    value = OrderStruct("c-1" * 1_000, 12)
    data = topic(encoder=Compressed("json", codec, level)).record(value).data
    assert len(data) < 200
    assert decompress(data) == decompressed(data) == msgspec.json.encode(value)
    assert data == topic(encoder=Compressed(msgspec.json.encode, codec, level)).record(value).data


@pytest.mark.parametrize("compress", [gzip.compress, zstandard.compress])
def test_all_members_of_compressed_data_are_returned(compress: Any) -> None:
    data = compress(b"one ") + compress(b"two ") + compress(b"") + compress(b"three")
    assert decompressed(data) == b"one two three"
    for cut in range(5, len(data)):
        try:
            plain = decompressed(data[:cut])
        except ValueError:
            continue
        # Cut between two members.
        assert plain in {b"one ", b"one two "}
    for spoilt in (data + b"junk", data[:-1] + b"\xff" * 9):
        with pytest.raises(ValueError, match="the compressed data is damaged"):
            decompressed(spoilt)


@pytest.mark.parametrize("compress", [gzip.compress, zstandard.compress])
def test_many_empty_members_cost_time_in_proportion(compress: Any) -> None:
    """If the rest were copied for each member, this would take minutes."""
    began = time.perf_counter()
    assert decompressed(compress(b"") * 50_000) == b""
    assert time.perf_counter() - began < 5


@pytest.mark.parametrize("compress", [gzip.compress, zstandard.compress])
def test_compressed_data_inflates_to_the_bound_and_no_further(compress: Any) -> None:
    data = compress(bytes(100_000)) + compress(bytes(100_000))
    assert len(decompressed(data, max_bytes=200_000)) == 200_000
    for bound in (199_999, 100_000, 99_999, 0):
        with pytest.raises(ValueError, match=f"inflate to more than max_bytes={bound:,}"):
            decompressed(data, max_bytes=bound)


@pytest.mark.parametrize("compress", [gzip.compress, zstandard.compress])
def test_a_small_record_that_inflates_to_hundreds_of_megabytes_takes_no_memory_for_it(compress: Any) -> None:
    data = compress(bytes(10 * 1024 * 1024)) * 30
    assert len(data) < 400_000
    tracemalloc.start()
    try:
        with pytest.raises(ValueError, match="more than max_bytes=67,108,864; if you trust the data"):
            decompressed(data)
        assert tracemalloc.get_traced_memory()[1] < 150 * 1024 * 1024
    finally:
        tracemalloc.stop()
    assert trace_context_of(data) == {}


def test_data_that_is_not_compressed_is_returned_as_it_is() -> None:
    assert decompressed(b"plain") == b"plain"


@pytest.mark.parametrize("encoder", ["json", "msgpack"])
@pytest.mark.parametrize(
    ("own", "added"),
    [
        ({"traceparent": "00-own-own-01"}, set()),
        ({"traceparent": None}, set()),
        ({"traceparent": 7, "tracestate": "own"}, set()),
        ({"tracestate": "own"}, {"traceparent"}),
        ({"text": "traceparent", "inner": {"tracestate": 1}}, {"traceparent", "tracestate"}),
    ],
)
def test_members_of_the_value_take_precedence_and_no_name_is_there_twice(
    encoder: Any, own: dict[str, Any], added: set[str]
) -> None:
    value = own | {"id": 1}
    data = topic(dict, encoder=encoder, trace_context=lambda: TRACE).record(value).data
    assert DECODERS[encoder](data) == value | {name: TRACE[name] for name in added}
    if encoder == "json":
        names = [name for name, _ in json.loads(data, object_pairs_hook=list)]
        assert len(names) == len(set(names))


@pytest.mark.parametrize(
    ("kind", "good", "bad"),
    [
        (OrderStruct | int, 3, "text"),
        (Union[OrderStruct, None], None, 3),  # noqa: UP007 - the older spelling
        (Annotated[int, "cents"], 3, "text"),
        (dict[str, int], {"a": 1}, [1]),
        (list[int] | None, [1], {"a": 1}),
        (Keyed, {"key": "a"}, 3),
    ],
)
def test_the_values_of_a_composed_type_are_checked(kind: Any, good: object, bad: object) -> None:
    topic(kind).encode(good)
    for put in (topic(kind).encode, topic(kind).record):
        with pytest.raises(TypeError, match=f"topic 'orders' takes values of type .*, not {type(bad).__name__}"):
            put(bad)


def test_a_type_that_names_no_class_is_not_checked() -> None:
    assert topic(Literal["a", "b"]).encode("c") == b'"c"'
    assert topic(Literal["a"] | int).encode([1]) == b"[1]"


class Reading(pydantic.BaseModel):
    celsius: float | None = pydantic.Field(default=None, alias="temp")
    at: datetime = datetime(2026, 1, 1)  # noqa: DTZ001 - any

    model_config = pydantic.ConfigDict(populate_by_name=True)


@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf])
def test_a_number_that_json_cannot_express_is_an_error(number: float) -> None:
    """It became null without a word."""
    for kind, value in (
        (float, number),
        (dict, {"a": [{"b": number}], "text": "null"}),
        (OrderStruct, OrderStruct("c", cast("Any", number))),
        (Reading, Reading(temp=number)),
        (dict, {"model": Reading(temp=number)}),
        (dict, {"raw": msgspec.Raw(b"null"), "b": (number,), "large": 2**70}),
        (dict, {"raw": msgspec.Raw(b"1"), "b": {"c": number}}),
    ):
        with pytest.raises(ValueError, match=r"JSON cannot express this value .*encoder='msgpack'"):
            topic(kind).record(value)
    assert math.isnan(number) or msgspec.msgpack.decode(topic(float, encoder="msgpack").encode(number)) == number


def test_null_itself_is_sent() -> None:
    values = {"a": None, 7: 1.5, "raw": msgspec.Raw(b"null"), "t": "nan null"}
    assert msgspec.json.decode(topic(dict).encode(values)) == {"a": None, "7": 1.5, "raw": None, "t": "nan null"}
    # A float and a text that look like a NaN in MessagePack, and an integer that it does not have.
    similar = {"a": None, "large": 1.7e308, "bytes": b"\xcb\x7f\xf8", "integer": 2**70}
    assert json.loads(topic(dict).encode(similar)) == {**similar, "bytes": "y3/4"}
    # The field's own name, not its alias.
    assert topic(Reading).encode(Reading()) == b'{"celsius":null,"at":"2026-01-01T00:00:00"}'


@pytest.mark.parametrize("members", [TRACE, {"traceparent": TRACE["traceparent"]}, {}])
@pytest.mark.parametrize("codec", [None, "gzip", "zstd"])
@pytest.mark.parametrize("encoder", ["json", "msgpack"])
@pytest.mark.parametrize(("kind", "value"), [*KINDS, (dict, {})])
def test_a_trace_context_travels_in_the_record(
    kind: Any, value: Any, encoder: str, codec: Any, members: dict[str, str]
) -> None:
    whole: Any = encoder if codec is None else Compressed(cast("Any", encoder), codec)
    data = topic(kind, encoder=whole, trace_context=lambda: members).record(value).data
    assert trace_context_of(data) == members
    assert DECODERS[encoder](decompressed(data)) == members | ({} if value == {} else ORDER)


@pytest.mark.parametrize("count", [1, 14, 15, 16, 17, 65_535, 65_536])
def test_a_trace_context_is_added_to_a_map_of_any_size(count: int) -> None:
    value = dict.fromkeys(map(str, range(count)), 1)
    data = topic(dict, encoder="msgpack", trace_context=lambda: TRACE).record(value).data
    assert msgspec.msgpack.decode(data) == TRACE | value


@pytest.mark.parametrize("encoder", ["json", "msgpack"])
def test_a_value_that_is_no_object_carries_no_trace_context(encoder: Any) -> None:
    data = topic(list, encoder=encoder, trace_context=lambda: TRACE).record([1]).data
    assert DECODERS[encoder](data) == [1]
    assert trace_context_of(data) == {}


@pytest.mark.parametrize(
    "data", [b"", b"{", b"plain", b'{"traceparent": 7}', b"\x1f\x8b", b"\x28\xb5\x2f\xfd", b"\xdf"]
)
def test_data_without_a_trace_context_has_none(data: bytes) -> None:
    assert trace_context_of(data) == {}


@pytest.mark.parametrize(("kind", "encoder"), [(OrderStruct, msgspec.json.encode), (bytes, "json"), (str, "msgpack")])
def test_a_trace_context_needs_values_that_are_objects(kind: Any, encoder: Any) -> None:
    for each in (encoder, Compressed(encoder, "gzip")):
        with pytest.raises(ConfigError, match="trace_context is set, and the values of topic 'orders' are not JSON"):
            topic(kind, encoder=each, trace_context=lambda: TRACE)


def test_the_context_is_that_of_the_put() -> None:
    numbers = itertools.count()
    orders = topic(trace_context=lambda: {"traceparent": str(next(numbers))})
    found = [trace_context_of(orders.record(OrderStruct(**ORDER)).data)["traceparent"] for _ in range(2)]
    assert found == ["0", "1"]
