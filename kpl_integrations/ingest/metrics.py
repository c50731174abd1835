"""`/metrics`: the producer's, and the gateway's own beside them. No label is a tenant or a stream's invented name."""

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric as Family
from prometheus_client.registry import Collector

from kpl_core import Fact, Producer
from kpl_integrations.metrics.gateway_sources import tenant_wait_source
from kpl_integrations.metrics.prometheus import PrometheusMetrics
from kpl_integrations.metrics.sources import breaker_source, dead_letter_source, producer_source, spool_source

if TYPE_CHECKING:
    from kpl_integrations.ingest.gateway import IngestGateway

__all__ = ["GatewayMetrics"]


class GatewayMetrics(Collector):
    """A registry of its own, read when somebody scrapes."""

    def __init__(self, gateway: "IngestGateway") -> None:
        self._gateway = gateway
        self._producer_metrics = PrometheusMetrics(CollectorRegistry())
        self._producer_metrics.registry.register(self)

    def hook(self, fact: Fact) -> None:
        """Take note of one fact of the producer."""
        self._producer_metrics(fact)

    def watch(self, producer: Producer) -> None:
        """Read what the producer keeps at every scrape."""
        self._producer_metrics.watch(producer_source(producer))
        self._producer_metrics.watch(breaker_source(producer.breakers))
        self._producer_metrics.watch(
            tenant_wait_source(lambda: {flow or "": wait for flow, wait in producer.waits_by_flow().items()})
        )
        if producer.spool is not None:
            self._producer_metrics.watch(spool_source(producer.spool))
        if producer.dead_letters is not None:
            self._producer_metrics.watch(dead_letter_source(producer.dead_letters))

    def exposition(self) -> tuple[bytes, str]:
        """Return body and content type of the answer to a scrape."""
        return self._producer_metrics.exposition()

    def families(self) -> Iterable[Family]:
        """Return what a scrape would say, as values."""
        return self._producer_metrics.registry.collect()

    def describe(self) -> Iterable[Family]:
        """Return nothing: the registry need not read the gateway to learn the names."""
        return ()

    def collect(self) -> Iterator[Family]:
        """Yield the gateway's own; the registry calls it."""
        gateway = self._gateway
        requests = CounterMetricFamily("kinesis_ingest_requests_total", "Requests answered.", labels=["code"])
        for status, count in sorted(gateway.answers.items()):
            requests.add_metric([str(status)], count)
        rejected = CounterMetricFamily(
            "kinesis_ingest_rejected_total", "Requests refused, by row of the admission table.", labels=["reason"]
        )
        for refusal, count in sorted(gateway.refusals.items(), key=lambda each: each[0].value):
            rejected.add_metric([refusal.value.replace(" ", "_")], count)
        waiting = GaugeMetricFamily("kinesis_ingest_waiting_records", "User records in the fair queue.")
        tenants = gateway.producer.waiting_by_flow()
        waiting.add_metric([], sum(records for records, _ in tenants.values()))
        flows = GaugeMetricFamily("kinesis_ingest_waiting_tenants", "Tenants with records in the fair queue.")
        flows.add_metric([], len(tenants))
        is_open = GaugeMetricFamily("kinesis_ingest_open", "1 while requests are taken and the gateway is ready.")
        is_open.add_metric([], float(gateway.intake.state == "open"))
        yield from (requests, rejected, waiting, flows, is_open)
