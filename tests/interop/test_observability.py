"""Metrics in independent systems: Debian's Prometheus, really scraping, and moto's CloudWatch."""

import http.server
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from botocore.session import get_session

from kpl_core import BreakerPolicy, Config, DeadLetterOptions, Producer, SpoolOptions
from kpl_core.hooks import CoordinatorMet, ShardRateChanged
from kpl_core.testing import FakeKinesis, FakeTransport
from kpl_integrations.logging_handler import KinesisHandler
from kpl_integrations.metrics.cloudwatch import KPL_METRICS, CloudWatchMetrics
from kpl_integrations.metrics.cloudwatch_uploader import CloudWatchUploader
from kpl_integrations.metrics.metrics_hook import Sample
from kpl_integrations.metrics.prometheus import PrometheusMetrics
from kpl_integrations.metrics.sources import (
    breaker_source,
    coordinator_source,
    dead_letter_source,
    log_handler_source,
    outbox_source,
    producer_source,
    request_source,
    spool_source,
    spool_state_source,
    telemetry_source,
    tenant_wait_source,
    token_bucket_source,
)
from kpl_integrations.otel.sender import ExportCounts
from tests.interop.emulators import Emulator
from tests.support.metrics import (
    EXPIRED,
    NAME,
    alert_expressions,
    dashboard_expressions,
    finished,
    request,
)
from tests.support.processes import LOOPBACK
from tests.support.prometheus_server import asked, needs_prometheus, prometheus
from tests.support.waiting import wait_until

TENANTS = 10_000


class Limiter:
    def get_metrics(self):
        return {"tokens_available": 3.5, "total_rejections": 2, "total_refills": 9}


@contextmanager
def served(metrics: PrometheusMetrics) -> Iterator[str]:
    """Yield the URL at which `metrics` can be scraped."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body, content_type = metrics.exposition()
            self.send_response(200)
            self.send_header("Content-Type", content_type)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            """Log nothing."""

    with http.server.ThreadingHTTPServer((LOOPBACK, 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"{LOOPBACK}:{server.server_address[1]}"
        finally:
            server.shutdown()
            thread.join()


async def used(metrics: PrometheusMetrics, place: Path) -> None:
    """Let one producer deliver and spool, and another store dead letters; their metrics remain afterwards."""
    kinesis = FakeKinesis({"orders": 2})
    spooling = Config(spool=SpoolOptions(path=place / "spool.db"), breaker=BreakerPolicy())
    async with Producer(spooling, transport=FakeTransport(kinesis), hooks=[metrics]) as producer:
        metrics.watch(producer_source(producer))
        metrics.watch(breaker_source(producer.breakers))
        assert producer.spool is not None
        metrics.watch(spool_source(producer.spool))
        assert producer.spool_state is not None
        metrics.watch(spool_state_source(producer.spool_state))
        for number in range(500):
            _ = await producer.put("orders", partition_key=str(number), data=b"data")
        _ = await producer.put("missing", partition_key="k", data=b"nobody has this stream")
        await producer.flush(10)
    with_letters = Config(dead_letters=DeadLetterOptions(path=place / "letters.db"))
    async with Producer(with_letters, transport=FakeTransport(kinesis), hooks=[metrics]) as producer:
        assert producer.dead_letters is not None
        metrics.watch(dead_letter_source(producer.dead_letters))
        _ = await producer.put("missing", partition_key="k", data=b"nobody has this stream")
        await producer.flush(10)


@needs_prometheus
@pytest.mark.anyio
async def test_a_real_prometheus_has_every_name_of_the_dashboard_and_bounded_tenants(
    logs: Path, tmp_path: Path
) -> None:
    metrics = PrometheusMetrics()
    await used(metrics, tmp_path)
    metrics(request())
    metrics(ShardRateChanged("orders", "shardId-0", 0.5))
    metrics(CoordinatorMet("worker-1", "leased", 1.0, "slow"))
    metrics.watch(token_bucket_source(Limiter()))
    metrics.watch(request_source(lambda: {202: 5, 429: 1}, lambda: {"over_quota": 1}))
    metrics.watch(tenant_wait_source(lambda: {f"tenant-{number}": float(number) for number in range(TENANTS)}))
    metrics.watch(coordinator_source(lambda: 1.0, lambda: {"orders": 0.25}))
    metrics.watch(log_handler_source(KinesisHandler("logs", region="us-east-1").counts))
    exported = ExportCounts(exported=3, delivered=2, lost={"Expired": 1}, pending=0)
    metrics.watch(telemetry_source(lambda: {"traces": exported}))
    metrics.watch(outbox_source({404: 2}))
    # Metrics that only a gateway has.
    alone = [
        "waiting_records",
        "waiting_tenants",
        "open",
        "workers",
        "lost_records",
        "paused_connections",
        "read_pauses_total",
        "certificate_days_left",
    ]
    metrics.watch(lambda: [Sample("kinesis_ingest_part", ("spool", "degraded"), 1.0)])
    metrics.watch(lambda: [Sample("kinesis_ingest_worker_silent_seconds", ("0",), 0.5)])
    metrics.watch(lambda: [Sample(f"kinesis_ingest_{name}", (), 1.0) for name in alone])
    with served(metrics) as target, prometheus(target, logs) as url:
        wait_until(
            # Rates need several scrapes.
            lambda: (
                [each["value"][1] for each in asked(url, "query", query="count_over_time(up[1m])")["result"]] >= ["4"]
            ),
            lambda: "four scrapes",
        )
        stored = set(asked(url, "label/__name__/values"))
        wanted = {
            name for expression in [*dashboard_expressions(), *alert_expressions()] for name in NAME.findall(expression)
        }
        assert wanted <= stored, wanted - stored
        for expression in dashboard_expressions():
            query = expression.replace("$__rate_interval", "10s").replace("$job", ".*")
            assert asked(url, "query", query=query)["result"], query
        (tenants,) = asked(url, "query", query="count(kinesis_ingest_tenant_wait_seconds)")["result"]
        assert tenants["value"][1] == "21"
        (group,) = asked(url, "rules")["groups"]
        assert {rule["health"] for rule in group["rules"]} <= {"ok", "unknown"}
        assert len(group["rules"]) == len(alert_expressions())


def test_cloudwatch_has_the_kpls_names_dimensions_and_units(moto: Emulator) -> None:
    client = get_session().create_client("cloudwatch", region_name="us-east-1", endpoint_url=moto.endpoint_url)
    metrics = CloudWatchMetrics()
    with CloudWatchUploader(metrics, region="us-east-1", endpoint_url=moto.endpoint_url, namespace="interop"):
        for stream in ("orders", "clicks"):
            for shard in ("shardId-0", "shardId-1"):
                for fact in (request(stream, shard), finished(stream, shard), finished(stream, shard, **EXPIRED)):
                    metrics(fact)
    stored = client.get_paginator("list_metrics").paginate(Namespace="interop").build_full_result()["Metrics"]
    places: dict[str, set[tuple[tuple[str, str], ...]]] = {}
    for metric in stored:
        dimensions = tuple((each["Name"], each["Value"]) for each in metric["Dimensions"])
        places.setdefault(metric["MetricName"], set()).add(tuple(sorted(dimensions)))
    # Received and pending are read from a producer, which is missing here.
    assert set(places) == set(KPL_METRICS) - {"UserRecordsReceived", "UserRecordsPending"}
    for name, found in places.items():
        per_code = 1 if name == "ErrorsByCode" else 0
        assert len(found) == (7 if KPL_METRICS[name].finest == "shard" else 3) + per_code, name
    for name, metric in KPL_METRICS.items():
        if name in places:
            (point,) = client.get_metric_statistics(  # type: ignore[attr-defined, unused-ignore] # created at run time
                Namespace="interop",
                MetricName=name,
                Dimensions=[],
                StartTime=datetime.now(tz=UTC) - timedelta(minutes=10),
                EndTime=datetime.now(tz=UTC) + timedelta(minutes=10),
                Period=3_600,
                Statistics=["Sum", "SampleCount"],
            )["Datapoints"]
            assert point["Unit"] == metric.unit, name
