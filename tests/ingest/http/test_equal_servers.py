"""The gateway's own connection answers as the application behind uvicorn with h11 does, wherever the bytes are cut.

The same bytes go to both, in two pieces that are cut at each position. What h11 hands on has the same status, body and
records. What is not HTTP is refused by both, which close the connection.
"""

import asyncio
import gzip
import json
from collections.abc import Callable
from typing import Any

import pytest
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.server import ServerState

from kpl_integrations.ingest import IngestGateway
from kpl_integrations.ingest.fast_path.protocol import GatewayConnection
from kpl_integrations.ingest.settings_sources import load_settings
from kpl_integrations.ingest.tenants import OpenTenants, Tenant
from tests.ingest.wire import Wire
from tests.support.gateway_scene import JSON, NDJSON, STREAM, gateway_of, kinesis
from tests.support.producer_scene import stored
from tests.support.virtual_time import run_in_virtual_time

PATH = f"/v1/streams/{STREAM}/records"
ONE = b'{"partition_key":"k","data":"x"}'
LINES = ONE + b"\n" + ONE
HALF = ONE + b"\n" + b'{"partition_key":7}'
EVENT = {"specversion": "1.0", "id": "1", "source": "/s", "type": "t", "data": {"a": 1}}
# Ends the connection, so that both say all that they have to say.
LAST = b"GET /livez HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n"


def asked(*fields: str, method: str = "POST", path: str = PATH, version: str = "1.1", body: bytes = b"") -> bytes:
    return "\r\n".join([f"{method} {path} HTTP/{version}", *fields, "", ""]).encode() + body


def post(body: bytes, *fields: str, kind: str = JSON, path: str = PATH) -> bytes:
    return asked("host: x", f"content-type: {kind}", *fields, f"content-length: {len(body)}", path=path, body=body)


def chunked(body: bytes, size: int, *trailers: str) -> bytes:
    parts = [body[at : at + size] for at in range(0, len(body), size)]
    chunks = b"".join(b"%x\r\n%b\r\n" % (len(part), part) for part in parts)
    return chunks + b"0\r\n" + "".join(f"{each}\r\n" for each in trailers).encode() + b"\r\n"


REQUESTS = {
    "one": post(ONE),
    "of one": post(ONE) + post(ONE),
    "delivered": post(ONE, path=PATH + "?ack=delivered"),
    "delivered, then queued": post(ONE, path=PATH + "?ack=delivered") + post(ONE),
    "lines": post(LINES, kind=NDJSON),
    "in part": post(HALF, kind=NDJSON, path=PATH + "?partial=true"),
    "lines with a bad one": post(HALF, kind=NDJSON),
    "malformed": post(b'{"partition_key":'),
    "no body": post(b""),
    "another type": post(ONE, kind="text/html"),
    "octets": post(ONE, "x-partition-key: k", kind="application/octet-stream"),
    "gzip": post(gzip.compress(ONE, mtime=0), "content-encoding: gzip"),
    "event": post(json.dumps(EVENT).encode(), kind="application/cloudevents+json"),
    "events": post(json.dumps([EVENT, EVENT]).encode(), kind="application/cloudevents-batch+json"),
    "event in fields": post(b'{"a":1}', "ce-specversion: 1.0", "ce-id: 1", "ce-source: /s", "ce-type: t"),
    "OTLP": post(b'{"resourceLogs":[]}', path="/v1/logs"),
    "Kinesis API": post(b"{}", "x-amz-target: Kinesis_20131202.PutRecord", kind="application/x-amz-json-1.1", path="/"),
    "once": post(ONE, "idempotency-key: a") + post(ONE, "idempotency-key: a"),
    "spooled": post(ONE, "x-ack: spooled"),
    "unknown ack": post(ONE, path=PATH + "?ack=soon"),
    "chunks": asked("host: x", f"content-type: {JSON}", "transfer-encoding: chunked", body=chunked(ONE, 9)),
    "trailers": asked(
        "host: x", f"content-type: {JSON}", "transfer-encoding: chunked", body=chunked(ONE, 40, "x-ack: delivered")
    ),
    "expects": post(ONE, "expect: 100-continue"),
    "expects and is too large": post(ONE, "expect: 100-continue").replace(b"length: 32", b"length: 99999999999"),
    "blanks around the length": post(ONE).replace(b"length: 32", b"length:  32 "),
    "HTTP/1.0": asked(f"content-type: {JSON}", f"content-length: {len(ONE)}", version="1.0", body=ONE),
    "close": post(ONE, "connection: close"),
    "upgrade": post(ONE, "connection: upgrade", "upgrade: h2c"),
    "escaped target": post(ONE, path=PATH.replace("records", "record%73")),
    "health": asked("host: x", method="GET", path="/livez"),
    "head": asked("host: x", method="HEAD", path="/livez"),
    "unknown path": asked("host: x", method="GET", path="/nothing%20here?a=b"),
    "another method": asked("host: x", "content-length: 0", method="PUT"),
    "options": asked("host: x", method="OPTIONS"),
    "repeated field": post(ONE, "x-ack: queued", "x-ack: delivered"),
}
MALFORMED = {
    "no HTTP": b"hello\r\n\r\n",
    "no host": asked("content-length: 0"),
    "two hosts": asked("host: x", "host: y", "content-length: 0"),
    "blank before a colon": asked("host : x", "content-length: 0"),
    "no colon": asked("host: x", "nonsense", "content-length: 0"),
    "NUL in a field": asked("host: x", "a: b\x00c", "content-length: 0"),
    "different lengths": post(ONE, "content-length: 3"),
    "length with a sign": post(ONE).replace(b"length: 32", b"length: +32"),
    "length in hexadecimal": post(ONE).replace(b"length: 32", b"length: 0x20"),
    "unknown coding": asked("host: x", "transfer-encoding: gzip", body=ONE),
    "chunk without a length": asked("host: x", "transfer-encoding: chunked", body=b"zz\r\n"),
}


# HTTP lets a server refuse these (RFC 9110, sections 8.6 and 15.6.6; RFC 9112, section 5.2). Only the gateway's does.
REFUSED_BY_OURS = {
    "HTTP/2.0": asked("host: x", version="2.0"),
    "folded field": asked("host: x", "a: b", " c", "content-length: 0"),
    "two equal lengths": post(ONE, "content-length: 32"),
}


pytestmark = pytest.mark.usefixtures("same_request_ids")


class Server:
    """A gateway, and what makes its connections."""

    def __init__(self, is_own: bool) -> None:
        self.transport = kinesis()
        directory = OpenTenants(Tenant(id="local", otlp_streams={"logs": STREAM}))
        self.gateway: IngestGateway = gateway_of(self.transport, directory, record_max_buffered_time_ms=5)
        make: Any = GatewayConnection.for_gateway(self.gateway, load_settings()) if is_own else H11Protocol
        config = uvicorn.Config(self.gateway, http=make, lifespan="off", ws="none", log_config=None, access_log=False)
        config.load()
        self._make: Callable[[], Any] = lambda: make(config=config, server_state=ServerState(), app_state={})

    async def hear(self, *pieces: bytes) -> tuple[list[tuple[int, bytes]], bool, list[bytes]]:
        """Return the answers to these pieces, whether the connection is closed, and the records that were stored."""
        before = len(stored(self.transport, STREAM))
        wire, connection = Wire(), self._make()
        connection.connection_made(wire)
        for piece in pieces:
            if piece and not wire.closed:
                connection.data_received(piece)
            await asyncio.sleep(0.02)
        # A delivery takes 5 ms of virtual time, and a pending answer closes behind it.
        await asyncio.sleep(0.1)
        connection.connection_lost(None)
        await asyncio.sleep(0)
        records = sorted(data for _, data in stored(self.transport, STREAM)[before:])
        return answers(wire.said), wire.closed, records


def answers(said: bytes) -> list[tuple[int, bytes]]:
    """Return status and body of each answer; chunks joined, and without what no two answers share."""
    found: list[tuple[int, bytes]] = []
    while said:
        head, _, said = said.partition(b"\r\n\r\n")
        status = int(head.split(b" ", 2)[1])
        fields = dict(line.lower().split(b": ", 1) for line in head.split(b"\r\n")[1:])
        size = int(fields.get(b"content-length", 0 if status == 100 else len(said)))
        # The answer to HEAD has a length and no body. h11 ends a refusal by the end of the connection.
        body = b"" if said.startswith(b"HTTP/1.1 ") or not said else said[:size]
        said = said[len(body) :]
        found.append((status, body))
    return found


def is_refused(heard: tuple[list[tuple[int, bytes]], bool, list[bytes]]) -> bool:
    found, is_closed, records = heard
    return is_closed and not records and [status // 100 for status, _ in found] in ([4], [5], [])


async def compare(step: int) -> int:
    """Compare at every `step`-th position. Return the number of comparisons."""
    count = 0
    for name, whole in [*REQUESTS.items(), *MALFORMED.items(), *REFUSED_BY_OURS.items()]:
        # New ones, because what is stored is read as a whole.
        own, other = Server(is_own=True), Server(is_own=False)
        async with own.gateway, other.gateway:
            for server in (own, other):
                await server.hear(post(ONE), LAST)
            for cut in range(1, len(whole) + 1, step):
                ours, plain = [await server.hear(whole[:cut], whole[cut:], LAST) for server in (own, other)]
                count += 1
                if name in REQUESTS:
                    assert shown(ours) == shown(plain), (name, cut)
                else:
                    assert is_refused(ours), (name, cut, ours)
                    assert is_refused(plain) is (name in MALFORMED), (name, cut, plain)
    return count


def shown(heard: tuple[list[tuple[int, bytes]], bool, list[bytes]]) -> tuple[Any, ...]:
    """Return what must be equal: no sequence numbers, and 100 (Continue) need not be said twice."""
    found, is_closed, records = heard
    return [(status, b"" if b"sequence_number" in body else body) for status, body in found], is_closed, records


def test_both_answer_alike_wherever_the_bytes_are_cut():
    assert run_in_virtual_time(lambda: compare(step=7), backend="asyncio") > 900


@pytest.mark.long
@pytest.mark.timeout(300)
def test_both_answer_alike_at_each_position():
    assert run_in_virtual_time(lambda: compare(step=1), backend="asyncio") > 6_000
