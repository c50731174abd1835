"""The id of a request and its place in a trace: what is taken from a client, and what an answer and a log line say."""

import logging
import re

import pytest
from hypothesis import given, strategies as st

from kpl_integrations.ingest.http.correlation import (
    Correlation,
    TraceContext,
    new_request_id,
    request_id_of,
    trace_context,
)
from kpl_integrations.ingest.tenants import Tenant
from tests.ingest.fast_path.test_repeated_requests import ONE, PATH, line_to, request
from tests.ingest.http2.scene import Http2Scene, Talk
from tests.support.gateway_scene import JSON, STREAM, Client, KnownTenants, gateway_of, kinesis, open_gateway
from tests.support.virtual_time import run_in_virtual_time

TRACE_ID, PARENT_ID = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
TRACEPARENT = f"00-{TRACE_ID}-{PARENT_ID}-01"
MADE = re.compile("[0-9a-f]{24}")
# X-Request-Id, and whether it is taken.
GIVEN = {
    "a": True,
    "A-Z_a.z-09": True,
    "x" * 128: True,
    "x" * 129: False,
    "": False,
    "a b": False,
    "a\tb": False,
    'a" status="200': False,
    "a=b": False,
    "ä": False,
    "a,b": False,
}


@pytest.mark.parametrize(("given", "is_taken"), GIVEN.items(), ids=[str(number) for number in range(len(GIVEN))])
def test_a_harmless_id_is_taken_and_any_other_replaced(given, is_taken):
    found = request_id_of(Correlation(given.encode())).decode()
    assert (found == given) is is_taken
    assert is_taken or MADE.fullmatch(found)


@given(st.binary(max_size=200))
def test_no_id_can_change_a_log_line_or_a_header_field(given: bytes):
    assert re.fullmatch(rb"[A-Za-z0-9._-]{1,128}", request_id_of(Correlation(given)))


def test_new_ids_differ():
    made = {new_request_id() for _ in range(1_000)}
    assert len(made) == 1_000
    assert all(MADE.fullmatch(each.decode()) for each in made)


def test_the_trace_of_a_client_is_continued():
    found = trace_context(Correlation(None, TRACEPARENT.encode(), b"vendor=1"), is_verified=True)
    assert found == TraceContext(TRACEPARENT, "vendor=1")
    assert found.trace_id == TRACE_ID


def test_the_sampled_flag_counts_only_for_a_verified_client():
    for flags, verified, unverified in (("01", "01", "00"), ("03", "03", "02"), ("00", "00", "00"), ("ff", "03", "02")):
        correlation = Correlation(None, f"00-{TRACE_ID}-{PARENT_ID}-{flags}".encode())
        found = [trace_context(correlation, is_verified=is_verified) for is_verified in (True, False)]
        assert [each and each.traceparent[-2:] for each in found] == [verified, unverified]


@pytest.mark.parametrize(
    "malformed",
    [
        "",
        "00",
        TRACEPARENT.upper(),
        TRACEPARENT + "-more",
        "ff" + TRACEPARENT[2:],
        TRACEPARENT.replace(TRACE_ID, "0" * 32),
        TRACEPARENT.replace(PARENT_ID, "0" * 16),
        TRACEPARENT[:-1],
        f"{TRACEPARENT}, {TRACEPARENT}",
        "01" + TRACEPARENT[2:] + "-" + "x" * 300,
        "01" + TRACEPARENT[2:] + ".",
    ],
)
def test_a_malformed_traceparent_is_ignored(malformed):
    assert trace_context(Correlation(None, malformed.encode()), is_verified=True) is None


@given(st.binary(max_size=80))
def test_no_traceparent_passes_in_another_form(given: bytes):
    found = trace_context(Correlation(None, given, given), is_verified=True)
    assert found is None or re.fullmatch(r"00-[0-9a-f]{32}-[0-9a-f]{16}-0[0-3]", found.traceparent)


def test_a_later_version_is_continued_in_ours():
    found = trace_context(Correlation(None, b"cc" + TRACEPARENT[2:].encode() + b"-more"), is_verified=True)
    assert found == TraceContext(TRACEPARENT)


@pytest.mark.parametrize("state", [b"a=\x00", "a=ä".encode(), b"x" * 513, b""])
def test_a_malformed_tracestate_is_left_out(state):
    assert trace_context(Correlation(None, TRACEPARENT.encode(), state), is_verified=True) == TraceContext(TRACEPARENT)


def id_in(answer: bytes) -> str:
    """Return the id in an answer of HTTP/1.1; its only one."""
    (found,) = re.findall(rb"\r\nx-request-id: ([^\r]*)\r\n", answer.partition(b"\r\n\r\n")[0] + b"\r\n")
    return str(found.decode())


@pytest.mark.parametrize("given", ["", "mine.1"])
def test_an_answer_and_its_problem_have_one_id_on_each_path(given):
    """The fast path, the cached head, a request in two pieces, HTTP/2 and plain ASGI."""
    fields = [f"x-request-id: {given}"] if given else []

    async def main() -> None:
        said: list[tuple[int, str, bytes]] = []
        async with gateway_of(kinesis(), KnownTenants(Tenant(id="plain"))) as gateway:
            client = Client(gateway, "plain")
            for body in (ONE, b"{"):
                answer = await client.call(
                    "POST", PATH, body, headers={"content-type": JSON, **({"x-request-id": given} if given else {})}
                )
                said.append((answer.status, answer.headers["x-request-id"], answer.body))
            line = line_to(gateway)
            for body in (ONE, ONE, b"{"):
                whole = request(body, f"content-type: {JSON}", *fields)
                for pieces in ((whole,), (whole[:30], whole[30:])):
                    line.wire.writes.clear()
                    for piece in pieces:
                        await line.hear(piece)
                    head, _, content = line.wire.said.partition(b"\r\n\r\n")
                    said.append((int(head[9:12]), id_in(line.wire.said), content))
            line.protocol.connection_lost(None)
        scene = Http2Scene()
        async with scene.gateway:
            talk = Talk(scene)
            for body in (ONE, b"{"):
                named = [("x-request-id", given)] if given else []
                status, headers, content = await talk.ask("POST", PATH, [("content-type", JSON), *named], body)
                said.append((status, dict(headers)["x-request-id"], content))
            await talk.close()
        assert sorted(status for status, _, _ in said) == [202] * 6 + [400] * 4
        assert all((found == given) if given else MADE.fullmatch(found) for _, found, _ in said)
        assert given or len({found for _, found, _ in said}) == 10
        for status, found, content in said:
            assert (f'"request_id":"{found}"'.encode() in content) is (status == 400)

    run_in_virtual_time(main, backend="asyncio")


@pytest.mark.anyio
@pytest.mark.parametrize("anyio_backend", ["asyncio"])
class TestTheAccessLog:
    async def test_a_line_has_id_trace_tenant_and_stream_on_each_path(self, caplog):
        caplog.set_level(logging.INFO, "kpl_integrations.ingest.access")
        fields = {"x-request-id": "mine.1", "traceparent": TRACEPARENT, "content-type": JSON}
        async with gateway_of(kinesis(), KnownTenants(Tenant(id="plain")), access_log=1.0) as gateway:
            await Client(gateway, "plain").call("POST", PATH, ONE, headers=fields)
            line = line_to(gateway)
            await line.hear(request(ONE, *[f"{name}: {value}" for name, value in fields.items()]))
            line.protocol.connection_lost(None)
        found = [record.__dict__["fields"] for record in caplog.records]
        known = {"request_id": "mine.1", "trace_id": TRACE_ID, "tenant": "plain", "stream": STREAM, "status": 202}
        assert [{name: each[name] for name in known} for each in found] == [known, known]
        assert all(f'request_id="mine.1" trace_id="{TRACE_ID}"' in each for each in caplog.messages)

    async def test_the_line_of_a_refused_request_has_what_is_known_and_its_answers_id(self, caplog):
        caplog.set_level(logging.INFO, "kpl_integrations.ingest.access")
        async with open_gateway(directory=KnownTenants(Tenant(id="plain")), access_log=1.0) as gateway:
            answer = await Client(gateway, "nobody").post({"data": "x"}, x_request_id='a" status="200')
            other = await Client(gateway).get("/nowhere")
        assert [record.__dict__["fields"]["status"] for record in caplog.records] == [401, 404]
        assert [record.__dict__["fields"].get("stream") for record in caplog.records] == [STREAM, None]
        assert not any("tenant" in record.__dict__["fields"] for record in caplog.records)
        for record, each in zip(caplog.records, (answer, other), strict=True):
            assert record.__dict__["fields"]["request_id"] == each.headers["x-request-id"] == each.json()["request_id"]

    async def test_an_exception_is_logged_with_the_tenant_and_the_stream(self, caplog, monkeypatch):
        async with gateway_of(kinesis(), KnownTenants(Tenant(id="plain"))) as gateway:
            await Client(gateway, "plain").post({"partition_key": "k", "data": "first"})
            line = line_to(gateway)
            monkeypatch.setattr(type(gateway.admission), "put_pairs", _fails)
            await line.hear(request(ONE, f"content-type: {JSON}", "x-request-id: mine.2"))
            assert line.wire.said.startswith(b"HTTP/1.1 500")
            assert id_in(line.wire.said) == "mine.2"
            assert "Exception in the fast path; answered with request_id=mine.2" in caplog.text
            assert f"request_id=mine.2 tenant=plain stream={STREAM}" in caplog.text

    async def test_an_exception_behind_asgi_is_answered_with_the_id_of_its_log_line(self, caplog):
        """Over HTTP/1.1, where a request that closes its connection does not take the fast path, and over HTTP/2."""
        scene = Http2Scene()
        octets = ("content-type", "application/octet-stream"), ("x-request-id", "mine.3")
        async with scene.gateway:
            await Client(scene.gateway).post({"partition_key": "k", "data": "first"})
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(type(scene.gateway.admission), "put_records", _fails)
                line = line_to(scene.gateway)
                await line.hear(request(b"x", "connection: close", *[": ".join(field) for field in octets]))
                talk = Talk(scene)
                status, headers, _ = await talk.ask("POST", PATH, [*octets], b"x")
            assert line.wire.said.startswith(b"HTTP/1.1 500")
            assert (id_in(line.wire.said), status, headers["x-request-id"]) == ("mine.3", 500, "mine.3")
            line.protocol.connection_lost(None)
            await talk.close()
        failed = [each for each in caplog.messages if each.startswith("Exception in ASGI application")]
        assert failed == ["Exception in ASGI application; request_id=mine.3"] * 2


def _fails(*_: object, **__: object) -> None:
    message = "broken"
    raise RuntimeError(message)
