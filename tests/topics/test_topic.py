import gzip
import itertools
from collections.abc import Callable
from typing import Any, cast

import msgspec
import pydantic
import pytest
import zstandard

from kpl_core import Compressed, ConfigError, Topic, UserRecord, decompressed, trace_context_of
from kpl_core.records.topic import CompressionCodec
from tests.support.orders import KINDS, ORDER, OrderStruct

TRACE = {"traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01", "tracestate": "vendor=1"}
DECODERS: dict[str, Callable[[bytes], Any]] = {"json": msgspec.json.decode, "msgpack": msgspec.msgpack.decode}


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


def test_data_that_is_not_compressed_is_returned_as_it_is() -> None:
    assert decompressed(b"plain") == b"plain"


@pytest.mark.parametrize("encoder", ["json", "msgpack"])
@pytest.mark.parametrize("own", [None, "00-old-old-01"])
def test_a_trace_context_counts_before_members_of_the_same_name(encoder: Any, own: str | None) -> None:
    orders = topic(dict, encoder=encoder, trace_context=lambda: TRACE)
    assert trace_context_of(orders.record({"traceparent": own, "id": 1}).data) == TRACE


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
