"""The Python code on the pages runs: programs with a local Kinesis, tests with pytest."""

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import kpl_core
from kpl_integrations.local_kinesis import LocalKinesis, ThreadedLocalKinesis

ROOT = Path(__file__).parents[2]
PAGES = (
    "README.md",
    "docs/configuration.md",
    "docs/howto/aws-sdk.md",
    "docs/howto/consuming.md",
    "docs/howto/producer.md",
    "docs/howto/producer-streams.md",
    "docs/howto/producer-threads.md",
    "docs/howto/tenants.md",
    "docs/howto/testing.md",
    "docs/howto/topics.md",
)
PACKAGES = str(Path(next(iter(kpl_core.__path__))).parent)


def _blocks(page: str) -> Iterator[tuple[str, str]]:
    """Yield (page:line, code) of each Python block."""
    text = (ROOT / page).read_text(encoding="utf-8")
    for match in re.finditer(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL):
        yield f"{page}:{text.count(chr(10), 0, match.start()) + 2}", match[1]


BLOCKS = [block for page in PAGES for block in _blocks(page)]
TESTS = [block for block in BLOCKS if "def test_" in block[1]]
PROGRAMS = [block for block in BLOCKS if block not in TESTS]


@pytest.fixture(scope="module")
def kinesis() -> Iterator[ThreadedLocalKinesis]:
    with ThreadedLocalKinesis(LocalKinesis({"orders": 4, "audit": 1, "clicks": 2})) as running:
        yield running


@pytest.mark.parametrize(("place", "code"), PROGRAMS, ids=[place for place, _ in PROGRAMS])
def test_a_program_on_a_page_prints_what_its_comments_promise(
    place: str,
    code: str,
    kinesis: ThreadedLocalKinesis,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    # As the page instructs the reader.
    monkeypatch.setenv("AWS_ENDPOINT_URL_KINESIS", kinesis.endpoint_url)
    exec(compile(code, place, "exec"), {"__name__": "__main__"})  # noqa: S102 - our own documentation
    printed = capsys.readouterr()
    assert printed.err == ""
    assert "False" not in printed.out
    promised = re.findall(r"print\(.*\)  # (.+)$", code, re.MULTILINE)
    assert [line for line in promised if line not in printed.out.splitlines()] == []


@pytest.mark.long
def test_the_tests_on_the_pages_pass(tmp_path: Path) -> None:
    for number, (_, code) in enumerate(TESTS):
        (tmp_path / f"test_page_{number}.py").write_text(code, encoding="utf-8")
    ended = subprocess.run(
        [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-W",
            "error",
            "-p",
            "no:cacheprovider",
            "--rootdir",
            tmp_path,
            tmp_path,
        ],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": PACKAGES},
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr


def test_the_pages_have_programs_and_tests() -> None:
    assert len(PROGRAMS) >= 10
    assert len(TESTS) >= 4
