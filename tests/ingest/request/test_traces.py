"""A client's trace goes on in a span of the gateway and, if its tenant wants that, in the records of the request."""

import json
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import anyio
import pytest
from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.sdk.trace.sampling import ALWAYS_ON, Sampler
from opentelemetry.trace import SpanKind, StatusCode

from kpl_core import ConfigError
from kpl_core.records.topic import trace_context_of
from kpl_core.testing import ErrorAnswer, When
from kpl_integrations.ingest import IngestGateway
from kpl_integrations.ingest.tenants import Tenant
from kpl_integrations.otel import server_spans
from tests.ingest.fast_path.test_repeated_requests import PATH, line_to, protocol_of, request
from tests.support.gateway_scene import JSON, NDJSON, STREAM, Client, KnownTenants, gateway_of, kinesis
from tests.support.producer_scene import stored
from tests.support.waiting import until

pytestmark = [pytest.mark.anyio, pytest.mark.parametrize("anyio_backend", ["asyncio"])]

TRACE_ID, PARENT_ID = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
TRACEPARENT = f"00-{TRACE_ID}-{PARENT_ID}-01"
OBJECT = b'{"partition_key":"k","data":{"a":1}}'


def tenants() -> KnownTenants:
    unknown = Tenant(id="unknown", trace_records=True)
    return KnownTenants(
        Tenant(id="traced", trace_records=True, otlp_streams={"logs": STREAM}), Tenant(id="plain"), unknown=unknown
    )


class Spans:
    """The spans of a gateway."""

    def __init__(self, sampler: Sampler | None = None) -> None:
        self._made = InMemorySpanExporter()
        self.provider = TracerProvider(sampler=sampler, shutdown_on_exit=False)
        self.provider.add_span_processor(SimpleSpanProcessor(self._made))

    def ended(self) -> list[ReadableSpan]:
        return list(self._made.get_finished_spans())

    def only(self) -> Any:
        (span,) = self.ended()
        return span


@pytest.fixture
def spans(monkeypatch: pytest.MonkeyPatch) -> Iterator[Spans]:
    made = Spans()
    monkeypatch.setattr(server_spans, "get_tracer_provider", lambda: made.provider)
    yield made
    made.provider.shutdown()


def place_of(span: ReadableSpan) -> tuple[str, str]:
    """Return the ids of a span and of its parent, of a span of the client's trace."""
    assert span.context is not None
    assert span.parent is not None
    assert f"{span.context.trace_id:032x}" == TRACE_ID
    return f"{span.context.span_id:016x}", f"{span.parent.span_id:016x}"


def traces_in(transport: Any) -> list[str]:
    """Return the traceparent of each record that carries one."""
    found = [trace_context_of(data) for _, data in stored(transport, STREAM)]
    return [each["traceparent"] for each in found if each]


async def test_a_span_is_the_clients_child_and_the_parent_of_what_reads_the_record(spans):
    transport = kinesis()
    async with gateway_of(transport, tenants(), opentelemetry_traces=True) as gateway:
        fields = {"traceparent": TRACEPARENT, "tracestate": "vendor=1", "x-request-id": "mine.1"}
        answer = await Client(gateway, "traced").call("POST", PATH, OBJECT, headers={"content-type": JSON, **fields})
    assert answer.status == 202
    span = spans.only()
    span_id, parent_id = place_of(span)
    assert parent_id == PARENT_ID
    assert (span.name, span.kind) == ("POST /v1/streams/{stream}/records", SpanKind.SERVER)
    assert span.attributes == {
        "http.request.method": "POST",
        "http.route": "/v1/streams/{stream}/records",
        "http.response.status_code": 202,
        "client.address": "",
        "aws.kinesis.stream_name": STREAM,
        "kpl.tenant": "traced",
        "kpl.request_id": "mine.1",
    }
    assert span.status.status_code is StatusCode.UNSET
    assert span.start_time <= span.end_time
    ((_, data),) = stored(transport, STREAM)
    context = {"traceparent": f"00-{TRACE_ID}-{span_id}-01", "tracestate": "vendor=1"}
    assert data == b'{"a":1,' + json.dumps(context, separators=(",", ":"))[1:].encode()


async def test_each_request_of_a_connection_has_a_span_and_its_record_that_trace(spans):
    """The fast path: a new head, the cached head, the same with another trace, and several in one iteration."""
    transport = kinesis()
    async with gateway_of(transport, tenants(), opentelemetry_traces=True) as gateway:
        await Client(gateway, "plain").post({"partition_key": "k", "data": "first"})
        kind = protocol_of(gateway)
        lines = [line_to(gateway, kind) for _ in range(3)]
        for number in (1, 2):
            for line in lines:
                trace = f"traceparent: 00-{TRACE_ID}-{number:016x}-01"
                line.protocol.data_received(request(OBJECT, f"content-type: {JSON}", trace, tenant="traced"))
            await anyio.sleep(0.05)
        for line in lines:
            assert line.wire.said.count(b"HTTP/1.1 202") == 2
            line.protocol.connection_lost(None)
    found = [place_of(span) for span in spans.ended() if span.parent is not None]
    assert sorted(parent for _, parent in found) == [f"{number:016x}" for number in (1, 1, 1, 2, 2, 2)]
    assert sorted(traces_in(transport)) == sorted(f"00-{TRACE_ID}-{span_id}-01" for span_id, _ in found)


@pytest.mark.parametrize("key", ["nobody", None], ids=["wrong credentials", "no credentials"])
@pytest.mark.parametrize("samples_all", [False, True])
async def test_the_sampled_flag_of_a_client_without_verified_credentials_does_not_count(monkeypatch, key, samples_all):
    """A parent-based sampler, the default, then records nothing. One that samples all continues the trace."""
    spans, transport = Spans(ALWAYS_ON if samples_all else None), kinesis()
    monkeypatch.setattr(server_spans, "get_tracer_provider", lambda: spans.provider)
    async with gateway_of(transport, tenants(), opentelemetry_traces=True) as gateway:
        fields = {"content-type": JSON, "traceparent": TRACEPARENT}
        answer = await Client(gateway, key).call("POST", PATH, OBJECT, headers=fields)
    assert answer.status == (401 if key else 202)
    assert len(spans.ended()) == samples_all
    if samples_all:
        assert place_of(spans.only())[1] == PARENT_ID
        assert spans.only().attributes["http.response.status_code"] == answer.status
    assert [each[-2:] for each in traces_in(transport)] == ([] if key else ["01" if samples_all else "00"])


@pytest.mark.parametrize(("key", "flags"), [("traced", "01"), (None, "00")])
async def test_without_spans_a_record_carries_the_clients_own_place(key, flags):
    transport = kinesis()
    async with gateway_of(transport, tenants()) as gateway:
        for trace in (TRACEPARENT, "00-malformed", None):
            fields = {"content-type": JSON} | ({} if trace is None else {"traceparent": trace})
            await Client(gateway, key).call("POST", PATH, OBJECT, headers=fields)
    assert traces_in(transport) == [TRACEPARENT[:-2] + flags]


async def test_the_records_of_a_tenant_without_the_option_stay_as_they_are(spans):
    transport = kinesis()
    async with gateway_of(transport, tenants(), opentelemetry_traces=True) as gateway:
        await Client(gateway, "plain").call(
            "POST", PATH, OBJECT, headers={"content-type": JSON, "traceparent": TRACEPARENT}
        )
    assert stored(transport, STREAM) == [("k", b'{"a":1}')]
    assert place_of(spans.only())[1] == PARENT_ID


async def test_a_large_body_and_results_that_come_later_have_the_trace_too(spans):
    transport = kinesis()
    lines = b"\n".join([OBJECT] * 9_000)
    async with gateway_of(transport, tenants(), opentelemetry_traces=True) as gateway:
        await Client(gateway, "plain").post({"partition_key": "k", "data": "first"})
        line = line_to(gateway)
        for body, kind in ((lines, NDJSON), (OBJECT, JSON)):
            fields = f"content-type: {kind}", f"traceparent: {TRACEPARENT}"
            await line.hear(request(body, *fields, target=PATH + "?ack=delivered", tenant="traced"))
            await until(lambda: not line.protocol.is_answering())
        assert line.wire.said.count(b"HTTP/1.1 200") == 2
        line.protocol.connection_lost(None)
    found = [place_of(span)[0] for span in spans.ended() if span.parent is not None]
    assert [traces_in(transport).count(f"00-{TRACE_ID}-{span_id}-01") for span_id in found] == [9_000, 1]


async def test_otlp_and_the_kinesis_api_have_spans_and_their_records_stay(spans):
    transport = kinesis()
    logs = {"resourceLogs": [{"scopeLogs": [{"logRecords": [{"body": {"stringValue": "x"}}]}]}]}
    put = {"StreamName": STREAM, "PartitionKey": "k", "Data": "eyJhIjoxfQ=="}
    async with gateway_of(transport, tenants(), opentelemetry_traces=True) as gateway:
        trace = {"traceparent": TRACEPARENT}
        await Client(gateway, "traced").call(
            "POST", "/v1/logs", json.dumps(logs).encode(), headers={"content-type": JSON, **trace}
        )
        wire = {"content-type": "application/x-amz-json-1.1", "x-amz-target": "Kinesis_20131202.PutRecord", **trace}
        await Client(gateway).call("POST", "/", json.dumps(put).encode(), headers=wire)
    # The second client has no credentials.
    (span,) = spans.ended()
    assert (span.name, place_of(span)[1]) == ("POST /v1/{signal}", PARENT_ID)
    assert traces_in(transport) == []
    assert len(stored(transport, STREAM)) == 2


async def test_a_failure_of_the_gateway_is_an_error_of_its_span_and_a_clients_mistake_is_not(spans):
    transport = kinesis()
    async with gateway_of(transport, tenants(), opentelemetry_traces=True, record_ttl_ms=200) as gateway:
        client = Client(gateway, "traced")
        await client.post({"partition_key": "k", "data": "first"})
        assert (await client.post({"data": None})).status == 400
        transport.kinesis.faults.add(ErrorAnswer("AccessDeniedException"), When(operation="PutRecords"))
        assert (await client.post({"partition_key": "k", "data": "x"}, ack="delivered")).status == 502
    found = {span.attributes["http.response.status_code"]: span for span in spans.ended() if span.attributes}
    assert [found[status].status.status_code for status in (202, 400, 502)] == [
        *[StatusCode.UNSET] * 2,
        StatusCode.ERROR,
    ]
    assert found[502].attributes["error.type"] == "502"


async def test_the_span_of_a_request_without_an_answer_ends(spans, monkeypatch):
    async with gateway_of(kinesis(), tenants(), opentelemetry_traces=True) as gateway:
        monkeypatch.setattr(type(gateway.admission), "put_records", _fails)
        with pytest.raises(RuntimeError) as raised:
            await Client(gateway, "traced").call(
                "POST", PATH, b"x", headers={"content-type": "application/octet-stream"}
            )
    span = spans.only()
    assert (span.attributes["error.type"], span.status.status_code) == ("no answer", StatusCode.ERROR)
    assert f"tenant=traced stream={STREAM}" in raised.value.__notes__[0]


def _fails(*_: object, **__: object) -> None:
    message = "broken"
    raise RuntimeError(message)


async def test_a_span_processor_that_raises_costs_no_answer(spans, caplog):
    class Broken(SpanProcessor):
        def on_end(self, span: ReadableSpan) -> None:
            _fails(span)

    spans.provider.add_span_processor(Broken())
    transport = kinesis()
    async with gateway_of(transport, tenants(), opentelemetry_traces=True) as gateway:
        answer = await Client(gateway, "traced").post({"partition_key": "k", "data": {}})
    assert answer.status == 202
    assert len(stored(transport, STREAM)) == 1
    assert "the span of a request is lost" in caplog.text


async def test_spans_without_their_package_are_a_mistake_of_the_settings(monkeypatch):
    monkeypatch.setitem(sys.modules, "kpl_integrations.otel.server_spans", None)
    gateway: IngestGateway = gateway_of(kinesis(), tenants(), opentelemetry_traces=True)
    with pytest.raises(ConfigError, match=r"pip install 'kpl-integrations\[otel\]'"):
        await gateway.__aenter__()


def test_a_gateway_without_spans_does_not_import_opentelemetry(anyio_backend):
    program = (
        "import sys, anyio\n"
        "from tests.support.gateway_scene import Client, open_gateway\n"
        "async def main():\n"
        "    async with open_gateway() as gateway:\n"
        "        answer = await Client(gateway).post({'data': {}}, traceparent='00-1-2-01', x_request_id='a')\n"
        "        print(answer.status, 'opentelemetry' in sys.modules)\n"
        "anyio.run(main)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=30, check=False)
    assert done.stdout == "202 False\n", done.stderr
