"""A real Prometheus that scrapes one target every second, with the alert rules of the docs."""

import shutil
import urllib.parse
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.metrics import OBSERVABILITY
from tests.support.processes import LOOPBACK, answers, free_ports, own_process

NO_PROMETHEUS = "no `prometheus` on the PATH, so nothing was scraped (Debian, Ubuntu: apt install prometheus)"
needs_prometheus = pytest.mark.skipif(shutil.which("prometheus") is None, reason=NO_PROMETHEUS)
CONFIGURATION = """\
global: {{ scrape_interval: 1s, evaluation_interval: 1s }}
rule_files: ["{rules}"]
scrape_configs:
  - job_name: {job}
    scheme: {scheme}
    tls_config: {{ insecure_skip_verify: true }}
    static_configs: [{{ targets: ["{target}"] }}]
"""


@contextmanager
def prometheus(target: str, logs: Path, *, job: str = "producer", scheme: str = "http") -> Iterator[str]:
    """Yield the URL of a Prometheus that scrapes `target` every second."""
    place = logs / "prometheus"
    place.mkdir()
    configuration = place / "prometheus.yml"
    configuration.write_text(
        CONFIGURATION.format(rules=OBSERVABILITY / "alerts.yml", job=job, scheme=scheme, target=target)
    )
    (port,) = free_ports(1)
    command = [
        str(shutil.which("prometheus")),
        f"--config.file={configuration}",
        f"--storage.tsdb.path={place / 'data'}",
        f"--web.listen-address={LOOPBACK}:{port}",
    ]
    with own_process("prometheus", command, logs=logs) as process:
        process.wait_until(lambda: answers(port), what=f"answer on port {port}")
        url = f"http://{LOOPBACK}:{port}"
        process.wait_until(lambda: httpx.get(f"{url}/-/ready", timeout=5).is_success, what="readiness")
        yield url


def asked(url: str, path: str, **parameters: str) -> Any:
    answer = httpx.get(f"{url}/api/v1/{path}?{urllib.parse.urlencode(parameters)}", timeout=10).json()
    assert answer["status"] == "success", answer
    return answer["data"]
