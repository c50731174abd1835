"""A hostile client uses only its own room, rate and budget. Real requests over HTTP."""

import asyncio
import gzip
import hashlib
import http.client
import json
import re
import socket
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any
from urllib.parse import urlsplit

import pytest
from botocore.auth import SigV4Auth
from botocore.awsrequest import AWSRequest
from botocore.credentials import Credentials

from kpl_core.transport import RequestFailure
from kpl_integrations.ingest.admission.clients import REFUSED_BYTES_PER_SECOND
from kpl_integrations.ingest.http import bodies
from kpl_integrations.ingest.tenants import AccessKey, CallableTenants, OpenTenants, Tenant, TenantDirectory
from tests.support.gateway_scene import JSON, Client, KnownTenants, kinesis, open_gateway
from tests.support.running_gateway import RunningGateway, key_directory, running_gateway
from tests.support.virtual_time import VirtualTimeLoop

STREAM = "orders"
PATH = f"/v1/streams/{STREAM}/records"
SECRET = "a-secret-of-the-tenant"
ADMIN = "an-administrators-key"
ADA = Tenant(id="ada")
MIB = 1024 * 1024
DIRECTORY = key_directory(
    AccessKey("ADA", SECRET, ADA),
    quiet=Tenant(id="quiet"),
    greedy=Tenant(id="greedy"),
    metered=Tenant(id="metered", bytes_per_second=MIB),
)
NOT_JSON = b"[" * 10 + b"x" * (MIB - 10)
BOMB = gzip.compress(b"x" * (16 * MIB - 1))
# So that a bomb is decompressed as a whole.
UNCUT = 16 * MIB


@contextmanager
def gateway(**settings: Any) -> Iterator[RunningGateway]:
    given = {"admin_key": ADMIN, "body_seconds": 60, "max_uncut_bytes": UNCUT, **settings}
    with running_gateway(DIRECTORY, {STREAM: 1}, **given) as running:
        # The first request looks the stream up.
        assert post(running, "quiet") == 202
        yield running


@pytest.fixture
def served() -> Iterator[RunningGateway]:
    with gateway() as running:
        yield running


def call(running: RunningGateway, method: str, path: str, body: Any = b"", **headers: str) -> tuple[int, Any, bytes]:
    address = urlsplit(running.url)
    connection = http.client.HTTPConnection(address.hostname or "", address.port, timeout=30)
    try:
        connection.request(method, path, body, {name.replace("_", "-"): value for name, value in headers.items()})
        answer = connection.getresponse()
        return answer.status, answer.headers, answer.read()
    finally:
        connection.close()


def post(running: RunningGateway, tenant: str, body: bytes = b'{"partition_key":"k","data":"x"}', **more: str) -> int:
    return call(running, "POST", PATH, body, authorization=f"Bearer {tenant}", content_type=JSON, **more)[0]


def refused_of(running: RunningGateway, tenant: str) -> int:
    status, _, body = call(running, "GET", "/v1/stats", authorization=f"Bearer {ADMIN}")
    assert status == 200
    return sum(json.loads(body)["tenants"].get(tenant, {"refused": {}})["refused"].values())


@contextmanager
def unfinished(running: RunningGateway, path: str, size: int, **headers: str) -> Iterator[http.client.HTTPConnection]:
    """Send all of a body but its last byte, which may fail once the gateway has refused it."""
    address = urlsplit(running.url)
    connection = http.client.HTTPConnection(address.hostname or "", address.port, timeout=30)
    try:
        connection.putrequest("POST", path)
        for name, value in {"content-length": str(size), **headers}.items():
            connection.putheader(name.replace("_", "-"), value)
        connection.endheaders()
        try:
            for _ in range(16):
                connection.send(b" " * ((size - 1) // 16))
        except ConnectionError:
            pass
        yield connection
    finally:
        connection.close()


def unsigned(key: str = "ADA") -> dict[str, str]:
    day = time.strftime("%Y%m%d", time.gmtime())
    return {
        "content-type": "application/x-amz-json-1.1",
        "x-amz-target": "Kinesis_20131202.PutRecord",
        "x-amz-date": time.strftime("%Y%m%dT%H%M%SZ", time.gmtime()),
        "authorization": f"AWS4-HMAC-SHA256 Credential={key}/{day}/x/kinesis/aws4_request, "
        f"SignedHeaders=host;x-amz-date;x-amz-target, Signature={hashlib.sha256(b'').hexdigest()}",
    }


def signed(running: RunningGateway, operation: str, **arguments: Any) -> tuple[int, bytes]:
    body = json.dumps(arguments).encode()
    request = AWSRequest("POST", running.url + "/", data=body)
    request.headers["Content-Type"] = "application/x-amz-json-1.1"
    request.headers["X-Amz-Target"] = f"Kinesis_20131202.{operation}"
    SigV4Auth(Credentials("ADA", SECRET), "kinesis", "x").add_auth(request)
    status, _, answer = call(running, "POST", "/", body, **dict(request.headers))
    return status, answer


def put(running: RunningGateway) -> int:
    return signed(running, "PutRecord", StreamName=STREAM, PartitionKey="k", Data="eA==")[0]


def in_two_pieces(running: RunningGateway, tenant: str, size: int = MIB) -> int:
    """Post a body that does not arrive at once, so that it needs room."""
    # White space, because a record of this size would take a second of the shard.
    body = b'{"partition_key":"k","data":"x"}'.ljust(size - 9)
    headers = {"authorization": f"Bearer {tenant}", "content-type": JSON}
    with unfinished(running, PATH, len(body), **headers) as connection:
        connection.close()
    address = urlsplit(running.url)
    connection = http.client.HTTPConnection(address.hostname or "", address.port, timeout=30)
    try:
        connection.request("POST", PATH, iter([body[:1000], body[1000:-9], body[-9:]]), {
            **headers, "content-length": str(len(body))})  # fmt: skip
        time.sleep(0.05)
        return connection.getresponse().status
    finally:
        connection.close()


def test_unsigned_bodies_with_a_known_key_id_take_no_room_from_a_tenant() -> None:
    with gateway(max_body_bytes=MIB, max_reading_bytes=8 * MIB) as running, ExitStack() as unread:
        for _ in range(16):
            unread.enter_context(unfinished(running, "/", MIB, **unsigned()))
        assert [in_two_pieces(running, "quiet") for _ in range(5)] == [202] * 5
        assert refused_of(running, "ada") == 0


def test_unsigned_requests_are_not_counted_for_the_tenant_whose_key_id_they_name(served: RunningGateway) -> None:
    for _ in range(50):
        status, _, _ = call(served, "POST", "/", b"", **{**unsigned(), "content-length": str(99 * MIB)})
        assert status == 413
    assert refused_of(served, "ada") == 0
    assert put(served) == 200


def test_a_tenant_with_many_unfinished_bodies_leaves_room_for_another_tenant() -> None:
    with gateway(max_body_bytes=MIB, max_reading_bytes=8 * MIB) as running, ExitStack() as unread:
        for _ in range(16):
            headers = {"authorization": "Bearer greedy", "content-type": JSON}
            unread.enter_context(unfinished(running, PATH, MIB, **headers))
        assert [in_two_pieces(running, "quiet") for _ in range(5)] == [202] * 5
        assert refused_of(running, "quiet") == 0


def test_refused_bytes_are_charged_to_the_byte_rate_of_their_client(served: RunningGateway) -> None:
    assert post(served, "metered") == 202
    assert [post(served, "metered", NOT_JSON) for _ in range(3)] == [400] * 3
    assert post(served, "metered") == 429
    assert post(served, "quiet") == 202


def test_inflated_bytes_of_refused_requests_are_charged_to_a_default_budget(served: RunningGateway) -> None:
    statuses = [post(served, "greedy", BOMB, content_encoding="gzip") for _ in range(3)]
    assert statuses == [400] * 3
    status, headers, body = call(served, "POST", PATH, b"{}", authorization="Bearer greedy", content_type=JSON)
    assert (status, json.loads(body)["code"]) == (429, "quota-exceeded")
    assert 1 <= int(headers["retry-after"]) <= 60
    assert post(served, "quiet") == 202
    # What is refused unread costs nothing more.
    assert [post(served, "greedy", NOT_JSON) for _ in range(10)] == [429] * 10
    _, again, _ = call(served, "POST", PATH, b"{}", authorization="Bearer greedy", content_type=JSON)
    assert int(again["retry-after"]) <= int(headers["retry-after"])


@pytest.mark.parametrize("is_declared", [True, False], ids=["declared", "chunked"])
def test_a_client_that_sends_a_body_that_is_too_large_gets_the_answer(served, is_declared) -> None:
    body = b" " * (20 * MIB)
    sent = body if is_declared else (body[at : at + MIB] for at in range(0, len(body), MIB))
    status, headers, answer = call(served, "POST", PATH, sent, authorization="Bearer quiet", content_type=JSON)
    assert (status, json.loads(answer)["code"], headers["connection"]) == (413, "too-large", "close")


def announce_large_body(running: RunningGateway, **headers: str) -> socket.socket:
    """Send the head of a request with a body that is too large, and nothing of the body."""
    fields = {"host": "x", "authorization": "Bearer quiet", "content-type": JSON, "content-length": str(99 * MIB)}
    lines = [f"POST {PATH} HTTP/1.1", *(f"{name}: {value}" for name, value in {**fields, **headers}.items())]
    address = urlsplit(running.url)
    client = socket.create_connection((address.hostname or "", address.port or 0), timeout=30)
    client.sendall("\r\n".join([*lines, "", ""]).encode())
    return client


def test_the_connection_of_a_refused_client_that_waits_for_100_continue_closes_at_once(served, monkeypatch) -> None:
    monkeypatch.setattr(bodies, "_DROP_SECONDS", 3.0)
    started = time.monotonic()
    with announce_large_body(served, expect="100-continue") as client, client.makefile("rb") as answer:
        assert answer.read().startswith(b"HTTP/1.1 413")
    assert time.monotonic() - started < 2.5


def test_idle_clients_with_refused_bodies_do_not_delay_the_stop(monkeypatch) -> None:
    monkeypatch.setattr(bodies, "_DROP_SECONDS", 30.0)
    with ExitStack() as idle:
        with gateway() as running:
            for _ in range(3):
                client = idle.enter_context(announce_large_body(running))
                assert client.recv(12) == b"HTTP/1.1 413"
            started = time.monotonic()
        # The server waits up to 5 s for its last answers.
        assert time.monotonic() - started < 4.0


def test_a_bomb_costs_its_client_what_was_decompressed_under_the_default_bound() -> None:
    with gateway(max_uncut_bytes=2 * MIB) as running:
        statuses = [413]
        while statuses[-1] == 413 and len(statuses) < 100:
            statuses.append(post(running, "greedy", BOMB, content_encoding="gzip"))
        # Each is decompressed up to the bound, so the budget of 32 MiB is enough for 16, and more on a slow machine.
        assert len(statuses) > 12
        assert statuses[-1] == 429
        assert post(running, "quiet") == 202


def test_wrong_signatures_are_charged_to_their_address_only() -> None:
    with gateway() as running:
        for _ in range(3):
            assert call(running, "POST", "/", b" " * (15 * MIB), **unsigned())[0] == 400
        status, _, body = call(running, "POST", "/", b"{}", **unsigned())
        assert (status, json.loads(body)["__type"]) == (400, "ProvisionedThroughputExceededException")
        assert post(running, "quiet") == 202
        assert refused_of(running, "ada") == 0


@contextmanager
def public_gateway(directory: TenantDirectory) -> Iterator[RunningGateway]:
    """Serve clients without credentials behind a proxy, so that one machine can send from two addresses."""
    settings: dict[str, Any] = {"forwarded_allow_ips": "127.0.0.1", "max_uncut_bytes": UNCUT}
    with running_gateway(directory, {STREAM: 1}, **settings) as running:
        assert call(running, "POST", PATH, VALID, content_type=JSON)[0] == 202
        yield running


def anonymous(running: RunningGateway, path: str, body: bytes, address: str, **headers: str) -> tuple[int, bytes]:
    fields = {"content_type": JSON, "x_forwarded_for": address, **headers}
    status, _, answer = call(running, "POST", path, body, **fields)
    return status, answer


VALID = b'{"partition_key":"k","data":"x"}'
WIRE = {"content_type": "application/x-amz-json-1.1", "x_amz_target": "Kinesis_20131202.PutRecord"}
PUBLIC: list[TenantDirectory] = [
    OpenTenants(Tenant(id="local", otlp_streams={"logs": STREAM})),
    CallableTenants(lambda _: "unknown", unknown=Tenant(id="unknown", otlp_streams={"logs": STREAM})),
]


@pytest.mark.parametrize("directory", PUBLIC, ids=["open", "unknown"])
def test_an_anonymous_client_refuses_only_requests_of_its_own_address(directory) -> None:
    with public_gateway(directory) as running:
        hostile, other = "192.0.2.1", "192.0.2.2"
        for path in (PATH, "/v1/logs", PATH):
            assert anonymous(running, path, BOMB, hostile, content_encoding="gzip")[0] == 400
        for path in (PATH, "/v1/logs"):
            assert anonymous(running, path, VALID, hostile)[0] == 429
        assert b"refused requests of this address" in anonymous(running, "/", b"{}", hostile, **WIRE)[1]
        put = {"StreamName": STREAM, "PartitionKey": "k", "Data": "eA=="}
        assert anonymous(running, PATH, VALID, other)[0] == 202
        assert anonymous(running, "/v1/logs", b"{}", other)[0] == 200
        assert anonymous(running, "/", json.dumps(put).encode(), other, **WIRE)[0] == 200


def test_the_fast_path_charges_and_refuses_the_address_of_the_connection() -> None:
    with public_gateway(PUBLIC[1]) as running:
        for _ in range(3):
            assert call(running, "POST", PATH, BOMB, content_type=JSON, content_encoding="gzip")[0] == 400
        status, _, body = call(running, "POST", PATH, VALID, content_type=JSON)
        assert (status, b"refused requests of this address" in body) == (429, True)
        assert anonymous(running, PATH, VALID, "192.0.2.2")[0] == 202


def test_a_request_of_the_kinesis_api_that_is_refused_before_decoding_costs_its_received_bytes() -> None:
    with gateway() as running:
        large = {"StreamName": "x" * 12 * MIB, "PartitionKey": "k", "Data": "eA=="}
        costs: list[tuple[float, int]] = []
        # 36 MiB of an allowance of 32 MiB; then each refused request adds 12 MiB. A busy machine needs more of them.
        for _ in range(12):
            answer = signed(running, "PutRecord", **large)[1]
            found = re.search(rb"refused requests of tenant ada cost ([0-9,]+) bytes", answer)
            if found is not None:
                costs.append((time.monotonic(), int(found[1].replace(b",", b""))))
            if len(costs) == 2:
                break
        (first_at, first), (second_at, second) = costs[:2]
        assert second > first + 11 * MIB - REFUSED_BYTES_PER_SECOND * (second_at - first_at)


def in_virtual_time(main: Any) -> Any:
    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        return runner.run(main)


def test_invented_stream_names_of_one_tenant_refuse_no_stream_of_another() -> None:
    transport = kinesis()

    async def list_shards(stream: str) -> Any:
        return RequestFailure("AccessDeniedException", f"not authorized to list {stream}")

    transport.list_shards = list_shards  # type: ignore[method-assign]

    async def main() -> tuple[int, Sequence[int]]:
        directory = KnownTenants(Tenant(id="a"), Tenant(id="b"))
        async with open_gateway(transport, directory) as running:
            for number in range(1_100):
                await Client(running, "a").post({"data": "x"}, stream=f"invented-{number}")
            return len(running.producer.statistics()), [
                (await Client(running, "b").post({"data": "x"}, stream=STREAM)).status for _ in range(3)
            ]

    pipelines, statuses = in_virtual_time(main())
    assert list(statuses) == [202] * 3
    assert pipelines <= 20


def test_arns_of_streams_cause_no_more_lookups_than_the_account_may_ask() -> None:
    transport = kinesis()
    asked: list[str] = []

    async def call(_method: str, _read: object, stream: str) -> RequestFailure:
        asked.append(stream)
        await asyncio.sleep(0.001)
        return RequestFailure("Internal", "no answer")

    transport.call = call  # type: ignore[attr-defined]

    async def main() -> int:
        async with open_gateway(transport, KnownTenants(Tenant(id="a"), Tenant(id="b"))) as running:

            async def ask(number: int) -> None:
                arn = f"arn:aws:kinesis:us-east-1:123456789012:stream%2Finvented-{number}"
                await Client(running, "a").post({"data": "x"}, stream=arn.replace("%2F", "/"))

            async with asyncio.timeout(5), asyncio.TaskGroup() as tasks:
                for number in range(2_000):
                    tasks.create_task(ask(number))
                    if number % 100 == 99:
                        await asyncio.sleep(0.2)
            return len(asked)

    # A burst of 16, and 8 a second.
    assert in_virtual_time(main()) <= 16 + 8 * 5 + 1
