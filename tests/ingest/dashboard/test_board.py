"""The document of a dashboard event, computed from the gateway's totals."""

from typing import Any

import msgspec
import pytest
from hypothesis import given, strategies as st
from prometheus_client.samples import Sample

from kpl_integrations.gateway_figures import StatsDocument
from kpl_integrations.ingest.dashboard.board import MOST_SHARDS, MOST_TENANTS, Board


def _stats(
    accepted: int = 0, tenants: dict[str, Any] | None = None, streams: dict[str, Any] | None = None
) -> StatsDocument:
    document = {
        "state": "open",
        "records": {
            "accepted": accepted,
            "delivered": accepted,
            "failed": {"Expired": 2},
            "spooled": 0,
            "dead_lettered": 0,
            "buffered": 0,
            "buffered_bytes": 0,
        },
        "room": {"outstanding_records": 50, "max_records": 100, "outstanding_bytes": 1, "max_bytes": 100},
        "answers": {"202": 3},
        "refusals": {"quota": 1},
        "tenants": tenants or {},
        "streams": streams or {},
    }
    return msgspec.convert(document, StatsDocument)


def _tenant(*, accepted: int = 0, waiting_bytes: int = 0, refused: int = 0) -> dict[str, Any]:
    return {
        "accepted_records": accepted,
        "waiting_records": waiting_bytes // 100,
        "waiting_bytes": waiting_bytes,
        "refused": {"quota": refused},
    }


def test_a_rate_is_the_increase_since_the_last_update_per_second() -> None:
    board = Board()
    assert board.update(_stats(accepted=1_000), [], 10.0)["now"]["accepted"] == 0.0
    assert board.update(_stats(accepted=1_500), [], 12.0)["now"]["accepted"] == 250.0
    assert board.update(_stats(accepted=1_500), [], 13.0)["now"]["accepted"] == 0.0


@given(st.lists(st.tuples(st.integers(0, 10**9), st.floats(0.0, 100.0)), min_size=2))
def test_rates_are_never_negative_and_their_sum_is_the_increase(updates: list[tuple[int, float]]) -> None:
    board, now, total, seen = Board(), 0.0, 0, 0.0
    for came, later in updates:
        total, now = total + came, now + max(later, 1e-3)
        rate = board.update(_stats(accepted=total), [], now)["now"]["accepted"]
        assert rate >= 0.0
        seen += rate * max(later, 1e-3)
    assert seen == pytest.approx(total - updates[0][0], rel=1e-6, abs=1e-3)


def test_the_larger_used_share_of_records_and_bytes_is_shown() -> None:
    assert Board().update(_stats(), [], 0.0)["room"] == 0.5


def test_only_the_tenants_with_the_longest_queues_are_shown() -> None:
    tenants = {f"tenant-{n}": _tenant(waiting_bytes=n * 100, refused=n) for n in range(100)}
    rows = Board().update(_stats(tenants=tenants), [], 0.0)["tenants"]
    assert [row["id"] for row in rows[:2]] == ["tenant-99", "tenant-98"]
    assert len(rows) == MOST_TENANTS


def test_shards_show_their_used_share_and_their_adaptive_limit() -> None:
    place = {"stream": "orders", "shard": "shardId-000000000001"}
    samples = [
        Sample("kinesis_producer_shard_utilisation", place, 0.75),
        Sample("kinesis_producer_shard_rate_limit", place, 0.85),
        Sample("kinesis_producer_throttled_records_total", place, 7.0),
    ]
    (shard,) = Board().update(_stats(), samples, 0.0)["shards"]
    assert shard == {**place, "used": 0.75, "limit": 0.85}


def test_the_busiest_of_many_shards_are_shown_in_the_order_of_their_names() -> None:
    samples = [
        Sample("kinesis_producer_shard_utilisation", {"stream": "s", "shard": f"{n:04d}"}, n / 1_000)
        for n in range(1_000)
    ]
    shown = [row["shard"] for row in Board().update(_stats(), samples, 0.0)["shards"]]
    assert shown == [f"{n:04d}" for n in range(1_000 - MOST_SHARDS, 1_000)]


def test_a_breaker_is_shown_while_it_is_not_closed() -> None:
    streams = {"orders": {"breakers": {"": "open", "shardId-000000000000": "closed"}}}
    shown = Board().update(_stats(streams=streams), [], 0.0)["breakers"]
    assert shown == [{"stream": "orders", "shard": "whole stream", "state": "open"}]
