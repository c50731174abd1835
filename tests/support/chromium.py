"""A real Chromium, driven by Playwright."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from playwright.sync_api import Browser, sync_playwright

NO_CHROMIUM = "no `chromium` on the PATH, so the dashboard was not looked at (Debian, Ubuntu: apt install chromium)"
needs_chromium = pytest.mark.skipif(shutil.which("chromium") is None, reason=NO_CHROMIUM)
# Root has no sandbox; the other flags stop the browser's requests to its vendor at every start.
_ARGUMENTS = (
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)


@contextmanager
def chromium() -> Iterator[Browser]:
    """Run the browser for the block."""
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=list(_ARGUMENTS))
        yield browser
        browser.close()
