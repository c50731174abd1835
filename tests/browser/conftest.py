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
from playwright.sync_api import Browser

from tests.support.chromium import NO_CHROMIUM, chromium


class Gateway(NamedTuple):
    url: str
    process: "subprocess.Popen[str]"


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    if shutil.which("chromium") is None:
        pytest.skip(NO_CHROMIUM)
    with chromium() as browser:
        yield browser


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
