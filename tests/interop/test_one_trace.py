"""One trace from an HTTP client through gateway, Kinesis and record to the Lambda function of the examples."""

import re
import runpy
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import boto3
import httpx
import pytest
from opentelemetry import trace
from opentelemetry.propagate import inject
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind

from kpl_integrations.ingest.tenants import Tenant
from kpl_integrations.otel import server_spans
from tests.interop.emulators import Emulator
from tests.interop.lambda_service import EventSourceMapping, records_of
from tests.interop.test_lambda import ACCESS, EXAMPLE, ROOT
from tests.support.gateway_scene import KnownTenants
from tests.support.processes import CREDENTIALS
from tests.support.running_gateway import running_gateway

PAGE = ROOT / "docs" / "howto" / "traces.md"
STREAM = "orders"


class Services:
    """Tracer providers of several services, whose spans come together."""

    def __init__(self) -> None:
        self._made = InMemorySpanExporter()
        self._providers: list[TracerProvider] = []

    def provider(self, name: str) -> TracerProvider:
        provider = TracerProvider(resource=Resource({"service.name": name}), shutdown_on_exit=False)
        provider.add_span_processor(SimpleSpanProcessor(self._made))
        self._providers.append(provider)
        return provider

    def shutdown(self) -> None:
        for provider in self._providers:
            provider.shutdown()

    def trees(self) -> list[str]:
        """Return each trace as lines: the service and the name of each span, below its parent."""
        spans = sorted(self._made.get_finished_spans(), key=lambda span: span.start_time or 0)
        ids = {span.context.span_id for span in spans if span.context is not None}
        roots = [span for span in spans if span.parent is None or span.parent.span_id not in ids]
        return ["\n".join(_lines(root, spans, 0)) for root in roots]

    def traces(self) -> set[int]:
        return {span.context.trace_id for span in self._made.get_finished_spans() if span.context is not None}


def _lines(span: ReadableSpan, spans: list[ReadableSpan], depth: int) -> Iterator[str]:
    assert span.context is not None
    found = span.attributes or {}
    named = {"tenant": "kpl.tenant", "stream": "aws.kinesis.stream_name"}
    known = [f"{name}={found[key]!s}" for name, key in named.items() if key in found]
    status = [str(found["http.response.status_code"])] if "http.response.status_code" in found else []
    service = str(span.resource.attributes["service.name"])
    yield "  " * depth + " ".join([service, span.name, f"({span.kind.name.lower()})", *status, *known])
    for child in spans:
        if child.parent is not None and child.parent.span_id == span.context.span_id:
            yield from _lines(child, spans, depth + 1)


@pytest.fixture
def services(monkeypatch: pytest.MonkeyPatch) -> Iterator[Services]:
    made = Services()
    gateway = made.provider("gateway")
    monkeypatch.setattr(server_spans, "get_tracer_provider", lambda: gateway)
    yield made
    made.shutdown()


@pytest.fixture
def function(moto: Emulator, monkeypatch: pytest.MonkeyPatch, services: Services) -> Iterator[dict[str, Any]]:
    """Load the example, whose `store` is traced as the page says."""
    table = f"orders-{uuid.uuid4()}"
    variables = {"AWS_ENDPOINT_URL_DYNAMODB": moto.endpoint_url, "ORDERS_TABLE": table, **CREDENTIALS}
    for variable, value in variables.items():
        monkeypatch.setenv(variable, value)
    dynamodb = boto3.client("dynamodb", endpoint_url=moto.endpoint_url, **ACCESS)  # type: ignore[call-overload]
    key = [{"AttributeName": "id", "KeyType": "HASH"}], [{"AttributeName": "id", "AttributeType": "S"}]
    dynamodb.create_table(TableName=table, KeySchema=key[0], AttributeDefinitions=key[1], BillingMode="PAY_PER_REQUEST")
    module = runpy.run_path(str(EXAMPLE))
    lambda_provider = services.provider("lambda")
    monkeypatch.setattr(trace, "get_tracer", lambda_provider.get_tracer)
    _trace_stores(module, PAGE)
    yield {**module, "items": lambda: dynamodb.scan(TableName=table)["Items"]}
    dynamodb.delete_table(TableName=table)


def _trace_stores(module: dict[str, Any], page: Path) -> None:
    """Do what the page says: `store = traced(store)`."""
    (code,) = [code for code in re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL) if "def traced" in code]
    found: dict[str, Any] = {}
    exec(compile(code, str(page), "exec"), found)  # noqa: S102 - the page's own code
    module["handler"].__globals__["store"] = found["traced"](module["store"])


def test_one_trace_leads_from_an_http_client_to_a_lambda_function(services: Services, function: dict[str, Any]) -> None:
    tracer = services.provider("shop").get_tracer("shop")
    tenants = KnownTenants(Tenant(id="shop", trace_records=True))
    with running_gateway(tenants, {STREAM: 1}, opentelemetry_traces=True) as gateway, httpx.Client() as client:
        for number in ("41", "42"):
            with (
                tracer.start_as_current_span("place order"),
                tracer.start_as_current_span("POST", kind=SpanKind.CLIENT),
            ):
                fields = {"authorization": "Bearer shop", "x-request-id": f"order-{number}"}
                inject(fields)
                url = f"{gateway.url}/v1/streams/{STREAM}/records?ack=delivered"
                order = {"partition_key": "ada", "data": {"id": number, "total": 12.50}}
                answer = client.post(url, json=order, headers=fields)
            assert (answer.status_code, answer.headers["x-request-id"]) == (200, fields["x-request-id"])
        kinesis = boto3.client("kinesis", endpoint_url=gateway.kinesis.endpoint_url, **ACCESS)  # type: ignore[call-overload]
        (records,) = records_of(kinesis, STREAM).values()
    mapping = EventSourceMapping(lambda event: function["handler"](event, None))
    mapping.read(records)
    assert not mapping.discarded

    stored = {item["id"]["S"]: item["data"]["B"] for item in function["items"]()}
    assert sorted(stored) == ["41", "42"]
    for number, data in stored.items():
        assert data.startswith(f'{{"id":"{number}","total":12.5,"traceparent":"00-'.encode())
    (tree,) = set(services.trees())
    assert len(services.traces()) == 2
    assert f"```text\n{tree}\n```" in PAGE.read_text(), f"the page should show:\n{tree}"
