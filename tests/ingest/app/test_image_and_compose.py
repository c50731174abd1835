"""The image and the compose file of examples/deploy agree with the checkout and with the gateway."""

import hashlib
import os
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
BUILT = "kpl-gateway:1"
DIGEST = re.compile(r"sha256:[0-9a-f]{64}")
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
    assert needed | {".ci/locked/image.txt", ".ci/locked/image-build.txt"} == sources


def test_the_image_installs_locked_versions_with_hashes_and_takes_nothing_else_from_an_index() -> None:
    commands = re.findall(r"/opt/(?:kpl|build)/bin/pip (install|wheel) ([^&\n]+)", DOCKERFILE)
    assert len(commands) == 4
    for _, options in commands:
        locked = re.search(r"--require-hashes --requirement (image|image-build)\.txt", options)
        assert locked or "--no-deps" in options, options
    (built,) = (options for command, options in commands if command == "wheel")
    # Else pip would fetch the build backend in a version of its own choice.
    assert "--no-build-isolation" in built
    # A source distribution would do the same.
    assert "PIP_ONLY_BINARY=:all:" in DOCKERFILE


def test_each_image_is_named_by_its_digest() -> None:
    named = [*re.findall(r"^ARG PYTHON=(\S+)$", DOCKERFILE, re.MULTILINE)]
    named += [service["image"] for service in SERVICES.values() if service["image"] != BUILT]
    assert len(named) == 4
    assert [each for each in named if not re.fullmatch(r"docker\.io/[\w/-]+:[\w.-]+@sha256:[0-9a-f]{64}", each)] == []
    # All stages are of the one image.
    assert set(re.findall(r"^FROM (\S+)", DOCKERFILE, re.MULTILINE)) == {"${PYTHON}"}


def test_pin_images_writes_the_digest_of_each_tag(tmp_path: Path) -> None:
    for name in ("Dockerfile", "compose.yaml", "pin-images"):
        shutil.copy(DEPLOY / name, tmp_path)
    registry = tmp_path / "registry"
    registry.write_text(
        f"#!{sys.executable}\nimport hashlib, pathlib, sys\n"
        "with pathlib.Path(__file__ + '.asked').open('a') as asked: asked.write(sys.argv[1] + '\\n')\n"
        "print('sha256:' + hashlib.sha256(sys.argv[1].encode()).hexdigest())\n"
    )
    registry.chmod(0o755)
    subprocess.run([tmp_path / "pin-images"], env={**os.environ, "DIGEST_OF": str(registry)}, check=True)
    asked = (tmp_path / "registry.asked").read_text().split()
    assert sorted(asked) == sorted({*asked})
    assert len(asked) == 4
    for name in ("Dockerfile", "compose.yaml"):
        before, after = (DEPLOY / name).read_text(), (tmp_path / name).read_text()
        assert DIGEST.sub("", after) == DIGEST.sub("", before)
        for tag, digest in re.findall(r"(docker\.io/[\w/.:-]+)@sha256:([0-9a-f]{64})", after):
            assert digest == hashlib.sha256(tag.encode()).hexdigest()

    # A registry that does not answer changes nothing.
    unchanged = (tmp_path / "Dockerfile").read_text()
    registry.write_text("#!/bin/sh\necho 'no such host' >&2\n")
    failed = subprocess.run([tmp_path / "pin-images"], env={**os.environ, "DIGEST_OF": str(registry)}, check=False)
    assert failed.returncode == 1
    assert (tmp_path / "Dockerfile").read_text() == unchanged


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
    # No registry has this image, so compose must not look for it there: by default `pull` and `up` do.
    policies = {name: service.get("pull_policy") for name, service in SERVICES.items() if service["image"] == BUILT}
    assert policies == {"gateway": "build", "tenants": "never", "kinesis": "never"}
    assert not any("pull_policy" in service for service in SERVICES.values() if service["image"] != BUILT)
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
