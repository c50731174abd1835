"""Take the pictures of the dashboard for the documentation: `python -m benchmarks.dashboard_pictures [FOLDER]`.

It starts `kpl serve --local` with four tenants under load, and a Chromium: on a desktop and on a phone, light and dark.
One tenant sends to a single partition key, more than its shard takes, so it fills the queue. It takes a minute and a
half, and needs `chromium` on the PATH and the dependency group `test`.
"""

import json
import os
import re
import secrets
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import httpx
from playwright.sync_api import Browser, Page, sync_playwright

from benchmarks.png import with_palette
from kpl_integrations.ingest.tenants.credentials import new_api_key, stored_key

_FOLDER = Path(__file__).parents[1] / "docs" / "pictures"
_SECONDS = 75
# The flags stop the browser's requests to its vendor; root has no sandbox.
_FLAGS = (
    "--no-sandbox",
    "--disable-gpu",
    "--disable-lcd-text",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-sync",
)
_TICK_SECONDS = 0.1
# The pictures of a phone show the first questions, not the whole page, which is three windows long.
_PHONE_WIDTH = 390


class _Tenant(NamedTuple):
    """A tenant's load. `keys` is the number of its partition keys."""

    name: str
    records_per_second: int
    record_bytes: int
    keys: int
    rate: int = 5_000


_TENANTS = (
    _Tenant("bulk-import", 560, 2_000, 1),
    _Tenant("shop", 600, 300, 5_000),
    _Tenant("mobile", 350, 200, 5_000),
    _Tenant("partner-api", 800, 150, 5_000, rate=500),
)


class Picture(NamedTuple):
    """One picture and the window it is taken in."""

    name: str
    width: int
    height: int
    scheme: str


PICTURES = (
    Picture("dashboard-light", 1400, 900, "light"),
    Picture("dashboard-dark", 1400, 900, "dark"),
    Picture("dashboard-phone-light", 390, 1160, "light"),
    Picture("dashboard-phone-dark", 390, 1160, "dark"),
)


@contextmanager
def _gateway(folder: Path, keys: dict[str, str], admin_key: str) -> Iterator[str]:
    """Run a gateway with a local Kinesis; yield its URL."""
    entries = (
        f'[[tenant]]\nid = "{each.name}"\nrecords_per_second = {each.rate}\napi_keys = ["{stored_key(key)}"]\n'
        for each, key in ((each, keys[each.name]) for each in _TENANTS)
    )
    (folder / "tenants.toml").write_text("\n".join(entries), encoding="utf-8")
    command = [sys.executable, "-m", "kpl_integrations.cli", "serve", "--local", "--port", "0"]
    with subprocess.Popen(
        [*command, "--tenants", "tenants.toml", "--stream", "orders:4"],
        cwd=folder,
        env=os.environ
        | {
            "KPL_INGEST_ADMIN_KEY": admin_key,
            "KPL_INGEST_DRAIN_DELAY_SECONDS": "0",
            # The records are of no use after the pictures.
            "KPL_INGEST_CLOSE_SECONDS": "0.1",
        },
        stderr=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        found = re.search(r"http://[\d.:]+", process.stdout.readline())
        assert found is not None
        try:
            yield found[0]
        finally:
            process.terminate()


@contextmanager
def _load(url: str, keys: dict[str, str]) -> Iterator[None]:
    """Post the records of all tenants until the end of the block."""
    over = threading.Event()

    def post(tenant: _Tenant) -> None:
        headers = {"content-type": "application/x-ndjson", "authorization": f"Bearer {keys[tenant.name]}"}
        data, sent, began_at = "x" * tenant.record_bytes, 0, time.monotonic()
        with httpx.Client(base_url=url, headers=headers) as client:
            while not over.wait(_TICK_SECONDS):
                due = int((time.monotonic() - began_at) * tenant.records_per_second) - sent
                numbers = range(sent, sent + min(due, tenant.records_per_second))
                sent += due
                lines = (json.dumps({"partition_key": f"{n % tenant.keys}", "data": data}) for n in numbers)
                client.post("/v1/streams/orders/records?ack=queued", content="\n".join(lines))

    threads = [threading.Thread(target=post, args=(tenant,)) for tenant in _TENANTS]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        over.set()
        for thread in threads:
            thread.join()


def _opened(browser: Browser, picture: Picture, url: str, admin_key: str) -> Page:
    """Return the dashboard in a window of the picture's size."""
    window = {"width": picture.width, "height": picture.height}
    page = browser.new_page(viewport=window, color_scheme=picture.scheme)  # type: ignore[arg-type]
    page.goto(f"{url}/dashboard")
    page.fill("#key", admin_key)
    page.get_by_role("button", name="Log in").click()
    page.select_option("#range", "60")
    return page


def take_pictures(browser: Browser, folder: Path, *, seconds: float) -> list[Path]:
    """Write the pictures into `folder` after so many seconds of load; return their paths."""
    keys, admin_key = {each.name: new_api_key() for each in _TENANTS}, secrets.token_urlsafe(32)
    written = []
    with tempfile.TemporaryDirectory() as own, _gateway(Path(own), keys, admin_key) as url, _load(url, keys):
        pages = [_opened(browser, picture, url, admin_key) for picture in PICTURES]
        pages[0].wait_for_timeout(seconds * 1000)
        for page, picture in zip(pages, PICTURES, strict=True):
            written.append(folder / f"{picture.name}.png")
            written[-1].write_bytes(with_palette(page.screenshot(full_page=picture.width > _PHONE_WIDTH)))
            page.close()
    return written


def main(folder: Path) -> None:
    """Take the pictures with a Chromium of its own."""
    chromium = shutil.which("chromium")
    if chromium is None:
        message = "there is no `chromium` on the PATH; on Debian and Ubuntu: apt install chromium"
        raise SystemExit(message)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=list(_FLAGS))
        for path in take_pictures(browser, folder, seconds=_SECONDS):
            sys.stdout.write(f"{path}: {path.stat().st_size / 1024:.0f} KiB\n")
        browser.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else _FOLDER)
