"""A connection with a cached head answers exactly like one without, for requests in any pieces."""

import asyncio
import itertools
from typing import Any, NamedTuple

import pytest
import uvicorn
from hypothesis import example, given, settings, strategies as st
from uvicorn.server import ServerState

from kpl_integrations.ingest import IngestGateway
from kpl_integrations.ingest.fast_path.head_cache import HeadCache
from kpl_integrations.ingest.fast_path.protocol import GatewayConnection
from kpl_integrations.ingest.settings_sources import load_settings
from kpl_integrations.ingest.tenants import Tenant
from tests.ingest.wire import Wire
from tests.support.gateway_scene import JSON, NDJSON, STREAM, Client, KnownTenants, gateway_of, kinesis
from tests.support.producer_scene import stored
from tests.support.virtual_time import run_in_virtual_time

PATH = f"/v1/streams/{STREAM}/records"
ONE = b'{"partition_key":"k","data":"x"}'


def request(body: bytes, *fields: str, target: str = PATH, tenant: str = "plain") -> bytes:
    head = [f"POST {target} HTTP/1.1", "host: x", f"authorization: Bearer {tenant}", *fields]
    return "\r\n".join([*head, f"content-length: {len(body)}", "", ""]).encode() + body


def chunked(*chunks: bytes, size: bytes = b"%x", end: bytes = b"0\r\n\r\n") -> bytes:
    head = request(b"", f"content-type: {JSON}").replace(b"content-length: 0", b"transfer-encoding: chunked")
    return head + b"".join((size + b"\r\n%b\r\n") % (len(chunk), chunk) for chunk in chunks) + end


pytestmark = pytest.mark.usefixtures("same_request_ids")

TRACE = f"traceparent: 00-{7:032x}-{7:016x}-01"
OBJECT = b'{"partition_key":"k","data":{"a":1}}'
# Requests with an id or a trace: name, body, tenant and header fields. Those with the same fields differ in values.
NAMED = [
    ("named", ONE, "plain", "x-request-id: a.1"),
    ("named again", ONE, "plain", "x-request-id: a.2"),
    ("named badly", ONE, "plain", "x-request-id: a b"),
    ("named and metered", ONE, "metered", "x-request-id: a.3"),
    ("named and bad", b"{", "plain", "x-request-id: a.4"),
    ("without a name", ONE, "nobody", "x-request-id: a.5"),
    ("traced", OBJECT, "traced", TRACE),
    ("traced again", OBJECT, "traced", TRACE.replace("7", "8")),
    ("traced and plain", OBJECT, "plain", TRACE.replace("7", "9")),
    ("traced badly", OBJECT, "traced", TRACE.replace("7", "g")),
]
ASKED = {
    "one": request(ONE, f"content-type: {JSON}"),
    "a longer one": request(ONE.replace(b"x", b"y" * 200), f"content-type: {JSON}"),
    "lines": request(ONE + b"\n" + ONE, f"content-type: {NDJSON}"),
    "a bad one": request(b"{", f"content-type: {JSON}"),
    "nothing": request(b"", f"content-type: {JSON}"),
    "metered": request(ONE, f"content-type: {JSON}", tenant="metered"),
    "alone": request(ONE, f"content-type: {JSON}", tenant="alone"),
    "nobody": request(ONE, f"content-type: {JSON}", tenant="nobody"),
    "of another stream": request(ONE, f"content-type: {JSON}", target="/v1/streams/absent/records"),
    "the good of it": request(ONE + b"\n{}", f"content-type: {NDJSON}", target=PATH + "?partial=true"),
    "with a key": request(ONE, f"content-type: {JSON}", "idempotency-key: k"),
    "chunked": chunked(ONE),
    "in two chunks": chunked(ONE[:7], ONE[7:]),
    "in many chunks": chunked(*(ONE[at : at + 1] for at in range(len(ONE))), ONE[:0].ljust(80)),
    "chunked with an extension": chunked(ONE, size=b"%x;a=b"),
    "chunked with a trailer": chunked(ONE, end=b"0\r\na: b\r\n\r\n"),
    "chunked without an end": chunked(ONE, end=b""),
    "chunked in decimals": chunked(ONE, size=b"%d"),
    "chunked wrongly": chunked(ONE, size=b"+%x"),
    **{name: request(body, f"content-type: {JSON}", *fields, tenant=tenant) for name, body, tenant, *fields in NAMED},
    "another path": b"GET /livez HTTP/1.1\r\nhost: x\r\n\r\n",
    "the last": b"GET /livez HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n",
    "no HTTP": b"Nonsense\r\n\r\n",
}
ASKED["the rest of one"] = ASKED["one"][20:]


class Line(NamedTuple):
    """One connection."""

    wire: Wire
    protocol: GatewayConnection

    async def hear(self, piece: bytes) -> None:
        if not self.wire.closed:
            self.protocol.data_received(piece)
        # Requests that wait need only a few turns of the event loop.
        for _ in range(20):
            await asyncio.sleep(0)


def protocol_of(gateway: IngestGateway) -> Any:
    return GatewayConnection.for_gateway(gateway, load_settings(max_header_bytes=10_000))


def line_to(gateway: IngestGateway, kind: Any = None, state: ServerState | None = None, **options: Any) -> Line:
    kind = kind or protocol_of(gateway)
    config = uvicorn.Config(gateway, http=kind, lifespan="off", ws="none", log_config=None, access_log=False, **options)
    config.load()
    wire, made = Wire(), kind(config=config, server_state=state or ServerState(), app_state={})
    made.connection_made(wire)
    assert isinstance(made, GatewayConnection)
    return Line(wire, made)


def tenants() -> KnownTenants:
    return KnownTenants(
        Tenant(id="plain"),
        Tenant(id="metered", records_per_second=3),
        Tenant(id="alone", aggregation=False),
        Tenant(id="traced", trace_records=True),
    )


async def what_happens(pieces: list[bytes]) -> tuple[Any, ...]:
    """Return the answers and effects of a new gateway that receives these pieces on one connection."""
    transport = kinesis()
    async with gateway_of(transport, tenants()) as gateway:
        assert (await Client(gateway, "plain").post({"partition_key": "k", "data": "first"})).status == 202
        line = line_to(gateway)
        for piece in pieces:
            await line.hear(piece)
        accounts = sorted((one.tenant.id, one.requests, one.accepted_records) for one in gateway.opened.accounts)
        tally = dict(gateway.tally.answers), dict(gateway.tally.refusals)
        line.protocol.connection_lost(None)
    return line.wire.said, line.wire.closed, accounts, tally, sorted(data for _, data in stored(transport, STREAM))


@given(
    st.lists(st.sampled_from(sorted(ASKED)), min_size=1, max_size=8),
    st.lists(st.integers(0, 3_000), max_size=6),
    st.booleans(),
)
@example(["one", "one", "a longer one", "a bad one", "one"], [], True)
@example(["one", "another path", "one", "one", "nobody"], [], True)
@example(["one", "the rest of one"], [20], True)
@example(["named", "named again", "named and metered", "named", "named and bad", "without a name"], [], True)
@example(["traced", "traced again", "traced and plain", "traced badly", "traced"], [], True)
@settings(max_examples=60, deadline=None)
def test_answers_and_effects_are_those_of_parsing_every_request(names: list[str], cuts: list[int], apart: bool):
    asked = [ASKED[name] for name in names]
    whole = b"".join(asked)
    ends = {sum(len(each) for each in asked[:count]) for count in range(len(asked) + 1)} if apart else {0, len(whole)}
    places = sorted(ends | {cut % (len(whole) + 1) for cut in cuts})
    pieces = [whole[start:end] for start, end in itertools.pairwise(places)]

    async def main() -> None:
        remembering = await what_happens(pieces)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(HeadCache, "of", lambda *_: None)
            assert remembering == await what_happens(pieces)

    run_in_virtual_time(main, backend="asyncio")


@pytest.mark.anyio
@pytest.mark.parametrize("anyio_backend", ["asyncio"])
class TestOneConnection:
    """State that changes between two requests with the same head."""

    async def test_requests_with_the_cached_head_are_not_parsed(self):
        async with gateway_of(kinesis(), tenants()) as gateway:
            await Client(gateway, "plain").post({"partition_key": "k", "data": "first"})
            line = line_to(gateway)
            await line.hear(ASKED["one"])
            line.protocol.parser = None  # it is not needed any more
            for name in ("one", "a longer one", "a bad one", "one"):
                await line.hear(ASKED[name])
            assert gateway.tally.answers == {202: 5, 400: 1}

    async def test_no_head_and_no_credentials_of_a_refused_request_are_stored(self):
        async with gateway_of(kinesis(), tenants()) as gateway:
            await Client(gateway, "plain").post({"partition_key": "k", "data": "first"})
            line = line_to(gateway)
            await line.hear(ASKED["nobody"])
            assert line.protocol._cached is None  # noqa: SLF001 - what it stores
            for name in ("one", "nobody", "metered"):
                await line.hear(ASKED[name])
            cached = line.protocol._cached  # noqa: SLF001
            assert cached is not None
            assert [head.authorization for head in cached._heads.values()] == ["Bearer metered"]  # noqa: SLF001

    async def test_the_tenant_is_looked_up_for_each_request(self):
        directory = tenants()
        async with gateway_of(kinesis(), directory) as gateway:
            await Client(gateway, "plain").post({"partition_key": "k", "data": "first"})
            line = line_to(gateway)
            await line.hear(ASKED["one"])
            directory.change(Tenant(id="plain", records_per_second=1))
            await line.hear(ASKED["one"])
            await line.hear(ASKED["one"])
            assert line.wire.said.count(b"HTTP/1.1 429") == 1
            directory.change(Tenant(id="plain", streams=("others",)))
            await line.hear(ASKED["one"])
            assert line.wire.said.count(b"HTTP/1.1 403") == 1

    async def test_a_closed_gateway_answers_503_and_closes_the_connection(self):
        async with gateway_of(kinesis(), tenants()) as gateway:
            await Client(gateway, "plain").post({"partition_key": "k", "data": "first"})
            line = line_to(gateway)
            await line.hear(ASKED["one"])
            await gateway.close()
            await line.hear(ASKED["one"])
            assert b"HTTP/1.1 503" in line.wire.said
            assert line.wire.closed
            await line.hear(ASKED["one"])
            assert line.wire.said.count(b"HTTP/1.1 ") == 2

    async def test_connections_above_the_limit_get_503(self):
        async with gateway_of(kinesis(), tenants()) as gateway:
            await Client(gateway, "plain").post({"partition_key": "k", "data": "first"})
            kind, state = protocol_of(gateway), ServerState()
            first = line_to(gateway, kind, state, limit_concurrency=1)
            await first.hear(ASKED["one"])
            second = line_to(gateway, kind, state, limit_concurrency=1)
            for line in (first, second, first):
                await line.hear(ASKED["one"])
            assert second.wire.said.count(b"HTTP/1.1 503") == 1
            assert first.wire.said.count(b"HTTP/1.1 202") == 3

    async def test_a_client_that_does_not_read_its_answers_waits_until_it_does(self):
        async with gateway_of(kinesis(), tenants()) as gateway:
            await Client(gateway, "plain").post({"partition_key": "k", "data": "first"})
            line = line_to(gateway)
            await line.hear(ASKED["one"])
            line.protocol.pause_writing()
            await line.hear(ASKED["one"])
            assert line.wire.said.count(b"HTTP/1.1 202") == 1
            line.protocol.resume_writing()
            await line.hear(ASKED["one"])
            assert line.wire.said.count(b"HTTP/1.1 202") == 3
