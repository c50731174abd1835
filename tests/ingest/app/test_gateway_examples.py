"""The gateway's examples work unchanged, and its manifests match its own delays."""

import configparser
import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml  # type: ignore[import-untyped]

from kpl_integrations.ingest import load_settings
from kpl_integrations.ingest.tenants import CallableTenants, OpenTenants, Tenant
from tests.support.running_gateway import running_gateway

EXAMPLES = Path(__file__).parents[3] / "examples" / "ingest"
DEPLOY = EXAMPLES.parent / "deploy"


def test_every_line_of_the_curl_example_is_accepted():
    with running_gateway(OpenTenants(Tenant(id="local")), {"demo": 2}) as gateway:
        environment = os.environ | {"GATEWAY": gateway.url}
        ended = subprocess.run(
            [EXAMPLES / "curl.sh"], env=environment, capture_output=True, text=True, timeout=50, check=False
        )
        assert ended.returncode == 0, ended.stdout + ended.stderr
    assert gateway.report is not None
    assert gateway.report.delivered == gateway.report.accepted == 1 + 2 + 1 + 3 + 1 + 1 + 1
    assert '"rejected":[{"index":1,"field":"data"' in ended.stdout


@pytest.mark.long
def test_the_httpx_client_delivers_everything_for_a_tenant_with_a_low_rate():
    tenant = Tenant(id="t", records_per_second=400)
    with running_gateway(CallableTenants(lambda _: tenant, tenants=[tenant]), {"demo": 1}) as gateway:
        ended = subprocess.run(
            [sys.executable, EXAMPLES / "httpx_client.py", f"{gateway.url}/v1/streams/demo/records"],
            capture_output=True,
            text=True,
            timeout=50,
            check=False,
        )
        assert ended.stdout == "1000 accepted\n", ended.stderr
        assert gateway.gateway.tally.answers[429] > 0
    assert gateway.report is not None
    assert gateway.report.delivered == 1_000


def test_the_httpx_client_duplicates_nothing_when_an_answer_is_lost():
    specification = importlib.util.spec_from_file_location("httpx_client", EXAMPLES / "httpx_client.py")
    assert specification is not None
    assert specification.loader is not None
    module: Any = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    lost: list[str] = []
    with running_gateway(OpenTenants(Tenant(id="local")), {"demo": 1}) as gateway:

        class LosesTheFirstAnswer(httpx.HTTPTransport):
            def handle_request(self, request: httpx.Request) -> httpx.Response:
                answer = super().handle_request(request)
                if not lost:
                    lost.append(answer.read().decode())
                    message = "the connection broke before the answer came"
                    raise httpx.ReadError(message)
                return answer

        with httpx.Client(transport=LosesTheFirstAnswer()) as client:
            record = {"partition_key": "k", "data": "once"}
            answer = module.put_records(client, f"{gateway.url}/v1/streams/demo/records", [record])
            assert answer["accepted"] == 1
    assert lost
    assert gateway.report is not None
    assert gateway.report.accepted == 1


def test_systemd_waits_longer_than_the_gateway_needs():
    unit = configparser.ConfigParser(strict=False, interpolation=None)
    unit.optionxform = str  # type: ignore[assignment, method-assign]
    text = (DEPLOY / "kpl-gateway.service").read_text()
    unit.read_string(text)
    environment = dict(re.findall(r"^Environment=KPL_INGEST_(\w+)=(\d+)$", text, re.MULTILINE))
    needed = float(environment["DRAIN_DELAY_SECONDS"]) + float(environment["CLOSE_SECONDS"])
    assert float(unit["Service"]["TimeoutStopSec"]) > needed + 5


def test_the_manifest_uses_the_gateways_probes_and_gives_it_enough_time():
    documents = list(yaml.safe_load_all((DEPLOY / "kubernetes.yaml").read_text()))
    (workload,) = (each for each in documents if each["kind"] == "StatefulSet")
    pod = workload["spec"]["template"]["spec"]
    container = pod["containers"][0]
    environment = {each["name"]: each.get("value") for each in container["env"]}
    given = {
        name.removeprefix("KPL_INGEST_").lower(): value
        for name, value in environment.items()
        if name.startswith("KPL_INGEST_") and value is not None
    }
    settings = load_settings(**given)
    assert pod["terminationGracePeriodSeconds"] > settings.drain_delay_seconds + settings.close_seconds + 5
    probes = [container[f"{name}Probe"]["httpGet"]["path"] for name in ("startup", "liveness", "readiness")]
    assert probes == ["/livez", "/livez", "/readyz"]
