"""The image and the compose file of examples/deploy agree with the checkout and with the gateway."""

import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml  # type: ignore[import-untyped]

from kpl_integrations.ingest import load_settings
from kpl_integrations.ingest.tenants import FileTenants, OpenTenants, Tenant
from tests.support.running_gateway import running_gateway

ROOT = Path(__file__).parents[3]
DEPLOY = ROOT / "examples" / "deploy"
DOCKERFILE = (DEPLOY / "Dockerfile").read_text().replace("\\\n", " ")
SERVICES: dict[str, Any] = yaml.safe_load((DEPLOY / "compose.yaml").read_text())["services"]


@pytest.mark.skipif(not (ROOT / "kpl_core").is_dir(), reason="the tests of a wheel run without the sources")
def test_the_image_is_built_from_files_of_the_checkout() -> None:
    copied = [line.split()[:-1] for line in re.findall(r"^COPY (?!--from)(.+)$", DOCKERFILE, re.MULTILINE)]
    sources = {source for line in copied for source in line}
    assert [source for source in sources if not (ROOT / source).exists()] == []
    # The context has these files only.
    assert set(re.findall(r"^!(.+)$", (DEPLOY / "Dockerfile.dockerignore").read_text(), re.MULTILINE)) == sources
    pyproject = tomllib.loads((ROOT / "pyproject.toml").read_text())
    project, wheel = pyproject["project"], pyproject["tool"]["hatch"]["build"]["targets"]["wheel"]
    needed = {"pyproject.toml", "hatch_build.py", "README.md", *project["license-files"], *wheel["packages"]}
    assert needed == sources


def test_the_image_installs_existing_extras() -> None:
    known = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    (extras,) = re.findall(r"KPL_KERNELS=require .+ '\.\[([\w,]+)\]'", DOCKERFILE)
    assert set(extras.split(",")) <= set(known)


def test_the_health_check_asks_the_gateway() -> None:
    (code,) = re.findall(r'CMD \["python", "-c", "(.+)"\]', DOCKERFILE)
    with running_gateway(OpenTenants(Tenant(id="all")), {"demo": 1}) as gateway:
        done = subprocess.run([sys.executable, "-c", code.replace("http://127.0.0.1:8080", gateway.url)], check=False)
        assert done.returncode == 0
    done = subprocess.run(
        [sys.executable, "-c", code.replace("http://127.0.0.1:8080", gateway.url)], capture_output=True, check=False
    )
    assert done.returncode != 0


def test_compose_gives_the_gateway_settings_that_it_accepts() -> None:
    gateway = SERVICES["gateway"]
    given = {
        name.removeprefix("KPL_INGEST_").lower(): value
        for name, value in gateway["environment"].items()
        if name.startswith("KPL_INGEST_") and value is not None
    }
    settings = load_settings(**given)
    assert int(gateway["stop_grace_period"].rstrip("s")) > settings.drain_delay_seconds + settings.close_seconds + 5
    assert gateway["read_only"]
    assert gateway["tmpfs"] == ["/tmp"]  # noqa: S108 - in the container


def test_one_service_of_compose_builds_the_image_that_the_others_use() -> None:
    (built,) = (service for service in SERVICES.values() if "build" in service)
    assert [name for name, service in SERVICES.items() if service["image"] == built["image"]] == [
        "gateway",
        "tenants",
        "kinesis",
    ]
    assert (DEPLOY / built["build"]["context"] / built["build"]["dockerfile"]).resolve() == DEPLOY / "Dockerfile"


def test_compose_mounts_existing_files_and_publishes_ports_of_this_machine_only() -> None:
    for name, service in SERVICES.items():
        sources = [volume.split(":")[0] for volume in service.get("volumes", ())]
        assert [each for each in sources if each.startswith(".") and not (DEPLOY / each).exists()] == [], name
        assert all(port.startswith("127.0.0.1:") for port in service.get("ports", ())), name


def test_the_tenants_of_compose_admit_clients_without_credentials() -> None:
    unknown = FileTenants(DEPLOY / "compose" / "tenants.toml").unknown
    assert unknown is not None
    assert unknown.streams == ("demo",)


@pytest.mark.skipif(shutil.which("promtool") is None, reason="no `promtool` on the PATH (Debian, Ubuntu: prometheus)")
def test_prometheus_accepts_its_configuration(tmp_path: Path) -> None:
    shutil.copy(DEPLOY / "compose" / "prometheus.yml", tmp_path)
    shutil.copy(ROOT / "docs" / "observability" / "alerts.yml", tmp_path)
    subprocess.run(["promtool", "check", "config", tmp_path / "prometheus.yml"], check=True, capture_output=True)
