"""A real Chromium and the gateways it opens, each in its own process."""

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import NamedTuple

import pytest
from playwright.sync_api import Browser, sync_playwright

NO_CHROMIUM = "no `chromium` on the PATH, so the dashboard was not looked at (Debian, Ubuntu: apt install chromium)"
# Root has no sandbox; the other flags stop the browser's requests to its vendor at every start.
ARGUMENTS = (
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)


class Gateway(NamedTuple):
    url: str
    process: "subprocess.Popen[str]"


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    chromium = shutil.which("chromium")
    if chromium is None:
        pytest.skip(NO_CHROMIUM)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=list(ARGUMENTS))
        yield browser
        browser.close()


@contextmanager
def _running(folder: Path, *arguments: str, **environment: str) -> Iterator[Gateway]:
    process = subprocess.Popen(
        [sys.executable, "-m", "kpl_integrations.cli", "serve", "--port", "0", *arguments],
        cwd=folder,
        env=os.environ | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert process.stdout is not None
    try:
        said = process.stdout.readline()
        listening = re.search(r"https?://[\d.:]+", said)
        assert listening is not None, said + process.stdout.read()
        yield Gateway(listening[0], process)
    finally:
        process.terminate()
        process.communicate(timeout=30)


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Callable[..., Gateway]]:
    """Return a function that starts `kpl serve` with arguments and environment; the process is ended after the test."""
    with ExitStack() as stack:
        yield lambda *arguments, **environment: stack.enter_context(_running(tmp_path, *arguments, **environment))
