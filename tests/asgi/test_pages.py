"""The Python on the adapters' pages runs."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.running_program import environment

PAGES = Path(__file__).parents[2] / "docs" / "howto"
BLOCKS = [
    pytest.param(match[1], id=f"{page}:{number}")
    for page in ("asgi.md", "asgi-outbox.md", "fastapi.md", "logging.md", "logging-load.md", "process-end.md")
    for number, match in enumerate(
        re.finditer(r"^```python\n(.*?)^```$", (PAGES / page).read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    )
]


@pytest.mark.parametrize("code", BLOCKS)
def test_the_code_on_a_page_runs(code: str, tmp_path: Path) -> None:
    ended = subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        cwd=tmp_path,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
    )
    assert (ended.returncode, ended.stderr) == (0, "")
