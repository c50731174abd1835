"""The invariant, read from the text that Prometheus scrapes and from nothing else."""

import re

from kpl_core import Producer
from kpl_integrations.metrics.prometheus import PrometheusMetrics
from kpl_integrations.metrics.sources import producer_source

__all__ = ["Scrape", "watched"]


class Scrape:
    """One exposition."""

    def __init__(self, source: PrometheusMetrics | str) -> None:
        self.text = source if isinstance(source, str) else source.exposition()[0].decode()

    def total(self, name: str, **labels: str) -> float:
        """The sum of a metric over all series with these labels."""
        total = 0.0
        for found, value in re.findall(rf"^kinesis_producer_{name}(?:\{{(.*)\}})? (\S+)$", self.text, re.MULTILINE):
            if all(f'{label}="{wanted}"' in found for label, wanted in labels.items()):
                total += float(value)
        return total

    def assert_invariant(self) -> None:
        delivered, failed = (self.total("records_total", outcome=name) for name in ("delivered", "failed"))
        spooled, dead = (self.total("kept_records", place=name) for name in ("spooled", "dead_lettered"))
        outstanding = self.total("outstanding_records")
        assert self.total("accepted_records_total") == delivered + failed + spooled + dead + outstanding, self.text


def watched(producer: Producer, metrics: PrometheusMetrics) -> PrometheusMetrics:
    metrics.watch(producer_source(producer))
    return metrics
