"""Every file in examples/ is a program that ends by itself with exit status 0, and prints something.

An example that uses a Kinesis takes it from KPL_ENDPOINT_URL and puts to its stream `orders`. Without
that variable it starts its own LocalKinesis.
"""

import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

import kpl_core
from kpl_core.testing import FakeKinesis
from kpl_integrations.local_kinesis import LocalKinesis, ThreadedLocalKinesis

EXAMPLES = sorted((Path(__file__).parents[1] / "examples").glob("*.py"))
WITH_KINESIS = [path for path in EXAMPLES if "KPL_ENDPOINT_URL" in path.read_text(encoding="utf-8")]
# The folder of the packages: the checkout, or the site-packages of the installed wheel.
PACKAGES = str(Path(next(iter(kpl_core.__path__))).parent)
SECONDS = 110
pytestmark = [pytest.mark.long, pytest.mark.timeout(SECONDS + 10)]


def _run(example: Path, folder: Path, environment: Mapping[str, str]) -> str:
    """Run an example in an empty folder, with warnings as errors; return its output."""
    ended = subprocess.run(
        [sys.executable, "-W", "error", example],
        cwd=folder,
        env={"PYTHONPATH": PACKAGES, **environment},
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
    )
    assert ended.returncode == 0, f"exit status {ended.returncode}\n{ended.stdout}\n{ended.stderr}"
    assert ended.stderr == ""
    return ended.stdout


@pytest.fixture(scope="module")
def kinesis() -> Iterator[ThreadedLocalKinesis]:
    with ThreadedLocalKinesis(LocalKinesis({"orders": 4})) as running:
        yield running


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_runs_by_itself(example: Path, tmp_path: Path) -> None:
    # No credentials, no region, and a proxy that must not be used for this machine.
    environment = {name: value for name, value in os.environ.items() if name in {"PATH", "HOME", "LANG", "TMPDIR"}}
    printed = _run(example, tmp_path, environment | {"HTTP_PROXY": "http://127.0.0.1:1"})
    assert printed.strip()


@pytest.mark.parametrize("example", WITH_KINESIS, ids=lambda path: path.stem)
def test_an_example_puts_to_the_kinesis_of_the_environment_variable(
    example: Path, kinesis: ThreadedLocalKinesis, tmp_path: Path
) -> None:
    before = kinesis.call(_stored)
    _run(example, tmp_path, os.environ | {"KPL_ENDPOINT_URL": kinesis.endpoint_url})
    assert kinesis.call(_stored) > before


def _stored(fake: FakeKinesis, now: float) -> int:
    return len(fake.records("orders"))


def test_there_are_examples() -> None:
    assert {"quickstart", "blocking"} <= {path.stem for path in EXAMPLES}
