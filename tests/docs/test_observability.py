"""The dashboard and the alert rules use only metrics that are exported."""

import json
import re
import shutil
import subprocess

import pytest

from kpl_integrations.ingest.readiness.parts import RULES
from kpl_integrations.metrics.catalogue import METRICS, Kind
from tests.support.metrics import NAME, OBSERVABILITY, alert_expressions, dashboard_expressions

LABELLED = re.compile(r"\b((?:kinesis|token_bucket)_[a-z_]+)\{([^}]*)\}")
UP = 'up{job=~".*(kpl|kinesis).*"} == 0'
# Labels that Prometheus adds to every series, and to the buckets of a histogram.
EVERYWHERE = {"job", "instance", "le"}


def metric_of(name):
    """Return the metric that a series of this name belongs to."""
    stem = re.sub(r"_(bucket|sum|count)$", "", name)
    return METRICS[name] if name in METRICS else METRICS[stem] if METRICS[stem].kind is Kind.HISTOGRAM else None


@pytest.mark.parametrize("expression", [*dashboard_expressions(), *alert_expressions()])
def test_every_name_and_label_is_exported(expression):
    names = NAME.findall(expression)
    # Prometheus' own metric has no other beside it.
    assert names or expression == UP
    known = EVERYWHERE.union(*(metric_of(name).labels for name in names))
    for name, matchers in LABELLED.findall(expression):
        labels = set(re.findall(r"(\w+)(?:=|!=|=~|!~)\"", matchers))
        assert labels <= set(metric_of(name).labels) | EVERYWHERE, name
    for grouped in re.findall(r"by \(([^)]*)\)", expression):
        assert set(re.split(r", *", grouped)) <= known, expression


def test_every_metric_is_on_the_dashboard():
    shown = {metric_of(name).name for expression in dashboard_expressions() for name in NAME.findall(expression)}
    assert shown == set(METRICS)


def test_panels_do_not_overlap_and_each_has_a_description():
    panels = json.loads((OBSERVABILITY / "grafana-dashboard.json").read_text())["panels"]
    taken: set[tuple[int, int]] = set()
    for panel in panels:
        place = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not cells & taken
        taken |= cells
        assert panel["type"] == "row" or panel["description"].endswith(".")
    assert len({panel["id"] for panel in panels}) == len(panels)


def test_every_alert_has_a_summary_and_an_action():
    text = (OBSERVABILITY / "alerts.yml").read_text()
    alerts = re.findall(r"- alert: (\w+)", text)
    assert len(alerts) == len(set(alerts)) == text.count(" action: ") == text.count(" summary: ")


def test_the_alert_on_records_of_a_dead_worker_calls_its_figure_an_upper_bound():
    """It is never below the loss, and above it by what was under way, also for `ack=spooled`, which loses nothing."""
    text = (OBSERVABILITY / "alerts.yml").read_text().partition("- alert: KinesisGatewayLostRecords\n")[2]
    summary, action = re.findall(r'(?:summary|action): "(.*)"', text)[:2]
    assert summary.endswith("died: at most {{ $value | humanize }} accepted records are lost")
    assert "may have arrived" in action
    assert "ack=spooled" in action


# The alerts on the state of a part: its name, the state, and how many minutes it must last.
PARTS = (
    ("KinesisGatewayFailed", "intake", "failed", 0),
    ("KinesisGatewayCannotDeliver", "kinesis", "failed", 1),
    ("KinesisGatewayDeliversLess", "kinesis", "degraded", 5),
    ("KinesisDeadLettersNotStored", "dead_letters", "failed", 1),
    ("KinesisDeadLettersWait", "dead_letters", "degraded", 15),
    ("KinesisCoordinationFails", "coordination", "degraded", 2),
    ("KinesisTenantsFileNotRead", "tenants_file", "degraded", 1),
    ("KinesisCertificateExpired", "certificate", "failed", 0),
    ("KinesisCertificateNotRenewed", "certificate", "degraded", 5),
)
# A spool has its own metric, which a producer without a gateway exports too.
ELSEWHERE = {("spool", "degraded"), ("spool", "failed")}
# For each alert: series that fire it and series that do not, one value a minute, and the minute of the look.
ALERTS = {
    "KinesisRecordsLost": (
        {"kinesis_producer_lost_records_total": "0 0 3 3"},
        {"kinesis_producer_lost_records_total": "7x9"},
        3,
    ),
    "KinesisLogRecordsDropped": (
        {"kinesis_log_dropped_records_total": "0 0 1 1"},
        {"kinesis_log_dropped_records_total": "0x9"},
        3,
    ),
    "KinesisTelemetryLost": (
        {'kinesis_otel_lost_items_total{signal="traces"}': "0 0 1 1"},
        {'kinesis_otel_lost_items_total{signal="traces"}': "0x9"},
        3,
    ),
    "KinesisDeliverySlow": (
        {
            'kinesis_producer_delivery_seconds_bucket{le="5"}': "0x20",
            'kinesis_producer_delivery_seconds_bucket{le="10"}': "0+100x20",
            'kinesis_producer_delivery_seconds_bucket{le="+Inf"}': "0+100x20",
        },
        {
            'kinesis_producer_delivery_seconds_bucket{le="5"}': "0+100x20",
            'kinesis_producer_delivery_seconds_bucket{le="10"}': "0+100x20",
            'kinesis_producer_delivery_seconds_bucket{le="+Inf"}': "0+100x20",
        },
        15,
    ),
    "KinesisShardFull": (
        {'kinesis_producer_shard_utilisation{stream="s",shard="1"}': "0.95x30"},
        {'kinesis_producer_shard_utilisation{stream="s",shard="1"}': "0.5x30"},
        20,
    ),
    "KinesisThrottled": (
        # The series appears with the first throttled record.
        {'kinesis_producer_throttled_records_total{stream="s",shard="1"}': "_x3 6000+6000x30"},
        {'kinesis_producer_throttled_records_total{stream="s",shard="1"}': "0+60x30"},
        25,
    ),
    "KinesisRateHalved": (
        {'kinesis_producer_shard_rate_limit{stream="s",shard="1"}': "0.4x30"},
        {'kinesis_producer_shard_rate_limit{stream="s",shard="1"}': "1x30"},
        20,
    ),
    "KinesisBreakerOpen": (
        # If requests time out, it probes for as long as it is open.
        {'kinesis_producer_breaker_state{stream="s",shard=""}': "2 1 2 1 2 1"},
        {'kinesis_producer_breaker_state{stream="s",shard=""}': "1x9"},
        3,
    ),
    "KinesisBacklogGrows": (
        {"kinesis_producer_outstanding_records": "50000+1000x30"},
        {"kinesis_producer_outstanding_records": "60000x30"},
        20,
    ),
    "KinesisDeadLetters": (
        {'kinesis_producer_dlq_records_total{reason="ttl"}': "0 0 1 1"},
        {'kinesis_producer_dlq_records_total{reason="ttl"}': "4x9"},
        3,
    ),
    "KinesisSpoolFills": (
        {"kinesis_producer_spool_records": "0+10x40", "kinesis_producer_spool_bytes": "0+1000x40"},
        {"kinesis_producer_spool_records": "400-10x40", "kinesis_producer_spool_bytes": "40000-1000x40"},
        38,
    ),
    "KinesisSpoolCannotStore": (
        {"kinesis_producer_spool_failing": "0 1 1 1 1 1"},
        {"kinesis_producer_spool_failing": "0 1 0 0 0 0"},
        4,
    ),
    "KinesisGatewayRefuses": (
        {
            'kinesis_ingest_rejected_total{reason="over_quota"}': "0+10x20",
            'kinesis_ingest_requests_total{code="429"}': "0+100x20",
        },
        {
            'kinesis_ingest_rejected_total{reason="over_quota"}': "0+1x20",
            'kinesis_ingest_requests_total{code="429"}': "0+100x20",
        },
        15,
    ),
    "KinesisGatewayLostRecords": (
        {"kinesis_ingest_lost_records": "0 0 5 5"},
        {"kinesis_ingest_lost_records": "5x9"},
        3,
    ),
    "KinesisGatewayWorkerHangs": (
        {'kinesis_ingest_worker_silent_seconds{worker="1"}': "0 60 120 180"},
        {'kinesis_ingest_worker_silent_seconds{worker="1"}': "0.9x9"},
        3,
    ),
    "KinesisTenantStarves": (
        {'kinesis_ingest_tenant_wait_seconds{tenant="a"}': "40x20"},
        {'kinesis_ingest_tenant_wait_seconds{tenant="a"}': "5x20"},
        10,
    ),
    "KinesisTargetDown": (
        {'up{job="kpl-gateway",instance="a"}': "0x9"},
        {'up{job="kpl-gateway",instance="a"}': "1 0 1 0 1 1", 'up{job="node",instance="a"}': "0x9"},
        3,
    ),
    **{
        alert: (
            {f'kinesis_ingest_part{{part="{part}",state="{state}"}}': f"0 0 1x{minutes + 3}"},
            {
                f'kinesis_ingest_part{{part="{part}",state="ok"}}': "1x40",
                f'kinesis_ingest_part{{part="{part}",state="{state}"}}': "0x40",
                f'kinesis_ingest_part{{part="other",state="{state}"}}': "1x40",
            },
            minutes + 3,
        )
        for alert, part, state, minutes in PARTS
    },
    "KinesisCoordinatorGone": (
        {"kinesis_coordinator_lease_age_seconds": "200x20"},
        {"kinesis_coordinator_lease_age_seconds": "10x20"},
        10,
    ),
}


def test_each_state_that_a_rule_gives_a_part_has_an_alert():
    """Except for a gateway that drains, or whose buffer is full: KinesisGatewayRefuses has the effect."""
    wanted = {(rule.part.value, rule.state.value) for rule in RULES} - {("intake", "degraded")}
    assert {(part, state) for _, part, state, _ in PARTS} | ELSEWHERE == wanted


def test_each_alert_is_in_the_runbook():
    page = (OBSERVABILITY.parent / "runbook.md").read_text(encoding="utf-8")
    assert set(re.findall(r"^\| `(Kinesis\w+)` \|", page, flags=re.MULTILINE)) == set(ALERTS)


def test_the_table_has_every_alert():
    text = (OBSERVABILITY / "alerts.yml").read_text()
    assert set(re.findall(r"- alert: (\w+)", text)) == set(ALERTS)


@pytest.mark.skipif(
    shutil.which("promtool") is None, reason="not run: no promtool (Debian, Ubuntu: apt install prometheus)"
)
@pytest.mark.parametrize("alert", ALERTS)
def test_an_alert_fires_at_its_first_cause_and_not_without_one(alert, tmp_path):
    firing, healthy, minute = ALERTS[alert]
    tests = [
        {
            "interval": "1m",
            "input_series": [{"series": series, "values": values} for series, values in shown.items()],
            "promql_expr_test": [
                {
                    "expr": f'count(ALERTS{{alertname="{alert}",alertstate="firing"}}) or vector(0)',
                    "eval_time": f"{minute}m",
                    "exp_samples": [{"labels": "{}", "value": expected}],
                }
            ],
        }
        for shown, expected in ((firing, 1), (healthy, 0))
    ]
    # JSON is YAML.
    file = tmp_path / "tests.yml"
    file.write_text(json.dumps({"rule_files": [str(OBSERVABILITY / "alerts.yml")], "tests": tests}))
    done = subprocess.run(["promtool", "test", "rules", file], capture_output=True, text=True, check=False, timeout=30)
    assert done.returncode == 0, done.stdout + done.stderr
