"""What the board shows of totals."""

from typing import Any

import pytest
from hypothesis import given, strategies as st

from kpl_integrations.ingest.dashboard.board import MOST_SHARDS, MOST_TENANTS, Board, MetricSample, Totals


def _stats(accepted: int = 0, tenants: dict[str, Any] | None = None, streams: dict[str, Any] | None = None) -> Any:
    return {
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


def _tenant(*, accepted: int = 0, waiting_bytes: int = 0, refused: int = 0) -> dict[str, Any]:
    return {
        "accepted_records": accepted,
        "waiting_records": waiting_bytes // 100,
        "waiting_bytes": waiting_bytes,
        "refused": {"quota": refused},
    }


def test_a_rate_is_what_came_since_the_last_look_over_the_time_since() -> None:
    board = Board()
    assert board.look(Totals(_stats(accepted=1_000), []), 10.0)["now"]["accepted"] == 0.0
    assert board.look(Totals(_stats(accepted=1_500), []), 12.0)["now"]["accepted"] == 250.0
    assert board.look(Totals(_stats(accepted=1_500), []), 13.0)["now"]["accepted"] == 0.0


@given(st.lists(st.tuples(st.integers(0, 10**9), st.floats(0.0, 100.0)), min_size=2))
def test_no_rate_is_ever_negative_and_their_sum_is_what_came(looks: list[tuple[int, float]]) -> None:
    board, now, total, seen = Board(), 0.0, 0, 0.0
    for came, later in looks:
        total, now = total + came, now + max(later, 1e-3)
        rate = board.look(Totals(_stats(accepted=total), []), now)["now"]["accepted"]
        assert rate >= 0.0
        seen += rate * max(later, 1e-3)
    assert seen == pytest.approx(total - looks[0][0], rel=1e-6, abs=1e-3)


def test_the_fuller_of_the_two_bounds_is_shown() -> None:
    assert Board().look(Totals(_stats(), []), 0.0)["room"] == 0.5


def test_the_tenants_with_the_longest_queues_come_first_and_are_few() -> None:
    tenants = {f"tenant-{n}": _tenant(waiting_bytes=n * 100, refused=n) for n in range(100)}
    rows = Board().look(Totals(_stats(tenants=tenants), []), 0.0)["tenants"]
    assert [row["id"] for row in rows[:2]] == ["tenant-99", "tenant-98"]
    assert len(rows) == MOST_TENANTS


def test_shards_show_their_share_and_what_the_adaptive_rate_allows() -> None:
    place = {"stream": "orders", "shard": "shardId-000000000001"}
    samples = [
        MetricSample("kinesis_producer_shard_utilisation", place, 0.75),
        MetricSample("kinesis_producer_shard_rate_limit", place, 0.85),
        MetricSample("kinesis_producer_throttled_records_total", place, 7.0),
    ]
    (shard,) = Board().look(Totals(_stats(), samples), 0.0)["shards"]
    assert shard == {**place, "used": 0.75, "limit": 0.85}


def test_of_many_shards_the_busiest_are_shown_in_the_order_of_their_names() -> None:
    samples = [
        MetricSample("kinesis_producer_shard_utilisation", {"stream": "s", "shard": f"{n:04d}"}, n / 1_000)
        for n in range(1_000)
    ]
    shown = [row["shard"] for row in Board().look(Totals(_stats(), samples), 0.0)["shards"]]
    assert shown == [f"{n:04d}" for n in range(1_000 - MOST_SHARDS, 1_000)]


def test_a_breaker_is_shown_while_it_is_not_closed() -> None:
    streams = {"orders": {"breakers": {"": "open", "shardId-000000000000": "closed"}}}
    shown = Board().look(Totals(_stats(streams=streams), []), 0.0)["breakers"]
    assert shown == [{"stream": "orders", "shard": "whole stream", "state": "open"}]
