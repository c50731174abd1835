"""Facts become values with the right names, and never more series than the bound."""

from pathlib import Path

import pytest
from msgspec import structs

from kpl_core.durability.circuit_breaker import CircuitBreaker
from kpl_core.durability.dead_letters import DeadLetterQueue
from kpl_core.durability.spool import Spool, SpoolOptions
from kpl_core.hooks import RecordsFinished, RequestCompleted, ShardMapRefreshed, ShardRateChanged
from kpl_integrations.metrics.catalogue import METRICS
from kpl_integrations.metrics.in_memory import InMemoryMetrics
from kpl_integrations.metrics.sources import breaker_source, dead_letter_source, spool_source, token_bucket_source
from tests.durability.spool.records import spooled

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


def test_a_request_gives_its_duration_its_ratio_and_its_throttles_by_shard() -> None:
    metrics = InMemoryMetrics()
    metrics(REQUEST)
    assert metrics.observations("kinesis_producer_send_duration_seconds", "answered") == [0.25]
    assert metrics.observations("kinesis_producer_aggregation_ratio") == [50.0]
    name = "kinesis_producer_throttled_records_total"
    assert metrics.value(name) == 3
    assert metrics.value(name, stream="orders", shard="shardId-000000000001") == 2
    assert metrics.value(name, shard="") == 1


def test_the_adaptive_rate_shows_its_latest_value() -> None:
    metrics = InMemoryMetrics()
    metrics(ShardRateChanged("orders", "shardId-000000000000", 0.85))
    metrics(ShardRateChanged("orders", "shardId-000000000000", 0.7225))
    metrics(ShardMapRefreshed("orders", 4))
    assert metrics.value("kinesis_producer_shard_rate_limit", shard="shardId-000000000000") == 0.7225


def test_utilisation_is_the_share_of_the_shards_limit_over_ten_seconds() -> None:
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


def test_utilisation_counts_what_the_service_counts() -> None:
    """Framing and keys are bytes too; a user record settled apart from its aggregate is no Kinesis record."""
    name = "kinesis_producer_shard_utilisation"
    metrics = InMemoryMetrics(clock=lambda: 100.0)
    metrics(structs.replace(DELIVERED, user_bytes=1_000, kinesis_bytes=1024 * 1024))
    assert metrics.value(name) == pytest.approx(0.1)
    metrics = InMemoryMetrics(clock=lambda: 100.0)
    for _ in range(10_000):
        metrics(structs.replace(DELIVERED, user_records=1, user_bytes=100, kinesis_bytes=0))
    assert metrics.value(name) == pytest.approx(10_000 * 100 / (10 * 1024 * 1024))


@pytest.mark.parametrize("label", ["reason", "shard"])
def test_a_label_with_endless_values_ends_in_other(label: str) -> None:
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


def test_a_label_that_a_metric_does_not_have_is_refused() -> None:
    with pytest.raises(KeyError, match="tenant"):
        InMemoryMetrics().value("kinesis_producer_records_total", tenant="x")


def test_what_the_parts_count_themselves_is_read_when_asked(tmp_path: Path) -> None:
    metrics = InMemoryMetrics()
    breaker = CircuitBreaker()
    with Spool(SpoolOptions(path=tmp_path / "spool.db", commit_interval_ms=0.0)) as spool:
        queue = DeadLetterQueue(spool)
        metrics.watch(spool_source(spool))
        metrics.watch(dead_letter_source(queue))
        metrics.watch(breaker_source(lambda: {("orders", "shardId-000000000000"): breaker}))
        spool.append_nowait([spooled(1), spooled(2)], claim=True).result(20.0)
        queue.bury_nowait([queue.letter(spooled(3), "ttl")]).result(20.0)
        breaker.record_outcomes(succeeded=0, failed=100, now=1.0)
        assert metrics.value("kinesis_producer_spool_records") == 2
        assert metrics.value("kinesis_producer_spool_bytes") == spool.statistics().record_bytes > 64
        assert metrics.value("kinesis_producer_dlq_depth") == 1
        assert metrics.value("kinesis_producer_dlq_records_total", reason="ttl") == 1
        assert metrics.value("kinesis_producer_breaker_state", stream="orders") == 2


class Limiter:
    def get_metrics(self) -> dict[str, float]:
        return {"tokens_available": 3.5, "total_rejections": 2, "total_refills": 9}


def test_a_token_bucket_limiter_is_read_too() -> None:
    metrics = InMemoryMetrics()
    metrics.watch(token_bucket_source(Limiter()))
    assert metrics.value("token_bucket_tokens_available") == 3.5
    assert metrics.value("token_bucket_rejections_total") == 2
    assert metrics.value("token_bucket_refill_events_total") == 9


def test_no_metric_is_labelled_by_what_a_caller_can_make_up() -> None:
    # A tenant's wait is told of the longest twenty only, a status and a resource are few.
    allowed = {"outcome", "place", "reason", "tier", "stream", "shard", "code", "tenant", "resource"}
    for metric in METRICS.values():
        assert set(metric.labels) <= allowed
