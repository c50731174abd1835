"""The document of a dashboard event, computed from the gateway's totals."""

from typing import Any

import msgspec
import pytest
from hypothesis import given, strategies as st
from prometheus_client.samples import Sample

from kpl_integrations.gateway_figures import StatsDocument, WorkerStats
from kpl_integrations.ingest.dashboard.board import MOST_SHARDS, MOST_TENANTS, WINDOW_UPDATES, Board


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


def _tenant(*, accepted: int = 0, waiting_bytes: int = 0, refused: int = 0, cpu_seconds: float = 0.0) -> dict[str, Any]:
    return {
        "cpu_seconds": cpu_seconds,
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


def _part(part: str, **counts: float) -> list[Sample]:
    states = ("ok", "degraded", "failed", "not_configured")
    return [Sample("kinesis_ingest_part", {"part": part, "state": state}, counts.get(state, 0.0)) for state in states]


def test_each_part_has_its_worst_state_and_what_this_process_knows_about_it() -> None:
    samples = [
        *_part("intake", ok=3),
        *_part("spool", ok=2, degraded=1),
        *_part("kinesis", ok=1, failed=2),
        *_part("certificate", not_configured=3),
    ]
    ok = {"state": "ok", "seconds": 9.0, "detail": "stores records", "action": ""}
    failed = {"state": "failed", "seconds": 7.0, "detail": "requests fail", "action": "run `kpl doctor`"}
    found = Board().update(_stats(), samples, 1.0, {"intake": ok, "spool": ok, "kinesis": failed})["parts"]
    assert found == [
        {"part": "kinesis", "processes": 2, **failed},
        {"part": "spool", "state": "degraded", "processes": 1, "seconds": None, "detail": "", "action": ""},
        {"part": "intake", "processes": 3, **ok},
    ]


def test_a_tenant_that_is_refused_for_its_own_limits_or_mistakes_is_not_shed() -> None:
    board = Board()
    board.update(_stats(tenants={"noisy": {}, "quiet": {}}), [], 1.0)
    own = {"quota": 60, "queue share": 30, "cpu share": 20, "malformed": 10}
    tenants = {"noisy": {"refused": own}, "quiet": {"refused": own | {"no room": 4, "not spooled": 2}}}
    rows = {each["id"]: each for each in board.update(_stats(tenants=tenants), [], 3.0)["tenants"]}
    assert {name: each["shed_per_second"] for name, each in rows.items()} == {"noisy": 0.0, "quiet": 3.0}
    assert rows["noisy"]["refused_per_second"] == 60.0


def test_a_process_that_hangs_is_a_failed_part_because_its_figures_are_old() -> None:
    workers = {
        str(number): {"process_id": 70 + number, "state": "open", "silent_seconds": 9.0 * number} for number in range(3)
    }
    stats = msgspec.structs.replace(_stats(), workers=msgspec.convert(workers, dict[str, WorkerStats]))
    board = Board()
    silent, kinesis = board.update(stats, _part("kinesis", ok=3), 1.0)["parts"]
    assert (silent["part"], silent["state"], silent["seconds"]) == ("worker 2", "failed", 18.0)
    assert silent["detail"] == "process 72 does not answer, and its figures are old"
    assert "py-spy dump --pid 72" in silent["action"]
    assert kinesis["state"] == "ok"
    drainer = WorkerStats(process_id=80, state="open", drains="spool.db", silent_seconds=11.0)
    draining = msgspec.structs.replace(_stats(), workers={"-1": drainer})
    assert board.update(draining, [], 1.0)["parts"][0]["part"] == "the drainer of spool.db"
    supervisor, _ = board.update(stats, _part("kinesis", ok=3), 1.0, is_current=False)["parts"]
    assert (supervisor["part"], supervisor["state"]) == ("supervisor", "failed")
    assert "start the gateway again" in supervisor["action"]


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
    board = Board()
    board.update(_stats(), samples, 0.0)
    throttled = [*samples[:2], samples[2]._replace(value=13.0)]
    (shard,) = board.update(_stats(), throttled, 2.0)["shards"]
    assert shard == {**place, "used": 0.75, "limit": 0.85, "throttled": 3.0}


def test_the_hottest_of_many_shards_come_first() -> None:
    samples = [
        Sample("kinesis_producer_shard_utilisation", {"stream": "s", "shard": f"{n:04d}"}, n / 1_000)
        for n in range(1_000)
    ]
    board = Board().update(_stats(), samples, 0.0)
    assert [row["shard"] for row in board["shards"]] == [f"{n:04d}" for n in range(999, 999 - MOST_SHARDS, -1)]
    assert board["shard_count"] == 1_000


def test_a_breaker_is_shown_while_it_is_not_closed() -> None:
    streams = {"orders": {"breakers": {"": "open", "shardId-000000000000": "closed"}}}
    shown = Board().update(_stats(streams=streams), [], 0.0)["breakers"]
    assert shown == [{"stream": "orders", "shard": "whole stream", "state": "open"}]


def test_a_tenant_has_shares_of_rate_queue_and_cpu_time() -> None:
    board = Board()
    board.update(_stats(tenants={"a": _tenant(), "b": _tenant()}), [], 0.0)
    tenants = {
        "a": _tenant(accepted=300, waiting_bytes=100, cpu_seconds=0.1),
        "b": _tenant(accepted=100, waiting_bytes=300, cpu_seconds=0.3),
    }
    first, second = board.update(_stats(tenants=tenants), [], 1.0)["tenants"]
    assert (first["id"], first["rate_share"], first["queue_share"]) == ("b", 0.25, 0.75)
    assert first["cpu_share"] == pytest.approx(0.75)
    assert (second["id"], second["rate_share"], second["queue_share"]) == ("a", 0.75, 0.25)
    # Nothing was measured since.
    assert [row["cpu_share"] for row in board.update(_stats(tenants=tenants), [], 2.0)["tenants"]] == [None, None]


def _delivered(**counts: float) -> list[Sample]:
    """Return the cumulative counts of the histogram by upper bound, such as `_0_1` for 0.1."""
    bounds = {name: name[1:].replace("_", ".") for name in counts}
    return [
        Sample("kinesis_producer_delivery_seconds_bucket", {"le": bounds[name]}, count)
        for name, count in counts.items()
    ]


def test_the_delay_is_that_of_the_last_updates_only() -> None:
    board = Board()
    late = [board.update(_stats(), _delivered(_0_1=1_000, _1_0=1_000, _inf=1_000), 0.0)["late"]]
    late += [board.update(_stats(), _delivered(_0_1=1_000, _1_0=1_100, _inf=1_100), 1.0)["late"]]
    assert (late[0]["p50"], late[0]["p99"]) == (None, None)
    assert (late[1]["p50"], late[1]["p99"]) == (pytest.approx(0.55), pytest.approx(0.991))
    for second in range(2, 2 + WINDOW_UPDATES):
        late.append(board.update(_stats(), _delivered(_0_1=1_000, _1_0=1_100, _inf=1_100), float(second))["late"])
    assert late[-1]["p50"] is None


def test_a_delay_above_the_last_bound_is_that_bound_and_a_restart_begins_again() -> None:
    board = Board()
    board.update(_stats(), _delivered(_1_0=0, _inf=0), 0.0)
    assert board.update(_stats(), _delivered(_1_0=0, _inf=9), 1.0)["late"]["p99"] == 1.0
    assert board.update(_stats(), _delivered(_1_0=2, _inf=2), 2.0)["late"]["p99"] is None


def _answers_of(answers: dict[str, int], refusals: dict[str, int]) -> list[dict[str, Any]]:
    board = Board()
    board.update(msgspec.structs.replace(_stats(), answers={}, refusals=dict.fromkeys(refusals, 0)), [], 0.0)
    found = board.update(msgspec.structs.replace(_stats(), answers=answers, refusals=refusals), [], 10.0)["answers"]
    assert isinstance(found, list)
    return found


def test_a_refusal_in_a_200_of_the_kinesis_api_is_shown() -> None:
    ok, too_many = _answers_of({"200": 30}, {"quota": 20, "queue share": 5})
    assert (ok["status"], ok["count"], ok["within"], ok["refusals"]) == (200, 30, None, [])
    assert (too_many["status"], too_many["count"]) == (429, 0)
    assert too_many["within"] == {"count": 25, "per_second": 2.5}
    assert [(each["reason"], each["count"]) for each in too_many["refusals"]] == [
        ("quota", 20),
        ("queue share", 5),
    ]


def test_refusals_of_both_apis_are_told_apart() -> None:
    _, too_many = _answers_of({"200": 30, "429": 8}, {"quota": 20})
    assert (too_many["count"], too_many["within"]["count"]) == (8, 12)
    (only_http,) = _answers_of({"429": 8}, {"quota": 8})
    assert only_http["within"] is None


def test_a_reason_without_a_refusal_has_no_row() -> None:
    assert [row["status"] for row in _answers_of({"202": 1}, {"quota": 0})] == [202]


def test_the_wait_of_each_tenant_is_shown() -> None:
    samples = [Sample("kinesis_ingest_tenant_wait_seconds", {"tenant": "a"}, 4.0)]
    rows = Board().update(_stats(tenants={"a": _tenant(), "b": _tenant()}), samples, 0.0)["tenants"]
    assert {row["id"]: row["wait"] for row in rows} == {"a": 4.0, "b": 0.0}


def test_the_age_of_the_queue_is_that_of_the_tenant_that_waits_longest() -> None:
    ages = {"a": 1.0, "b": 4.0, "c": 2.0}
    samples = [Sample("kinesis_ingest_tenant_wait_seconds", {"tenant": name}, age) for name, age in ages.items()]
    assert Board().update(_stats(), samples, 0.0)["late"]["queue"] == 4.0


def test_refusals_are_grouped_under_the_status_of_their_answers() -> None:
    stats = msgspec.structs.replace(
        _stats(), answers={"202": 3, "429": 5, "503": 1}, refusals={"quota": 2, "queue share": 3, "no room": 1}
    )
    answers = Board().update(stats, [], 0.0)["answers"]
    assert [(each["status"], each["phrase"]) for each in answers] == [
        (202, "Accepted"),
        (429, "Too Many Requests"),
        (503, "Service Unavailable"),
    ]
    assert [[(row["reason"], row["count"]) for row in each["refusals"]] for each in answers] == [
        [],
        [("queue share", 3), ("quota", 2)],
        [("no room", 1)],
    ]


def test_what_was_not_delivered_is_in_the_event_with_its_reasons() -> None:
    document = Board().update(_stats(accepted=10), [], 0.0)
    assert (document["totals"]["failed"], document["reasons"]) == (2, {"Expired": 2})
