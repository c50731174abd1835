"""Facts to measure, the text that Prometheus scrapes, and the queries of the dashboard and the alerts."""

import json
import re
from pathlib import Path
from typing import Any

from kpl_core import Producer
from kpl_core.hooks import RecordsFinished, RequestCompleted
from kpl_integrations.metrics.prometheus import PrometheusMetrics
from kpl_integrations.metrics.sources import producer_source

OBSERVABILITY = Path(__file__).parents[2] / "docs" / "observability"
NAME = re.compile(r"\b((?:kinesis|token_bucket)_[a-z_]+)")
THROTTLED = "ProvisionedThroughputExceededException"
EXPIRED: dict[str, Any] = {"outcome": "failed", "reason": "Expired", "user_records": 5, "user_bytes": 200}


class Scrape:
    """One exposition, and the invariant read from it and from nothing else."""

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


def request(stream: str = "orders", shard: str = "shardId-0", **facts: Any) -> RequestCompleted:
    """Return the fact of a request with throttled records."""
    known: dict[str, Any] = {
        "stream": stream,
        "started_at": 1.0,
        "ended_at": 1.25,
        "kinesis_records": 4,
        "user_records": 80,
        "size_bytes": 4_000,
        "error_code": None,
        "record_errors": {THROTTLED: 2},
        "throttled_by_shard": {shard: 2},
        "queue_wait": 0.1,
        "errors_by_shard": {(shard, THROTTLED): 2},
    }
    return RequestCompleted(**{**known, **facts})


def finished(stream: str = "orders", shard: str = "shardId-0", **facts: Any) -> RecordsFinished:
    """Return the fact of 20 delivered user records."""
    known: dict[str, Any] = {
        "stream": stream,
        "shard_id": shard,
        "tier": "normal",
        "outcome": "delivered",
        "reason": "",
        "user_records": 20,
        "user_bytes": 900,
        "attempts": 3,
        "age": 0.5,
        "kinesis_bytes": 1_000,
    }
    return RecordsFinished(**{**known, **facts})


def dashboard_expressions() -> list[str]:
    """Return the queries of every panel."""
    panels = json.loads((OBSERVABILITY / "grafana-dashboard.json").read_text())["panels"]
    return [target["expr"] for panel in panels for target in panel.get("targets", ())]


def alert_expressions() -> list[str]:
    """Return the query of every alert."""
    text = (OBSERVABILITY / "alerts.yml").read_text()
    return re.findall(r"^ +expr: (.+)$", text, re.MULTILINE)
