"""The dashboard and the alert rules use only metrics that are exported."""

import json
import re
from pathlib import Path

import pytest

from kpl_integrations.metrics.catalogue import METRICS, Kind

OBSERVABILITY = Path(__file__).parents[2] / "docs" / "observability"
NAME = re.compile(r"\b((?:kinesis|token_bucket)_[a-z_]+)")
LABELLED = re.compile(r"\b((?:kinesis|token_bucket)_[a-z_]+)\{([^}]*)\}")
# Labels that Prometheus adds to every series, and to the buckets of a histogram.
EVERYWHERE = {"job", "instance", "le"}


def dashboard_expressions():
    panels = json.loads((OBSERVABILITY / "grafana-dashboard.json").read_text())["panels"]
    return [target["expr"] for panel in panels for target in panel.get("targets", ())]


def alert_expressions():
    text = (OBSERVABILITY / "alerts.yml").read_text()
    return re.findall(r"^ +expr: (.+)$", text, re.MULTILINE)


def metric_of(name):
    """Return the metric that a series of this name belongs to."""
    stem = re.sub(r"_(bucket|sum|count)$", "", name)
    return METRICS[name] if name in METRICS else METRICS[stem] if METRICS[stem].kind is Kind.HISTOGRAM else None


@pytest.mark.parametrize("expression", [*dashboard_expressions(), *alert_expressions()])
def test_every_name_and_label_is_exported(expression):
    names = NAME.findall(expression)
    assert names
    known = set.union(*(set(metric_of(name).labels) for name in names)) | EVERYWHERE
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
