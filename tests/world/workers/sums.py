"""What several workers say together, beside what their clients heard, their hooks were told, and Kinesis stores."""

import asyncio
from collections import Counter
from collections.abc import Mapping, Sequence
from http import HTTPStatus

import msgspec
from prometheus_client.parser import text_string_to_metric_families

from kpl_integrations.gateway_figures import StatsDocument
from tests.support.gateway_scene import Answer, Client
from tests.world.gateway_story import ANSWERS, EXPECTED, OVER_RATE, may_be_stored
from tests.world.invariants import shown
from tests.world.workers.processes import WorkerProcess

ADMIN_KEY = "the administrator's key in this world"
# Of sums of seconds, which are added in any order.
ROUNDING = 1e-6


class Heard:
    """What the clients of all workers heard."""

    def __init__(self) -> None:
        # By status, of everything that was asked of any worker.
        self.answers: Counter[int] = Counter()
        # Why the quiet tenant was refused.
        self.titles: Counter[str] = Counter()
        # Data of records by what the client heard of their request; `unknown` of a request without an answer.
        self.acknowledged: list[bytes] = []
        self.delivered: list[bytes] = []
        self.refused: list[bytes] = []
        self.unknown: list[bytes] = []

    def take(self, tenant: str, answer: Answer, data: list[bytes]) -> bool:
        """Note an answer; return True if the records were accepted."""
        self.answers[answer.status] += 1
        if answer.status in {HTTPStatus.OK, HTTPStatus.ACCEPTED}:
            results = answer.json().get("records", [])
            failed = {index for index, result in enumerate(results) if "sequence_number" not in result}
            stored = [each for index, each in enumerate(data) if index not in failed]
            self.acknowledged += stored
            self.delivered += stored if results else []
            self.unknown += [data[index] for index in failed]
            return True
        if tenant == "quiet":
            self.titles[answer.json()["title"]] += 1
        if may_be_stored(answer) or answer.status not in {
            HTTPStatus.TOO_MANY_REQUESTS,
            HTTPStatus.SERVICE_UNAVAILABLE,
        }:
            # It was accepted, and not delivered in time.
            self.unknown += data
        return False


class Sums:
    """The sums that workers show: each is complete, and none falls."""

    def __init__(self, heard: Heard) -> None:
        self.heard = heard
        self.deaths = 0
        self.false: list[str] = []
        # Of each count of the document, and of each counter of the metrics.
        self._highest_counts: dict[str, float] = {}
        self._highest_counters: dict[str, float] = {}

    async def ask(self, process: WorkerProcess) -> StatsDocument | None:
        """Ask a worker for the sum; None if it crashed meanwhile."""
        answer = await self.get(process, "/v1/stats")
        if answer is None:
            return None
        stats = msgspec.json.decode(answer.body, type=StatsDocument)
        self._compare(self._highest_counts, _counts_of(stats))
        return stats

    async def scrape(self, process: WorkerProcess) -> str | None:
        """Ask a worker for the metrics; None if it crashed meanwhile."""
        answer = await self.get(process, "/metrics")
        if answer is None:
            return None
        metrics = answer.body.decode()
        self._compare(self._highest_counters, _counters_of(metrics))
        return metrics

    def _compare(self, highest: dict[str, float], counts: Mapping[str, float]) -> None:
        """Note the counts that are below what a worker showed before."""
        fallen = {
            name: (most, counts.get(name, 0.0))
            for name, most in highest.items()
            if counts.get(name, 0.0) < most - ROUNDING
        }
        if fallen:
            self.false.append(f"a sum has fallen: {fallen}")
        highest |= {name: max(count, highest.get(name, 0.0)) for name, count in counts.items()}

    async def get(self, process: WorkerProcess, path: str) -> Answer | None:
        """Return a worker's answer to the administrator; None if it crashed meanwhile."""
        if process.gateway is None:
            return None
        asking = process.call(Client(process.gateway, ADMIN_KEY).get(path))
        _ = await asyncio.wait({asking})
        if asking.cancelled():
            return None
        answer: Answer = asking.result()
        self.heard.answers[answer.status] += 1
        return answer

    async def exact(
        self, serving: Sequence[WorkerProcess], finished: Mapping[str, int], *, has_spool: bool
    ) -> list[str]:
        """Return what is false of the sums when nothing is under way."""
        false: list[str] = []
        metrics, heard = await self.scrape(serving[0]), Counter(self.heard.answers)
        stats = await self.ask(serving[-1])
        assert stats is not None
        assert metrics is not None
        records = stats.records
        if not has_spool and records.delivered != finished["delivered"]:
            false.append(f"{records.delivered} delivered in the sum, {finished['delivered']} told to hooks")
        if self.deaths:
            return false
        false += _same(metrics, stats, heard)
        accepted = sum(each.accepted_records for each in stats.tenants.values())
        if records.lost or records.accepted != accepted:
            false.append(f"no worker died: {records}, {accepted} accepted of tenants")
        return false

    def final(self, last: StatsDocument, stored_copies: Sequence[bytes]) -> list[str]:
        """Return what is false of the sum after the close, beside what Kinesis stores of all gateways."""
        false, records = list[str](), last.records
        own = {*self.heard.acknowledged, *self.heard.unknown}
        copies = [data for data in stored_copies if data in own]
        stored = {*stored_copies}
        if missing := [data for data in self.heard.delivered if data not in stored]:
            false.append(f"acknowledged as delivered and not stored: {shown(missing)}")
        if ghosts := [data for data in self.heard.refused if data in stored]:
            false.append(f"refused and stored: {shown(ghosts)}")
        gone = sum(data not in stored for data in self.heard.acknowledged)
        told = records.lost + sum(records.failed.values()) + records.spooled + records.dead_lettered
        if gone > told:
            false.append(f"{gone} acknowledged records are nowhere, and the sum says {records}")
        # A record whose row outlived its delivery is delivered, and counted, once more by the next process.
        if records.delivered > len(copies):
            false.append(f"{records.delivered} delivered in the sum, {len(copies)} stored")
        acknowledged, unknown = len(self.heard.acknowledged), len(self.heard.unknown)
        # Kinesis stored these, and the worker died before it read the answer.
        uncounted = max(0, len(copies) - records.delivered)
        if records.lost > gone + unknown + uncounted:
            false.append(f"{records.lost} lost in the sum; {gone} are nowhere, {unknown} unknown, {uncounted} stored")
        repeated = len(copies) - len({*copies})
        if not acknowledged <= records.accepted <= acknowledged + unknown + repeated:
            false.append(f"{acknowledged} acknowledged, {unknown} unknown, {records.accepted} accepted in the sum")
        if not self.heard.answers.keys() <= ANSWERS:
            false.append(f"clients were answered {dict(self.heard.answers)}")
        if wrongly := {
            title: count for title, count in self.heard.titles.items() if title not in EXPECTED - {OVER_RATE}
        }:
            false.append(f"the quiet tenant was refused: {wrongly}")
        return false


def _same(metrics: str, stats: StatsDocument, heard: Mapping[int, int]) -> list[str]:
    """The metrics and the document say what clients heard."""
    counts: Counter[tuple[str, str]] = Counter()
    for family in text_string_to_metric_families(metrics):
        for sample in family.samples:
            label = next((sample.labels[name] for name in ("outcome", "code", "reason") if name in sample.labels), "")
            counts[sample.name, label] += int(sample.value)
    records = stats.records
    said = {
        "kinesis_producer_accepted_records_total": {"": records.accepted},
        "kinesis_producer_kept_records": {"": records.spooled + records.dead_lettered},
        "kinesis_producer_outstanding_records": {"": records.buffered},
        "kinesis_producer_records_total": {"delivered": records.delivered, "failed": sum(records.failed.values())},
        "kinesis_ingest_rejected_total": {name.replace(" ", "_"): count for name, count in stats.refusals.items()},
        # The answer with the metrics was not sent before them.
        "kinesis_ingest_requests_total": {str(status): count - (status == 200) for status, count in heard.items()},
    }
    false = [
        f"{metric} {label} is {counts[metric, label]}, and {count} happened"
        for metric, labels in said.items()
        for label, count in labels.items()
        if counts[metric, label] != count
    ]
    answers = {str(status): count for status, count in sorted(heard.items()) if count}
    if {status: count for status, count in stats.answers.items() if count} != answers:
        false.append(f"the sum has the answers {stats.answers}, clients heard {answers}")
    return false


def _counts_of(stats: StatsDocument) -> dict[str, float]:
    """Return every count of the document that may not fall."""
    records = stats.records
    counts: dict[str, float] = {"accepted": records.accepted, "delivered": records.delivered, "lost": records.lost}
    counts |= {f"failed {reason}": count for reason, count in records.failed.items()}
    counts |= {f"answers {status}": count for status, count in stats.answers.items()}
    counts |= {f"refusals {reason}": count for reason, count in stats.refusals.items()}
    for tenant, each in stats.tenants.items():
        counts |= {f"{tenant}: requests": each.requests, f"{tenant}: accepted": each.accepted_records}
        counts |= {f"{tenant}: refused {reason}": count for reason, count in each.refused.items()}
    return counts


def _counters_of(metrics: str) -> dict[str, float]:
    """Return every counter of the metrics, and the counts and sums of every histogram."""
    return {
        f"{sample.name} {sample.labels}": sample.value
        for family in text_string_to_metric_families(metrics)
        if family.type in {"counter", "histogram", "summary"}
        for sample in family.samples
    }
