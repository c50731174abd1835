"""The server itself: start and stop, bad HTTP, JSON and CBOR, threads and processes."""

import asyncio
import gc
import io
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import boto3
import cbor2
import msgspec
import pytest

from kpl_core.testing import ErrorAnswer, Hang, KinesisError, Latency
from kpl_integrations.local_kinesis import LocalKinesis, LocalKinesisProcess, ThreadedLocalKinesis
from tests.support.waiting import until

pytestmark = pytest.mark.anyio

JSON = "application/x-amz-json-1.1"
CBOR = "application/x-amz-cbor-1.1"


@pytest.fixture(scope="module")
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture
async def server() -> AsyncIterator[LocalKinesis]:
    async with LocalKinesis({"orders": 1}) as running:
        yield running


@pytest.fixture
async def http() -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession() as session:
        yield session


def headers(operation: str, content_type: str = JSON) -> dict[str, str]:
    return {"Content-Type": content_type, "X-Amz-Target": f"Kinesis_20131202.{operation}"}


async def test_it_listens_on_loopback_only_and_on_a_free_port() -> None:
    async with LocalKinesis() as first, LocalKinesis() as second:
        assert first.endpoint_url.startswith("http://127.0.0.1:")
        assert first.endpoint_url != second.endpoint_url
        assert len(first.fake.open_shards("demo")) == 4


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("localhost", 200),
        ("kinesis.localhost:80", 200),
        ("127.0.0.1:4567", 200),
        ("[::1]:4567", 200),
        ("10.0.0.1", 200),
        ("kinesis:4567", 200),
        ("KINESIS", 200),
        ("evil.example", 403),
        ("evil.example:4567", 403),
        ("127.0.0.1.evil.example", 403),
        ("", 403),
    ],
)
async def test_it_answers_only_to_loopback_names_addresses_and_allowed_hosts(
    http: aiohttp.ClientSession, host: str, status: int
) -> None:
    """A web page that names this machine as its own server (DNS rebinding) comes under its own name."""
    async with LocalKinesis(allow_hosts=["kinesis"]) as server:
        sent = headers("DeleteStream") | {"Host": host}
        async with http.post(server.endpoint_url, headers=sent, data=b'{"StreamName": "demo"}') as answer:
            assert answer.status == status
            assert ("--allow-host NAME" in await answer.text()) == (status == 403)
        assert len(server.fake.list_streams(now=server.now).streams) == (1 if status == 403 else 0)


async def test_it_can_be_started_again_with_a_fresh_state() -> None:
    server = LocalKinesis(["a", "b"])
    for _ in range(2):
        async with server:
            assert server.fake.records("a") == []
            assert len(server.fake.open_shards("b", now=server.now)) == 4
            server.fake.put_records("a", [("k", None, b"")], now=server.now)
    assert repr(server) == "<LocalKinesis not running>"


async def test_using_it_while_stopped_or_starting_it_twice_raises() -> None:
    server = LocalKinesis()
    with pytest.raises(RuntimeError, match="use it inside `async with"):
        server.endpoint_url  # noqa: B018
    async with server:
        with pytest.raises(RuntimeError, match="already running"):
            await server.__aenter__()
        assert server.endpoint_url in repr(server)
    await server.aclose()


async def test_a_port_in_use_is_an_error_and_leaves_no_server_behind() -> None:
    async with LocalKinesis() as server:
        port = int(server.endpoint_url.rpartition(":")[2])
        other = LocalKinesis(port=port)
        with pytest.raises(OSError, match="address already in use"):
            await other.__aenter__()
        assert repr(other) == "<LocalKinesis not running>"


async def test_it_stops_promptly_with_idle_waiting_and_hanging_requests(http: aiohttp.ClientSession) -> None:
    async with LocalKinesis({"orders": 1}) as server:
        url = server.endpoint_url
        async with http.post(url, headers=headers("ListStreams"), data=b"{}") as idle:
            assert idle.status == 200
        hang = server.faults.add(Hang())
        hanging = asyncio.create_task(_status(http, url))
        await until(lambda: hang.fired)
        server.faults.remove(hang)
        slow = server.faults.add(Latency(600.0))
        waiting = asyncio.create_task(_status(http, url))
        await until(lambda: slow.fired)
        before = asyncio.get_running_loop().time()
    assert asyncio.get_running_loop().time() - before < 2.0
    assert await waiting == 200
    with pytest.raises(aiohttp.ClientError):
        await hanging


async def _status(http: aiohttp.ClientSession, url: str) -> int:
    async with http.post(url, headers=headers("ListStreams"), data=b"{}") as answer:
        return answer.status


async def test_serving_forever_ends_when_it_is_closed(server: LocalKinesis) -> None:
    serving = asyncio.create_task(server.serve_forever())
    await asyncio.sleep(0)
    assert not serving.done()
    await server.aclose()
    await serving
    assert serving.exception() is None


BAD_HTTP: list[tuple[str, str, dict[str, str], bytes, int, str]] = [
    ("a GET", "GET", headers("ListStreams"), b"", 405, "UnknownOperationException"),
    ("no target", "POST", {"Content-Type": JSON}, b"{}", 400, "UnknownOperationException"),
    ("unknown operation", "POST", headers("SubscribeToShard"), b"{}", 400, "UnknownOperationException"),
    ("no JSON", "POST", headers("ListStreams"), b"{", 400, "SerializationException"),
    ("no body", "POST", headers("ListStreams"), b"", 400, "SerializationException"),
    ("bad UTF-8", "POST", headers("ListStreams"), b'{"NextToken":"\xff"}', 400, "SerializationException"),
    ("a list", "POST", headers("ListStreams"), b"[]", 400, "SerializationException"),
    ("a wrong type", "POST", headers("ListStreams"), b'{"Limit":"many"}', 400, "SerializationException"),
    (
        "bad base64",
        "POST",
        headers("PutRecord"),
        b'{"StreamName":"orders","PartitionKey":"k","Data":"*"}',
        400,
        "SerializationException",
    ),
    (
        "a lone surrogate",
        "POST",
        headers("PutRecord"),
        b'{"StreamName":"orders","PartitionKey":"\\ud800","Data":""}',
        400,
        "SerializationException",
    ),
    ("deep nesting", "POST", headers("ListStreams"), b'{"X":' + b"[" * 100_000, 400, "SerializationException"),
]


@pytest.mark.parametrize(
    ("method", "sent", "body", "status", "code"), [pytest.param(*row[1:], id=row[0]) for row in BAD_HTTP]
)
async def test_an_invalid_request_is_answered_with_an_error_in_json(
    server: LocalKinesis,
    http: aiohttp.ClientSession,
    *,
    method: str,
    sent: dict[str, str],
    body: bytes,
    status: int,
    code: str,
) -> None:
    async with http.request(method, server.endpoint_url, headers=sent, data=body) as answer:
        assert answer.status == status
        assert answer.headers["Content-Type"] == JSON
        assert len(answer.headers["x-amzn-RequestId"]) == 36
        assert (msgspec.json.decode(await answer.read()))["__type"] == code


async def test_a_body_above_16_mib_is_rejected(server: LocalKinesis, http: aiohttp.ClientSession) -> None:
    async def chunks() -> AsyncIterator[bytes]:
        for _ in range(17):
            yield bytes(2**20)

    for body in (io.BytesIO(bytes(17 * 2**20)), chunks()):
        async with http.post(server.endpoint_url, headers=headers("PutRecords"), data=body) as answer:
            assert answer.status == 413
            assert b"16777216 bytes" in await answer.read()
    assert await _status(http, server.endpoint_url) == 200


async def test_a_truncated_request_does_not_affect_others(
    server: LocalKinesis, http: aiohttp.ClientSession, caplog: pytest.LogCaptureFixture
) -> None:
    port = int(server.endpoint_url.rpartition(":")[2])
    _, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(b"POST / HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1000\r\nContent-Type: " + JSON.encode())
    writer.write(b"\r\nX-Amz-Target: Kinesis_20131202.PutRecords\r\n\r\n" + b'{"Records":[')
    await writer.drain()
    assert await _status(http, server.endpoint_url) == 200
    writer.transport.abort()
    await asyncio.sleep(0)
    assert await _status(http, server.endpoint_url) == 200
    assert [record.getMessage() for record in caplog.records if record.levelname == "ERROR"] == []


async def test_cbor_puts_and_reads_the_same_records(server: LocalKinesis, http: aiohttp.ClientSession) -> None:
    async def call(operation: str, **members: Any) -> dict[str, Any]:
        body = cbor2.dumps(members)
        async with http.post(server.endpoint_url, headers=headers(operation, CBOR), data=body) as answer:
            assert answer.headers["Content-Type"] == CBOR
            content: dict[str, Any] = cbor2.loads(await answer.read(), semantic_decoders={1: lambda ms, _: ms})
            return content

    data = bytes(range(256))
    records = [{"PartitionKey": "🔑", "Data": data, "ExplicitHashKey": "5"}, {"PartitionKey": "k", "Data": b""}]
    put = await call("PutRecords", StreamName="orders", Records=records)
    assert put["FailedRecordCount"] == 0
    arguments = {"StreamName": "orders", "ShardId": "shardId-000000000000"}
    iterator = await call("GetShardIterator", **arguments, ShardIteratorType="TRIM_HORIZON")
    page = await call("GetRecords", ShardIterator=iterator["ShardIterator"])
    assert [record["Data"] for record in page["Records"]] == [data, b""]
    arrived_ms = page["Records"][0]["ApproximateArrivalTimestamp"]
    assert abs(arrived_ms / 1000 - server.epoch - server.now) < 60
    at = cbor2.CBORTag(1, arrived_ms)
    iterator = await call("GetShardIterator", **arguments, ShardIteratorType="AT_TIMESTAMP", Timestamp=at)
    page = await call("GetRecords", ShardIterator=iterator["ShardIterator"])
    assert [record["SequenceNumber"] for record in page["Records"]] == [
        result["SequenceNumber"] for result in put["Records"]
    ]
    rejected = await call("PutRecords", StreamName="orders", Records=[])
    assert rejected["__type"] == "ValidationException"
    server.faults.add(ErrorAnswer("AccessDeniedException"))
    assert (await call("ListStreams"))["__type"] == "AccessDeniedException"


def test_synchronous_code_can_run_it_in_a_thread() -> None:
    with ThreadedLocalKinesis(LocalKinesis({"orders": 1})) as kinesis:
        client = boto3.client("kinesis", region_name="us-east-1", endpoint_url=kinesis.endpoint_url)
        client.put_record(StreamName="orders", PartitionKey="k", Data=b"1")
        client.close()
        assert kinesis.call(lambda fake, _: [record.data for record in fake.records("orders")]) == [b"1"]
        port = int(kinesis.endpoint_url.rpartition(":")[2])
        with pytest.raises(OSError, match="address already in use"):
            ThreadedLocalKinesis(LocalKinesis(port=port)).__enter__()
    with pytest.raises(RuntimeError, match="inside its `with` block"):
        kinesis.call(lambda fake, now: (fake, now))
    with socket.socket() as probe:
        assert probe.connect_ex(("127.0.0.1", port)) != 0


def test_the_thread_ends_while_a_request_hangs() -> None:
    met = threading.Event()
    with ThreadedLocalKinesis(LocalKinesis({"orders": 1})) as kinesis:
        hang = kinesis.call(lambda fake, _: fake.faults.add(Hang()))
        port = int(kinesis.endpoint_url.rpartition(":")[2])
        with socket.create_connection(("127.0.0.1", port)) as hanging:
            head = (
                f"POST / HTTP/1.1\r\nHost: localhost\r\nContent-Type: {JSON}\r\n"
                "X-Amz-Target: Kinesis_20131202.ListStreams\r\n"
            )
            hanging.sendall(f"{head}Content-Length: 2\r\n\r\n{{}}".encode())
            while not hang.fired:
                met.wait(0.001)
    with socket.socket() as probe:
        assert probe.connect_ex(("127.0.0.1", port)) != 0


def test_an_invalid_stream_name_is_an_error_at_the_start() -> None:
    with pytest.raises(KinesisError, match="regular expression"):
        ThreadedLocalKinesis(LocalKinesis({"bad name!": 1})).__enter__()


def test_any_error_at_the_start_is_raised_in_the_entering_thread() -> None:
    raised: list[OverflowError] = []

    def enter() -> None:
        try:
            ThreadedLocalKinesis(LocalKinesis(port=70_000)).__enter__()
        except OverflowError as error:
            raised.append(error)

    # A daemon thread: if it never returned, it would block the end of the test run.
    entering = threading.Thread(target=enter, daemon=True)
    entering.start()
    entering.join(timeout=30)
    assert len(raised) == 1


def test_a_string_instead_of_a_list_of_names_is_rejected() -> None:
    with pytest.raises(TypeError, match="'orders'"):
        LocalKinesis("orders")


def test_a_running_server_cannot_be_started_in_a_thread() -> None:
    server = LocalKinesis({"orders": 1})
    with ThreadedLocalKinesis(server), pytest.raises(RuntimeError, match="already running"):
        ThreadedLocalKinesis(server).__enter__()


@pytest.mark.long
def test_it_runs_in_a_process_of_its_own_and_closes_all_resources() -> None:
    with LocalKinesisProcess({"orders": 2}, "--no-limits") as kinesis:
        client = boto3.client("kinesis", region_name="us-east-1", endpoint_url=kinesis.endpoint_url)
        failed = [
            client.put_records(StreamName="orders", Records=[{"PartitionKey": "k", "Data": b""}] * 500)
            for _ in range(4)
        ]
        client.close()
        assert [answer["FailedRecordCount"] for answer in failed] == [0, 0, 0, 0]
        assert kinesis.pid > 0
    assert kinesis.pid == 0
    gc.collect()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_the_command_prints_one_line_and_exits_with_0_on_a_signal(number: signal.Signals) -> None:
    command = [sys.executable, "-W", "error", "-X", "dev", "-m", "kpl_integrations.local_kinesis", "--stream", "a:3"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    with process:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line.startswith("Local Kinesis listens on http://127.0.0.1:")
        process.send_signal(number)
        assert process.communicate(timeout=20) == ("", "")
    assert process.returncode == 0


@pytest.mark.parametrize("stream", ["", ":3", "a:0", "a:many", "a=2", "a b"])
def test_the_command_explains_an_invalid_stream(stream: str) -> None:
    command = [sys.executable, "-m", "kpl_integrations.local_kinesis", "--stream", stream]
    result = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    assert result.returncode == 2
    assert "write NAME or NAME:SHARDS" in result.stderr


def test_a_process_that_cannot_start_raises(capfd: pytest.CaptureFixture[str]) -> None:
    with (
        pytest.raises(RuntimeError, match="did not start to listen"),
        LocalKinesisProcess({"orders": 1}, "--port", "-1"),
    ):
        pass
    assert "Error" in capfd.readouterr().err
