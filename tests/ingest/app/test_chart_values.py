"""The Helm chart's values, without helm: the schema fits them, and comments, templates and the page name each."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema  # type: ignore[import-untyped]
import pytest
import yaml  # type: ignore[import-untyped]

ROOT = Path(__file__).parents[3]
CHART = ROOT / "examples" / "deploy" / "helm"
TEXT = (CHART / "values.yaml").read_text()
VALUES: dict[str, Any] = yaml.safe_load(TEXT)
SCHEMA: dict[str, Any] = json.loads((CHART / "values.schema.json").read_text())
TEMPLATES = "\n".join(file.read_text() for file in sorted((CHART / "templates").iterdir()))
PAGE = ROOT / "docs" / "howto" / "deploy.md"


def leaves(values: dict[str, Any], prefix: str = "") -> Iterator[str]:
    """Yield the dotted name of each value; an empty mapping is one too."""
    for name, value in values.items():
        if isinstance(value, dict) and value:
            yield from leaves(value, f"{prefix}{name}.")
        else:
            yield prefix + name


def with_value(name: str, value: Any) -> dict[str, Any]:
    """Return the default values with another one."""
    changed: dict[str, Any] = json.loads(json.dumps(VALUES))
    *parents, last = name.split(".")
    place = changed
    for parent in parents:
        place = place[parent]
    place[last] = value
    return changed


def schema_of(name: str) -> dict[str, Any]:
    """Return the schema of a dotted name; a missing one is a KeyError."""
    found = SCHEMA
    for part in name.split("."):
        found = found["properties"][part]
    return found


def errors(values: dict[str, Any]) -> list[str]:
    return [error.json_path for error in jsonschema.Draft7Validator(SCHEMA).iter_errors(values)]


def test_the_schema_accepts_the_default_values() -> None:
    jsonschema.Draft7Validator.check_schema(SCHEMA)
    assert errors(VALUES) == []
    for name in leaves(VALUES):
        assert schema_of(name), name


def test_each_mapping_refuses_names_that_it_does_not_know() -> None:
    mappings = {"", *(name.rpartition(".")[0] for name in leaves(VALUES))} - {""}
    for name in mappings:
        assert errors(with_value(f"{name}.mistyped", 1)) == [f"$.{name}"], name
    assert errors({**VALUES, "mistyped": 1}) == ["$"]
    assert set(SCHEMA["properties"]) == {*VALUES, "global"}


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("image.digest", "sha256:abc"),
        ("image.pullPolicy", "Sometimes"),
        ("region", "Ireland"),
        ("replicas", -1),
        ("replicas", "2"),
        ("workers", 0),
        ("workers", 65),
        ("tenants.secretName", ""),
        ("tls.secretName", "Not A Name"),
        ("coordination.url", "http://store"),
        ("coordination.maxProcesses", 0),
        ("spool.size", "4 GB"),
        ("spool.accessMode", "ReadWriteMany"),
        ("maxOutstandingBytes", "128Mi"),
        ("drainDelaySeconds", "10s"),
        ("closeSeconds", -1),
        ("settings", {"PORT": 9000}),
        ("settings", {"log_format": "json"}),
        ("settings", {"LOG_FORMAT": {"a": "b"}}),
        ("extraEnv", [{"value": "x"}]),
        ("service.port", 70_000),
        ("ingress.paths", []),
        ("ingress.paths", ["v1"]),
        ("autoscaling.minReplicas", 0),
        ("autoscaling.targetCPUPercent", 101),
        ("podDisruptionBudget.maxUnavailable", 0),
        ("podDisruptionBudget.maxUnavailable", "0%"),
        ("podMonitor.interval", "15"),
        ("podAnnotations", {"prometheus.io/port": 8080}),
    ],
)
def test_the_schema_refuses_a_wrong_value(name: str, wrong: Any) -> None:
    (path,) = errors(with_value(name, wrong))
    assert path.startswith(f"$.{name}")


@pytest.mark.parametrize(
    ("name", "right"),
    [
        ("image.digest", "sha256:" + "0" * 64),
        ("image.tag", 2),  # as --set image.tag=2 gives it
        ("region", "us-gov-west-1"),
        ("replicas", 0),
        ("spool.storageClassName", "gp3"),
        ("drainDelaySeconds", 2.5),
        ("settings", {"MAX_CONNECTIONS": 20_000, "ACCESS_LOG": 0.01, "HTTP2": False, "LOG_FORMAT": "json"}),
        ("coordination.url", "s3://bucket/kpl"),
        ("service.port", 8443),
        ("podDisruptionBudget.maxUnavailable", "25%"),
    ],
)
def test_the_schema_accepts_another_value(name: str, right: Any) -> None:
    assert errors(with_value(name, right)) == []


def test_the_schema_refuses_the_settings_that_other_values_set() -> None:
    set_by_the_chart = set(
        re.findall(r"\bKPL_INGEST_([A-Z_]+)\b", (CHART / "templates" / "statefulset.yaml").read_text())
    )
    # The image listens on 0.0.0.0, and probes and services expect port 8080.
    refused = {name for name, allowed in schema_of("settings")["properties"].items() if allowed is False}
    assert refused == set_by_the_chart | {"HOST", "PORT"}


def test_each_value_has_a_comment() -> None:
    parents: list[str] = []
    without = []
    above = ""
    for line in TEXT.splitlines():
        found = re.match(r"( *)(\w+):(.*)$", line)
        if found is not None:
            depth = len(found[1]) // 2
            name = ".".join([*parents[:depth], found[2]])
            parents[depth:] = [found[2]]
            if name in set(leaves(VALUES)) and "#" not in found[3] and not above.lstrip().startswith("#"):
                without.append(name)
        above = line
    assert without == []


def test_the_templates_use_each_value_and_no_other() -> None:
    used = set(re.findall(r"\.Values\.([\w.]+)", TEMPLATES))
    sections = {name.rpartition(".")[0] for name in leaves(VALUES)}
    names = set(leaves(VALUES))
    assert used - names - sections == set()
    # The one section that a template reads as a whole.
    through_with = {"coordination.secretName", "coordination.key"}
    assert names - used - through_with == set()


def test_the_page_explains_each_value() -> None:
    described = set(re.findall(r"`([\w.]+)`", PAGE.read_text()))
    assert [name for name in leaves(VALUES) if name not in described] == []
