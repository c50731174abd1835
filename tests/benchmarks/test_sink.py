"""The sink implements enough of Kinesis for botocore, and its ledger checks the records it received."""

import asyncio
import base64
import json
import shutil
import ssl
import urllib.request
from typing import Any

import cbor2
import pytest

from benchmarks.kinesis_answers import KinesisAnswers, UnknownOperationError
from benchmarks.ledger import ShardRanges
from benchmarks.sink import SinkConnection, SinkState
from benchmarks.sink_process import running_sink
from benchmarks.trial import call_sink
from benchmarks.workload import Workload

WORK = Workload(data_bytes=50, keys="unique", shard_count=8, record_count=6)


class WrittenBytes(asyncio.Transport):
    """A transport that stores the written bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.written = b""

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self.written += bytes(data)


def put_records(indexes: range) -> dict[str, Any]:
    return {
        "StreamName": "bench",
        "Records": [{"Data": WORK.data_of(index), "PartitionKey": WORK.key_of(index)} for index in indexes],
    }


def as_json(request: dict[str, Any]) -> bytes:
    records = [{**record, "Data": base64.b64encode(record["Data"]).decode()} for record in request["Records"]]
    return json.dumps({**request, "Records": records}).encode()


def http(path: str, body: bytes, *, method: str = "POST", target: str = "", content_type: str = "json") -> bytes:
    head = f"{method} {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/x-amz-{content_type}-1.1\r\n"
    if target:
        head += f"X-Amz-Target: Kinesis_20131202.{target}\r\n"
    return f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body


def bodies(written: bytes) -> list[Any]:
    found = []
    while written:
        head, _, rest = written.partition(b"\r\n\r\n")
        length = int(head.lower().partition(b"content-length: ")[2].split(b"\r\n")[0])
        found.append(json.loads(rest[:length]))
        written = rest[length:]
    return found


@pytest.fixture
def transport() -> WrittenBytes:
    return WrittenBytes()


@pytest.fixture
def connection(transport: WrittenBytes) -> SinkConnection:
    connection = SinkConnection(SinkState())
    connection.connection_made(transport)
    connection.data_received(http("/open", json.dumps({"workload": WORK.fields()}).encode()))
    transport.written = b""
    return connection


def test_every_entry_is_answered_with_the_shard_its_key_belongs_to() -> None:
    answers = KinesisAnswers()
    answers.open(WORK)
    body = as_json(put_records(range(6)))
    answer = json.loads(answers.answer(b"Kinesis_20131202.PutRecords", is_cbor=False, body=body))
    ranges = ShardRanges(8)
    assert answer["FailedRecordCount"] == 0
    assert [entry["ShardId"] for entry in answer["Records"]] == [
        f"shardId-{ranges.shard_of(WORK.key_of(index), None):012d}" for index in range(6)
    ]
    assert len({entry["SequenceNumber"] for entry in answer["Records"]}) == 6
    assert {len(entry["SequenceNumber"]) for entry in answer["Records"]} == {56}


@pytest.mark.parametrize("is_cbor", [False, True])
def test_the_records_are_checked_afterwards(*, is_cbor: bool) -> None:
    answers = KinesisAnswers()
    answers.open(WORK)
    request = put_records(range(5))
    body = cbor2.dumps(request) if is_cbor else as_json(request)
    answer = answers.answer(b"Kinesis_20131202.PutRecords", is_cbor=is_cbor, body=body)
    assert len((cbor2.loads(answer) if is_cbor else json.loads(answer))["Records"]) == 5
    verdict = answers.verdict()
    assert (verdict.user_records, verdict.lost, verdict.misrouted, verdict.wrong_keys) == (5, 1, 0, 0)


def test_starting_the_measurement_discards_the_warm_up() -> None:
    answers = KinesisAnswers()
    answers.open(WORK)
    answers.answer(b"Kinesis_20131202.PutRecords", is_cbor=False, body=as_json(put_records(range(6))))
    answers.start()
    assert answers.request_count == 0
    assert answers.verdict().lost == 6


def test_the_stream_has_as_many_open_shards_as_the_workload() -> None:
    answers = KinesisAnswers()
    answers.open(WORK)

    def ask(operation: bytes) -> dict[str, Any]:
        answer: dict[str, Any] = json.loads(answers.answer(b"Kinesis_20131202." + operation, is_cbor=False, body=b"{}"))
        return answer

    shards = ask(b"ListShards")["Shards"]
    assert len(shards) == 8
    assert shards == ask(b"DescribeStream")["StreamDescription"]["Shards"]
    assert ask(b"DescribeStreamSummary")["StreamDescriptionSummary"]["OpenShardCount"] == 8
    assert all("EndingSequenceNumber" not in shard["SequenceNumberRange"] for shard in shards)


def test_an_unknown_operation_is_rejected() -> None:
    with pytest.raises(UnknownOperationError):
        KinesisAnswers().answer(b"Kinesis_20131202.MergeShards", is_cbor=False, body=b"{}")


@pytest.mark.parametrize("piece_bytes", [1, 7, 100, 4_096])
def test_requests_are_answered_in_order_in_any_pieces(
    connection: SinkConnection, transport: WrittenBytes, piece_bytes: int
) -> None:
    stream = b"".join(
        [
            http("/", as_json(put_records(range(4))), target="PutRecords"),
            http("/", b"{}", target="ListShards"),
            http("/", as_json(put_records(range(4, 6))), target="PutRecords"),
            http("/report", b"", method="GET"),
        ]
    )
    for start in range(0, len(stream), piece_bytes):
        connection.data_received(stream[start : start + piece_bytes])
    first, shards, second, report = bodies(transport.written)
    assert (len(first["Records"]), len(shards["Shards"]), len(second["Records"])) == (4, 8, 2)
    assert (report["user_records"], report["lost"], report["requests"]) == (6, 0, 2)


def test_wire_bytes_are_heads_and_bodies_of_kinesis_requests_only(
    connection: SinkConnection, transport: WrittenBytes
) -> None:
    request = http("/", as_json(put_records(range(4))), target="PutRecords")
    connection.data_received(http("/start", b"{}"))
    connection.data_received(request)
    answer_bytes = len(transport.written) - len(transport.written.partition(b"{}")[0]) - 2
    connection.data_received(http("/stats", b"", method="GET"))
    stats = bodies(transport.written)[-1]
    assert (stats["bytes_in"], stats["bytes_out"]) == (len(request), answer_bytes)


def test_an_unknown_operation_and_an_unknown_path_are_client_errors(
    connection: SinkConnection, transport: WrittenBytes
) -> None:
    connection.data_received(http("/", b"{}", target="MergeShards"))
    assert transport.written.startswith(b"HTTP/1.1 400 ")
    transport.written = b""
    connection.data_received(http("/elsewhere", b"{}"))
    assert transport.written.startswith(b"HTTP/1.1 404 ")


@pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl makes the certificate")
def test_the_sink_serves_the_same_stream_over_tls() -> None:
    with running_sink(None, over_tls=True) as sink:
        assert sink.no_tls == ""
        trusted = ssl.create_default_context(cafile=sink.certificate)
        call_sink(sink.url, "/open", {"workload": WORK.fields()})
        body = as_json(put_records(range(6)))
        headers = {"X-Amz-Target": "Kinesis_20131202.PutRecords"}
        request = urllib.request.Request(f"{sink.tls_url}/", body, headers)  # noqa: S310 - the sink's own address
        with urllib.request.urlopen(request, context=trusted, timeout=30) as response:  # noqa: S310
            assert len(json.load(response)["Records"]) == 6
        assert call_sink(sink.url, "/report")["lost"] == 0


def test_without_openssl_the_sink_serves_plain_http_and_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    with running_sink(None, over_tls=True) as sink:
        assert (sink.tls_url, sink.no_tls) == ("", "no openssl here")
        assert call_sink(sink.url, "/stats")["requests"] == 0
