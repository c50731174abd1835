"""The Python code on the pages passes type checkers, so copied code shows no errors in an editor."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import kpl_core

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
BLOCK = re.compile(r"^```python(?: title=\"(?P<title>.*?)\")?\n(?P<code>.*?)^```$", re.MULTILINE | re.DOTALL)
PACKAGES = str(Path(next(iter(kpl_core.__path__))).parent)
SECONDS = 280


def programs(folder: Path) -> list[str]:
    """Write each block to a module; blocks with the same title are appended to one module."""
    names: list[str] = []
    for page in PAGES:
        place = re.sub(r"\W", "_", str(page.relative_to(ROOT)))
        for number, block in enumerate(BLOCK.finditer(page.read_text(encoding="utf-8"))):
            title = block["title"] or ""
            name = title if title.endswith(".py") else f"{place}_{number}.py"
            with (folder / name).open("a", encoding="utf-8") as file:
                file.write(block["code"])
            names.append(name)
    return sorted(set(names))


@pytest.mark.long
@pytest.mark.timeout(SECONDS + 10)
def test_mypy_strict_accepts_the_code_on_the_pages(tmp_path: Path) -> None:
    pytest.importorskip("mypy")
    names = programs(tmp_path)
    assert len(names) > 40
    (tmp_path / "mypy.ini").write_text(
        # Packages without published types, and a program of a page that another one imports.
        "[mypy]\n[mypy-aiobotocore.*,boto3.*,celery.*,consumer,django.*,lambda_orders,uvicorn_worker]\n"
        "ignore_missing_imports = True\n",
        encoding="utf-8",
    )
    ended = subprocess.run(
        # The decorators of Celery and Django have no types, and gunicorn's workers neither.
        [sys.executable, "-m", "mypy", "--strict", "--allow-untyped-decorators", "--allow-subclassing-any", *names],
        cwd=tmp_path,
        # mypy finds installed packages itself, and rejects a MYPYPATH inside site-packages.
        env=os.environ | ({} if "site-packages" in PACKAGES else {"MYPYPATH": PACKAGES}),
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
