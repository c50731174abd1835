"""Requests that are small and expensive to handle: nested, repeated, tagged, compressed, wide, or wrong many times.

Each function returns a body, or a header field, of about so many bytes.
"""

import gzip
import re
from collections.abc import Callable, Mapping
from typing import Final, NamedTuple

import cbor2
import zstandard
from botocore.auth import SigV4Auth
from botocore.awsrequest import AWSRequest
from botocore.credentials import Credentials

from tests.support.http2_attacks import ATTACKS

Body = Callable[[int], bytes]
RECORDS: Final = "/v1/streams/orders/records"
JSON, NDJSON = "application/json", "application/x-ndjson"
CE, CE_BATCH = "application/cloudevents+json", "application/cloudevents-batch+json"
AMZ_JSON, AMZ_CBOR = "application/x-amz-json-1.1", "application/x-amz-cbor-1.1"
PROTOBUF: Final = "application/x-protobuf"
# No head may be larger.
MOST_HEAD_BYTES: Final = 30_000
# A server that ends a connection with more unread bytes than this resets it, and its last frame may be lost.
MOST_FRAME_BYTES: Final = 70_000


class Expensive(NamedTuple):
    """A kind of request, and how to make one of about so many bytes."""

    name: str
    make: Callable[[int], "Request"]
    most_bytes: int = 16_400_000


class Request(NamedTuple):
    """A request as bytes, and its size: as sent, or inflated if that is more."""

    content: bytes
    weight: int


def post(path: str, content_type: str, body: bytes, *fields: str, weight: int = 0) -> Request:
    """Return a request of the tenant `busy`."""
    head = [f"POST {path} HTTP/1.1", "Host: x", "Authorization: Bearer busy", f"Content-Type: {content_type}"]
    content = "\r\n".join([*head, *fields, f"Content-Length: {len(body)}", "", ""]).encode("latin-1") + body
    return Request(content, max(len(content), weight))


def signed(operation: str, content_type: str, body: bytes, more: Mapping[str, str] | None = None) -> Request:
    """Return a request of the Kinesis API with the tenant's signature."""
    headers = {
        "X-Amz-Target": f"Kinesis_20131202.{operation}",
        "Content-Type": content_type,
        "Host": "x",
        **(more or {}),
    }
    request = AWSRequest(method="POST", url="http://x/", data=body, headers=headers)
    SigV4Auth(Credentials("BUSY", "secret-busy"), "kinesis", "us-east-1").add_auth(request)
    fields = [f"{name}: {value}" for name, value in request.headers.items()]
    content = "\r\n".join(["POST / HTTP/1.1", *fields, f"Content-Length: {len(body)}", "", ""]).encode() + body
    return Request(content, len(content))


def get(path: str, *fields: str) -> Request:
    """Return a request without a body and without credentials."""
    content = "\r\n".join([f"GET {path} HTTP/1.1", "Host: x", *fields, "", ""]).encode("latin-1")
    return Request(content, len(content))


def repeated(piece: bytes, start: bytes = b"", end: bytes = b"") -> Body:
    """Return bodies that repeat a piece."""
    return lambda size: start + piece * max(1, (size - len(start) - len(end)) // len(piece)) + end


def nested(opening: bytes, closing: bytes, start: bytes = b"", end: bytes = b"") -> Body:
    """Return bodies that nest a piece."""
    return lambda size: start + (times := size // len(opening + closing)) * opening + closing * times + end


DATA: Final = b'{"partition_key":"k","data":'
_CHAIN: Final = b"[" * 60 + b"]" * 60 + b","
EVENT: Final = b'{"specversion":"1.0","id":"1","source":"s","type":"t","data":'

# Bodies in JSON, for all routes that read it.
ANY_JSON: Final[dict[str, Body]] = {
    "unclosed brackets": repeated(b"["),
    "nested arrays": nested(b"[", b"]"),
    "nested objects": nested(b'{"a":', b"}", end=b"1"),
    "blanks": repeated(b" "),
    "not UTF-8 at its end": repeated("é".encode(), b'{"data":"', b'\xff"}'),
    "a long name": repeated(b"a", b'{"', b'":1}'),
    "a long name that looks like a message": repeated(b" - at `field `", b'{"', b'":1}'),
    "many members": repeated(b'"aa":1,', b"{", b'"z":1}'),
    "a byte order mark and blanks": repeated(b"\n", b"\xef\xbb\xbf"),
}
RECORDS_JSON: Final[dict[str, Body]] = {
    **ANY_JSON,
    "empty records": repeated(b"{},", b'{"records":[', b"{}]}"),
    "numbers for records": repeated(b"1,", b'{"records":[', b"1]}"),
    "arrays for records": repeated(b"[1,1],", b'{"records":[', b"1]}"),
    "a record, then numbers": repeated(b"1,", b'{"records":[{"data":1},', b"1]}"),
    "10,000 bad records": lambda size: (
        b'{"records":[' + b",".join([b'{"x":%b}' % (b"1" * max(1, size // 10_000 - 8))] * 9_999) + b"]}"
    ),
    "the smallest records": lambda size: (
        b'{"records":[' + b",".join([b'{"data":%b}' % (b"1" * max(1, size // 10_000 - 11))] * 9_999) + b"]}"
    ),
    "records repeated": repeated(b'"records":[{"data":1}],', b"{", b'"records":[]}'),
    "base64 that is not": lambda size: (
        b'{"records":[' + b",".join([b'{"data_base64":"%b!"}' % (b"A" * max(1, size // 10_000 - 20))] * 9_999) + b"]}"
    ),
    "chains of arrays": repeated(_CHAIN, DATA + b"[", b"1]}"),
    "empty arrays": repeated(b"[],", DATA + b"[", b"[]]}"),
    "brackets in strings": repeated(b'"[",', DATA + b"[", b"[]]}"),
    "escaped quotation marks": repeated(b'\\"', DATA + b'["', b'"]}'),
    "backslashes": repeated(b"\\\\", DATA + b'"', b'"}'),
    "escaped controls": repeated(b"\\u0000", DATA + b'"', b'"}'),
    "wide characters": repeated(b"a", DATA + b'"' + "😀".encode(), b'"}'),
    "a wide key": repeated(b"a", b'{"partition_key":"' + "😀".encode(), b'","data":1}'),
    "a long hash key": repeated(b"1", b'{"data":1,"explicit_hash_key":"', b'"}'),
    "a long number": repeated(b"1", DATA, b"}"),
    "blanks after the records": repeated(b" ", b'{"records":[{"data":1}]', b"}"),
    "unclosed brackets for records": repeated(b"[", b'{"records":['),
    "sixteen chained records": lambda size: (
        b'{"records":[' + b",".join([repeated(_CHAIN, b'{"data":[', b"1]}")(size // 16)] * 16) + b"]}"
    ),
}
RECORDS_NDJSON: Final[dict[str, Body]] = {
    "blank lines": repeated(b"\n"),
    "numbers": repeated(b"1\n"),
    "empty objects": repeated(b"{}\n"),
    "empty objects without breaks": repeated(b"{}"),
    "lines of blanks": repeated(b" " * 99 + b"\r\n"),
    "10,000 bad lines": lambda size: (b"1" * max(1, size // 10_000 - 1) + b"\n") * 9_999,
    "unclosed strings": lambda size: (b'{"data":"' + b"x" * max(1, size // 10_000 - 10) + b"\n") * 9_999,
    "unknown members": lambda size: (b'{"%b":1}\n' % (b"x" * max(1, size // 10_000 - 7))) * 9_999,
    "the smallest records": lambda size: (b'{"data":%b}\n' % (b"1" * max(1, size // 10_000 - 10))) * 9_999,
    "numbers after a record": repeated(b"1\n", b'{"data":1}\n'),
}
EVENTS: Final[dict[str, Body]] = {
    **ANY_JSON,
    "nested data": repeated(_CHAIN, EVENT + b"[", b"1]}"),
    "wide characters": repeated(b"a", EVENT + b'"' + "😀".encode(), b'"}'),
    "a long id": repeated(b"a", EVENT[:-7] + b'"id":"', b'"}'),
}
BATCHES: Final[dict[str, Body]] = {
    **ANY_JSON,
    "empty events": repeated(b"{},", b"[", b"{}]"),
    "numbers": repeated(b"1,", b"[", b"1]"),
    "an event, then numbers": repeated(b"1,", b"[" + EVENT + b"1},", b"1]"),
    "10,000 bad events": lambda size: (
        b"[" + b",".join([b'{"x":%b}' % (b"1" * max(1, size // 10_000 - 7))] * 9_999) + b"]"
    ),
    "blanks after the events": repeated(b" ", b"[" + EVENT + b"1}]"),
    "small events": lambda size: b"[" + b",".join([EVENT + b"1}"] * min(9_999, size // 60 + 1)) + b"]",
}
OTLP: Final[dict[str, Body]] = {
    **ANY_JSON,
    "empty resources": repeated(b"{},", b'{"resourceLogs":[', b"{}]}"),
    "numbers for resources": repeated(b"1,", b'{"resourceLogs":[', b"1]}"),
    "other members": repeated(b'"aa":1,', b'{"resourceLogs":[],', b'"z":1}'),
    "blanks after the resources": repeated(b" ", b'{"resourceLogs":[{}]', b"}"),
    "nested attributes": repeated(b'{"a":' * 30 + b"1" + b"}" * 30 + b",", b'{"resourceLogs":[{"a":[', b"1]}]}"),
}
OTLP_PROTOBUF: Final[dict[str, Body]] = {
    "empty resources": repeated(b"\x0a\x00"),
    "10,000 resources": lambda size: (b"\x0a\x7f" + b"x" * 127) * min(9_999, size // 129 + 1),
    "numbers": repeated(b"\x10\x01"),
    "a number without an end": repeated(b"\xff"),
    "groups": repeated(b"\x0b"),
    "long numbers": repeated(b"\x10" + b"\x80" * 9 + b"\x01"),
    "a length beyond the end": repeated(b"x", b"\x0a\xff\xff\xff\xff\x0f"),
}
_ARN: Final = b"arn:aws:kinesis:us-east-1:111122223333:stream/orders"
KINESIS_JSON: Final[dict[str, tuple[str, Body]]] = {
    **{name: ("PutRecord", body) for name, body in ANY_JSON.items()},
    "an ARN of many parts": (
        "PutRecord",
        repeated(b":kinesis:", b'{"Data":"","PartitionKey":"k","StreamARN":"arn:aws', b'"}'),
    ),
    "an ARN of many accounts": (
        "PutRecord",
        repeated(b":111122223333", b'{"Data":"","PartitionKey":"k","StreamARN":"arn:aws:kinesis:', b'"}'),
    ),
    "a long name of a stream": ("PutRecord", repeated(b"/", b'{"Data":"","PartitionKey":"k","StreamName":"', b'"}')),
    "a wide name of a stream": ("PutRecord", repeated(b"a", b'{"StreamName":"' + "😀".encode(), b'"}')),
    "a long key": ("PutRecord", repeated(b"\\u0001", b'{"Data":"","StreamName":"orders","PartitionKey":"', b'"}')),
    "a long hash key": (
        "PutRecord",
        repeated(b"1", b'{"Data":"","StreamName":"orders","PartitionKey":"k","ExplicitHashKey":"', b'"}'),
    ),
    "a long shard type": ("ListShards", repeated(b"A", b'{"StreamName":"orders","ShardFilter":{"Type":"', b'"}}')),
    "a long limit": ("ListShards", repeated(b"1", b'{"StreamName":"orders","MaxResults":', b"}")),
    "a long instant": ("ListShards", repeated(b"1", b'{"StreamName":"orders","StreamCreationTimestamp":1.', b"}")),
    "empty records": ("PutRecords", repeated(b"{},", b'{"StreamName":"orders","Records":[', b"{}]}")),
    "small records": (
        "PutRecords",
        repeated(b'{"PartitionKey":"k","Data":""},', b'{"StreamName":"orders","Records":[', b"{}]}"),
    ),
    "blanks after the records": ("PutRecords", repeated(b" ", b'{"StreamName":"orders","Records":[{}]', b"}")),
    "braces": ("PutRecords", repeated(b"{", b'{"StreamName":"orders","Records":[{"PartitionKey":"', b'"}]}')),
    "500 wrong records": (
        "PutRecords",
        lambda size: (
            b'{"StreamName":"orders","Records":['
            + b",".join([b'{"PartitionKey":"","ExplicitHashKey":"%b"}' % (b"x" * max(1, size // 500 - 50))] * 500)
            + b"]}"
        ),
    ),
    "base64 that is not": ("PutRecord", repeated(b"A", b'{"PartitionKey":"k","StreamName":"orders","Data":"', b'!"}')),
}


def _in_map(name: str, value: bytes, *, members: int = 1) -> bytes:
    return b"%c%b%b" % (0xA0 + members, cbor2.dumps(name), value)


def _array(count: int, child: bytes) -> bytes:
    return b"\x9a" + count.to_bytes(4, "big") + child * count


def _tagged(tag: int, value: object) -> bytes:
    return cbor2.dumps({"StreamName": "orders", "Limit": cbor2.CBORTag(tag, value)})


def _shared_references(size: int) -> bytes:
    record = cbor2.CBORTag(28, {"PartitionKey": "k", "Data": b"x" * (size // 2)})
    return cbor2.dumps({"Records": [record, *[cbor2.CBORTag(29, 0)] * min(499, size // 8)], "StreamName": "orders"})


KINESIS_CBOR: Final[dict[str, tuple[str, Body]]] = {
    "empty maps": ("PutRecords", lambda size: _in_map("Records", _array(size, b"\xa0"))),
    "empty arrays": ("PutRecords", lambda size: _in_map("Strange", _array(size, b"\x80"))),
    "empty texts": ("PutRecords", lambda size: _in_map("Strange", _array(size, b"\x60"))),
    "nulls": ("PutRecords", lambda size: _in_map("Strange", _array(size, b"\xf6"))),
    "doubles": ("PutRecords", lambda size: _in_map("Strange", _array(size // 9, b"\xfb" + b"\x3f" * 8))),
    "pieces of a blob": ("PutRecord", lambda size: _in_map("Data", b"\x5f" + b"\x41x" * (size // 2) + b"\xff")),
    "pieces of a text": ("PutRecord", lambda size: _in_map("PartitionKey", b"\x7f" + b"\x61x" * (size // 2) + b"\xff")),
    "nested arrays": ("PutRecord", lambda size: b"\x81" * size),
    "nested maps": ("PutRecord", lambda size: b"\xa1\x01" * (size // 2)),
    "a declared length": ("PutRecord", lambda size: _in_map("Data", b"\x5a\xff\xff\xff\xff" + b"x" * size)),
    "a declared count": ("PutRecords", lambda size: _in_map("Records", b"\x9a\xff\xff\xff\xff" + b"\xa0" * size)),
    "a regular expression": ("DescribeStream", lambda size: _tagged(35, "a|" * (size // 2))),
    "a mail": (
        "DescribeStream",
        lambda size: _tagged(36, "Content-Type: multipart/mixed; boundary=a\n\n" + "--a\n\n" * (size // 5)),
    ),
    "a bignum": ("DescribeStream", lambda size: _tagged(2, b"\xff" * size)),
    "a decimal": ("DescribeStream", lambda size: _tagged(4, [size, 1])),
    "a rational": ("DescribeStream", lambda size: _tagged(30, [1 << 60, 3]) + b"x" * size),
    "shared references": ("PutRecords", _shared_references),
    "a set": ("DescribeStream", lambda size: _tagged(258, list(range(size // 4)))),
    "a wide text": ("PutRecord", lambda size: cbor2.dumps({"StreamName": "😀" + "a" * size})),
    "an ARN of many parts": (
        "PutRecord",
        lambda size: cbor2.dumps({"StreamARN": "arn:aws" + ":kinesis:" * (size // 9)}),
    ),
    "small records": (
        "PutRecords",
        lambda size: cbor2.dumps(
            {"StreamName": "orders", "Records": [{"PartitionKey": "k", "Data": b""}] * (size // 22)}
        ),
    ),
}


def _chunked(piece: int) -> Callable[[int], Request]:
    def make(size: int) -> Request:
        chunk = b"%x\r\n%b\r\n" % (piece, b" " * piece)
        head = f"POST {RECORDS} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer busy\r\nContent-Type: {JSON}\r\n"
        content = head.encode() + b"Transfer-Encoding: chunked\r\n\r\n" + chunk * (size // len(chunk)) + b"0\r\n\r\n"
        return Request(content, len(content))

    return make


COMPRESSORS: Final[dict[str, Callable[[bytes], bytes]]] = {"gzip": gzip.compress, "zstd": zstandard.compress}
COMPRESSED: Final[dict[str, tuple[Body, str]]] = {
    "zeros": (repeated(b"\x00"), JSON),
    "blank lines": (repeated(b"\n"), NDJSON),
    "empty records": (RECORDS_JSON["empty records"], JSON),
    "numbers": (BATCHES["numbers"], CE_BATCH),
    "chains of arrays": (RECORDS_JSON["sixteen chained records"], JSON),
    "escaped controls": (RECORDS_JSON["escaped controls"], JSON),
    "98 empty members": (repeated(b" "), JSON),
}
ATTRIBUTES: Final = ("ce-specversion: 1.0", "ce-id: 1", "ce-source: s", "ce-type: t")
BINARY: Final[dict[str, tuple[str, Body]]] = {
    "controls": ("text/plain", repeated(b"\x01")),
    "wide text": ("text/plain", repeated(b"a", "😀".encode())),
    "nested JSON": (JSON, repeated(_CHAIN, b"[", b"1]")),
}


def _compressed(encoding: str, body: Body, content_type: str) -> Callable[[int], Request]:
    compress = COMPRESSORS[encoding]
    before = compress(b"") * 98 if body is COMPRESSED["98 empty members"][0] else b""
    return lambda size: post(
        RECORDS, content_type, before + compress(body(size)), f"Content-Encoding: {encoding}", weight=size
    )


def _repeated_names(size: int) -> Request:
    request = signed("PutRecord", AMZ_JSON, b"{}", {"A": "x" * (size - 4_500)}).content.decode()
    names = "a;" * 1_800
    content = re.sub("SignedHeaders=", lambda found: found.group() + names, request).encode()
    return Request(content, len(content))


def _headed(field: str) -> Callable[[int], Request]:
    return lambda size: post(RECORDS, JSON, b'{"data":1}', (field * (size // len(field) + 1))[:size].strip("\r\n"))


IN_HEADS: Final[dict[str, Callable[[int], Request]]] = {
    "a cookie of backslashes": lambda size: get("/dashboard", 'Cookie: a="' + "\\" * size + '"'),
    "a cookie of quotes": lambda size: get("/dashboard", 'Cookie: kpl_dashboard="' + '\\"' * (size // 2) + '"'),
    "many cookies": lambda size: get("/dashboard", "Cookie: " + "a=b; " * (size // 5)),
    "a cookie of digits": lambda size: get("/dashboard", "Cookie: kpl_dashboard=" + "1" * size + ".x"),
    "a path of ARNs": lambda size: post(f"/v1/streams/arn:aws{':kinesis:' * (size // 9)}/records", JSON, b'{"data":1}'),
    "an encoded path": lambda size: post(f"/v1/streams/{'%3A' * (size // 3)}/records", JSON, b'{"data":1}'),
    "a body without a tenant": lambda size: Request(
        post(RECORDS, JSON, b"x" * size).content.replace(b"busy", b"none"), size
    ),
    "an unknown path": lambda size: get("/" + "a" * size),
    "a long query": lambda size: post(RECORDS + "?" + "&" * size, JSON, b'{"data":1}'),
    "a long key": lambda size: get("/v1/stats", "Authorization: Bearer " + "a" * size),
    "many fields": _headed("x-a: b\r\n"),
    "one field many times": _headed("a:b\r\n"),
    "attributes": lambda size: post(
        RECORDS,
        JSON,
        b'{"data":1}',
        "ce-specversion: 1.0",
        *[f'ce-a{number}: "%41\\""' for number in range(size // 20)],
    ),
    "content codings": lambda size: post(RECORDS, JSON, b"{}", "Content-Encoding: " + "," * size),
    "a charset": lambda size: post(RECORDS, JSON + ";charset=" * (size // 9), b'{"data":1}'),
    "an idempotency key": lambda size: post(RECORDS, JSON, b'{"data":1}', 'Idempotency-Key: "' + "k" * size + '"'),
    "signed names": lambda size: post("/", AMZ_JSON, b"{}", "Authorization: AWS4-HMAC-SHA256 " + "a=b," * (size // 4)),
    "a name signed many times": _repeated_names,
    "a form": lambda size: post("/dashboard", "application/x-www-form-urlencoded", b"&" * size),
    "a form of pairs": lambda size: post("/dashboard", "application/x-www-form-urlencoded", b"a=%41&" * (size // 6)),
}


def _posted(path: str, content_type: str, body: Body, *fields: str) -> Callable[[int], Request]:
    return lambda size: post(path, content_type, body(size), *fields)


def _signed(operation: str, content_type: str, body: Body) -> Callable[[int], Request]:
    return lambda size: signed(operation, content_type, body(size))


def _framed(make: Body) -> Callable[[int], Request]:
    def made(size: int) -> Request:
        content = make(size)
        return Request(content, len(content))

    return made


def all_requests() -> list[Expensive]:
    """Return all kinds of expensive requests."""
    posted: list[tuple[str, str, dict[str, Body]]] = [
        (RECORDS, JSON, RECORDS_JSON),
        (RECORDS, NDJSON, RECORDS_NDJSON),
        (RECORDS, CE, EVENTS),
        (RECORDS, CE_BATCH, BATCHES),
        (RECORDS + "?partial=true", NDJSON, {"numbers": RECORDS_NDJSON["numbers after a record"]}),
        (RECORDS, "application/octet-stream", {"anything": repeated(b"x")}),
        ("/v1/logs", JSON, OTLP),
        ("/v1/logs", PROTOBUF, OTLP_PROTOBUF),
    ]
    kinesis = ((AMZ_JSON, KINESIS_JSON), (AMZ_CBOR, KINESIS_CBOR))
    return [
        *(
            Expensive(f"{path.removeprefix('/v1/')} {content_type}: {name}", _posted(path, content_type, body))
            for path, content_type, bodies in posted
            for name, body in bodies.items()
        ),
        *(
            Expensive(f"Kinesis {content_type}: {name}", _signed(operation, content_type, body))
            for content_type, operations in kinesis
            for name, (operation, body) in operations.items()
        ),
        *(
            Expensive(f"{encoding}: {name}", _compressed(encoding, body, content_type))
            for encoding in COMPRESSORS
            for name, (body, content_type) in COMPRESSED.items()
        ),
        *(Expensive(f"binary event: {name}", _posted(RECORDS, *made, *ATTRIBUTES)) for name, made in BINARY.items()),
        Expensive("chunks of 1 byte", _chunked(1), most_bytes=4_000_000),
        Expensive("chunks of 16 bytes", _chunked(16)),
        *(Expensive(f"head: {name}", make, most_bytes=MOST_HEAD_BYTES) for name, make in IN_HEADS.items()),
        *(Expensive(f"HTTP/2: {each.name}", _framed(each.make), most_bytes=MOST_FRAME_BYTES) for each in ATTACKS),
    ]
