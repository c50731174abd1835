"""Facts become values with the right names; the number of series is bounded."""

from pathlib import Path

import pytest
from msgspec import structs

from kpl_core.durability.circuit_breaker import CircuitBreaker
from kpl_core.durability.dead_letters import DeadLetterQueue
from kpl_core.durability.spool import Spool, SpoolOptions
from kpl_core.hooks import (
    CoordinatorMet,
    Fact,
    RecordsFinished,
    RequestCompleted,
    ShardMapRefreshed,
    ShardRateChanged,
    ShareChanged,
)
from kpl_core.pipeline.intake.write_ahead import SpoolState
from kpl_integrations.metrics.catalogue import METRICS
from kpl_integrations.metrics.in_memory import InMemoryMetrics
from kpl_integrations.metrics.prometheus import PrometheusMetrics
from kpl_integrations.metrics.sources import (
    breaker_source,
    dead_letter_source,
    spool_source,
    spool_state_source,
    token_bucket_source,
)
from tests.support.durability_scene import spooled

REQUEST = RequestCompleted(
    stream="orders",
    started_at=10.0,
    ended_at=10.25,
    kinesis_records=4,
    user_records=200,
    size_bytes=20_000,
    error_code=None,
    record_errors={"ProvisionedThroughputExceededException": 3},
    throttled_by_shard={"shardId-000000000001": 2, "": 1},
)
DELIVERED = RecordsFinished(
    stream="orders",
    shard_id="shardId-000000000001",
    tier="normal",
    outcome="delivered",
    reason="",
    user_records=50,
    user_bytes=1024 * 1024,
    attempts=2,
    age=0.3,
)


def failed(*, reason: str = "Expired", tier: str = "bulk", records: int = 7) -> RecordsFinished:
    return RecordsFinished(
        stream="orders",
        shard_id=None,
        tier=tier,
        outcome="failed",
        reason=reason,
        user_records=records,
        user_bytes=70,
        attempts=1,
        age=30.0,
    )


def test_finished_records_are_counted_by_outcome_reason_and_tier() -> None:
    metrics = InMemoryMetrics()
    for fact in (DELIVERED, DELIVERED, failed(), failed(reason="AccessDeniedException", tier="critical")):
        metrics(fact)
    assert metrics.value("kinesis_producer_records_total") == 114
    assert metrics.value("kinesis_producer_records_total", outcome="delivered") == 100
    assert metrics.value("kinesis_producer_records_total", outcome="failed", reason="Expired", tier="bulk") == 7
    assert metrics.value("kinesis_producer_bytes_total", outcome="failed") == 140
    assert metrics.observations("kinesis_producer_attempts") == [2, 2, 1, 1]
    assert metrics.observations("kinesis_producer_delivery_seconds") == [0.3, 0.3, 30.0, 30.0]


def test_a_request_records_its_duration_its_ratio_and_its_throttled_records_by_shard() -> None:
    metrics = InMemoryMetrics()
    metrics(REQUEST)
    assert metrics.observations("kinesis_producer_send_duration_seconds", "answered") == [0.25]
    assert metrics.observations("kinesis_producer_aggregation_ratio") == [50.0]
    name = "kinesis_producer_throttled_records_total"
    assert metrics.value(name) == 3
    assert metrics.value(name, stream="orders", shard="shardId-000000000001") == 2
    assert metrics.value(name, shard="") == 1


def test_the_gauge_of_the_adaptive_rate_has_the_latest_value() -> None:
    metrics = InMemoryMetrics()
    metrics(ShardRateChanged("orders", "shardId-000000000000", 0.85))
    metrics(ShardRateChanged("orders", "shardId-000000000000", 0.7225))
    metrics(ShardMapRefreshed("orders", 4))
    assert metrics.value("kinesis_producer_shard_rate_limit", shard="shardId-000000000000") == 0.7225


def test_utilisation_is_the_used_share_of_the_shard_limit_over_ten_seconds() -> None:
    now = 100.0
    metrics = InMemoryMetrics(clock=lambda: now)
    for _ in range(5):
        metrics(DELIVERED)
    name = "kinesis_producer_shard_utilisation"
    assert metrics.value(name, stream="orders", shard="shardId-000000000001") == 0.5
    now = 109.9
    assert metrics.value(name) == 0.5
    now = 110.0
    assert metrics.value(name) == 0.0


def test_utilisation_counts_bytes_and_records_as_the_service_does() -> None:
    """Framing and keys count as bytes; a user record finished apart from its aggregated record is no Kinesis record."""
    name = "kinesis_producer_shard_utilisation"
    metrics = InMemoryMetrics(clock=lambda: 100.0)
    metrics(structs.replace(DELIVERED, user_bytes=1_000, kinesis_bytes=1024 * 1024))
    assert metrics.value(name) == pytest.approx(0.1)
    metrics = InMemoryMetrics(clock=lambda: 100.0)
    for _ in range(10_000):
        metrics(structs.replace(DELIVERED, user_records=1, user_bytes=100, kinesis_bytes=0))
    assert metrics.value(name) == pytest.approx(10_000 * 100 / (10 * 1024 * 1024))


def test_the_utilisation_of_other_is_that_of_its_busiest_shard() -> None:
    """The sum over 500 shards at 1 % is 5.0, for which KinesisShardFull fires."""
    metrics = InMemoryMetrics(clock=lambda: 100.0)
    for number in range(1_500):
        size = 500_000 if number == 1_200 else 100_000
        metrics(structs.replace(DELIVERED, shard_id=f"shardId-{number:012}", kinesis_bytes=size))
    name = "kinesis_producer_shard_utilisation"
    assert metrics.value(name, shard="shardId-000000000999") == pytest.approx(0.0095, rel=0.01)
    assert metrics.value(name, shard="other") == pytest.approx(0.0477, rel=0.01)


def test_shards_in_other_that_are_idle_are_forgotten() -> None:
    now = 100.0
    metrics = InMemoryMetrics(clock=lambda: now)
    for number in range(10_000):
        metrics(structs.replace(DELIVERED, shard_id=f"shardId-{number:012}"))
        now += 0.1
    kept = metrics._utilisation  # noqa: SLF001
    assert len(kept) <= 2_200
    metrics.samples()
    kept = metrics._utilisation  # noqa: SLF001
    assert 1_080 <= len(kept) <= 1_100
    assert ("orders", "shardId-000000000000") in kept


@pytest.mark.parametrize("label", ["reason", "shard"])
def test_label_values_above_the_bound_become_other(label: str) -> None:
    metrics = InMemoryMetrics()
    for number in range(2_000):
        if label == "reason":
            metrics(failed(reason=f"Error-{number}"))
        else:
            metrics(ShardRateChanged("orders", f"shardId-{number:012}", 0.5))
    name = "kinesis_producer_records_total" if label == "reason" else "kinesis_producer_shard_rate_limit"
    series = [sample for sample in metrics.samples() if sample.name == name]
    assert len(series) == (51 if label == "reason" else 1_001)
    if label == "reason":
        assert metrics.value(name) == 14_000
        assert metrics.value(name, reason="other") == 14_000 - 50 * 7


def test_an_unknown_label_raises_key_error() -> None:
    with pytest.raises(KeyError, match="tenant"):
        InMemoryMetrics().value("kinesis_producer_records_total", tenant="x")


def test_sources_are_read_on_demand(tmp_path: Path) -> None:
    metrics = InMemoryMetrics()
    breaker = CircuitBreaker()
    with Spool(SpoolOptions(path=tmp_path / "spool.db", commit_interval_ms=0.0)) as spool:
        queue = DeadLetterQueue(spool)
        metrics.watch(spool_source(spool))
        metrics.watch(dead_letter_source(queue))
        metrics.watch(breaker_source(lambda: {("orders", "shardId-000000000000"): breaker}))
        spool.append_nowait([spooled(1), spooled(2)], claim=True).result(20.0)
        queue.add_nowait([queue.letter(spooled(3), "ttl")]).result(20.0)
        breaker.record_outcomes(succeeded=0, failed=100, now=1.0)
        assert metrics.value("kinesis_producer_spool_records") == 2
        assert metrics.value("kinesis_producer_spool_bytes") == spool.statistics().record_bytes > 64
        assert metrics.value("kinesis_producer_dlq_depth") == 1
        assert metrics.value("kinesis_producer_dlq_records_total", reason="ttl") == 1
        assert metrics.value("kinesis_producer_breaker_state", stream="orders") == 2


class Limiter:
    def get_metrics(self) -> dict[str, float]:
        return {"tokens_available": 3.5, "total_rejections": 2, "total_refills": 9}


def test_a_token_bucket_limiter_is_a_source() -> None:
    metrics = InMemoryMetrics()
    metrics.watch(token_bucket_source(Limiter()))
    assert metrics.value("token_bucket_tokens_available") == 3.5
    assert metrics.value("token_bucket_rejections_total") == 2
    assert metrics.value("token_bucket_refill_events_total") == 9


def test_no_label_takes_unbounded_values_from_callers() -> None:
    # `tenant` has the twenty longest waits only; statuses, resources, parts, their states and workers are few.
    allowed = {"outcome", "place", "reason", "tier", "stream", "shard", "code", "tenant", "resource", "signal"}
    allowed |= {"part", "state", "worker"}
    for metric in METRICS.values():
        assert set(metric.labels) <= allowed


COORDINATION_FACTS: list[Fact] = [
    CoordinatorMet("w1", "leased", 2.5, ""),
    CoordinatorMet("w1", "expired", 12.0, "down"),
    CoordinatorMet("w1", "expired", 17.0, "down"),
    ShareChanged("orders", "shardId-0", 0.25, 0.5, True),
]


def test_failed_sync_rounds_are_counted_by_reason() -> None:
    metrics = InMemoryMetrics()
    for fact in COORDINATION_FACTS:
        metrics(fact)
    assert metrics.value("kinesis_coordinator_failures_total", reason="down") == 2


def test_failed_sync_rounds_can_be_scraped() -> None:
    metrics = PrometheusMetrics()
    for fact in COORDINATION_FACTS:
        metrics(fact)
    assert 'kinesis_coordinator_failures_total{reason="down"} 2.0' in metrics.exposition()[0].decode()


def test_whether_the_spool_can_store_is_zero_from_the_start():
    metrics, state = InMemoryMetrics(), SpoolState("bypass")
    metrics.watch(spool_state_source(state))
    names = ("kinesis_producer_spool_failing", "kinesis_producer_spool_bypassed_records_total")
    assert [metrics.value(name) for name in names] == [0, 0]
    state.refused("the disk is full", 1.0)
    state.bypassed += 3
    assert [metrics.value(name) for name in names] == [1, 3]
    state.stored()
    assert [metrics.value(name) for name in names] == [0, 3]
