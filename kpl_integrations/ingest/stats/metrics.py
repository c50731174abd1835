"""`/metrics`: the metrics of the producer and of the gateway. No label is a tenant or a name that a client invents."""

from collections.abc import Iterable, Iterator
from typing import Final

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from prometheus_client.metrics_core import Metric as Family
from prometheus_client.registry import Collector

from kpl_core import Fact
from kpl_integrations.ingest.open_gateway import OpenGateway
from kpl_integrations.metrics.catalogue import METRICS
from kpl_integrations.metrics.prometheus import PrometheusMetrics
from kpl_integrations.metrics.sources import (
    breaker_source,
    dead_letter_source,
    producer_source,
    spool_source,
    tenant_wait_source,
)

EXPOSITION_TYPE: Final = CONTENT_TYPE_LATEST


class GatewayMetrics(Collector):
    """The registry of one gateway, read at each scrape. It is created before the producer, which needs `hook`."""

    def __init__(self) -> None:
        self._opened: OpenGateway | None = None
        self._producer_metrics = PrometheusMetrics(CollectorRegistry())
        self._producer_metrics.registry.register(self)

    def hook(self, fact: Fact) -> None:
        """Record one fact of the producer; a hook."""
        self._producer_metrics(fact)

    def watch(self, opened: OpenGateway) -> None:
        """Read the figures of this gateway and its producer at every scrape."""
        self._opened = opened
        producer = opened.producer
        self._producer_metrics.watch(producer_source(producer))
        self._producer_metrics.watch(breaker_source(producer.breakers))
        self._producer_metrics.watch(
            tenant_wait_source(lambda: {flow or "": wait for flow, wait in producer.waits_by_flow().items()})
        )
        if producer.spool is not None:
            self._producer_metrics.watch(spool_source(producer.spool))
        if producer.dead_letters is not None:
            self._producer_metrics.watch(dead_letter_source(producer.dead_letters))

    def families(self) -> Iterable[Family]:
        """Return the metrics of a scrape."""
        return self._producer_metrics.registry.collect()

    def describe(self) -> Iterable[Family]:
        """Return nothing, so that the registry does not read the gateway for the names."""
        return ()

    def collect(self) -> Iterator[Family]:
        """Yield the gateway's own metrics; the registry calls this."""
        opened = self._opened
        if opened is None:
            return
        requests = _counter("kinesis_ingest_requests_total")
        for status, count in sorted(opened.answers.items()):
            requests.add_metric([str(status)], count)
        rejected = _counter("kinesis_ingest_rejected_total")
        for refusal, count in sorted(opened.refusals.items(), key=lambda each: each[0].value):
            rejected.add_metric([refusal.value.replace(" ", "_")], count)
        tenants = opened.producer.waiting_by_flow()
        waiting = sum(records for records, _ in tenants.values())
        yield from (requests, rejected, _gauge("kinesis_ingest_waiting_records", waiting))
        yield _gauge("kinesis_ingest_waiting_tenants", len(tenants))
        yield _gauge("kinesis_ingest_open", float(opened.admission.state == "open"))


def _counter(name: str) -> CounterMetricFamily:
    return CounterMetricFamily(name, METRICS[name].meaning, labels=METRICS[name].labels)


def _gauge(name: str, value: float) -> GaugeMetricFamily:
    return GaugeMetricFamily(name, METRICS[name].meaning, value)


class _CollectedFamilies(CollectorRegistry):
    """A registry of families that are already collected; `generate_latest` requires a registry."""

    def __init__(self, families: Iterable[Family]) -> None:
        super().__init__()
        self._families = families

    def collect(self) -> Iterable[Family]:
        """Return the families."""
        return self._families


def exposition(families: Iterable[Family]) -> bytes:
    """Return the body of the answer to a scrape."""
    return generate_latest(_CollectedFamilies(families))
