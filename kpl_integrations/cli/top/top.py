"""`kpl top`: read `/v1/stats` of a gateway and show it, repeatedly on a terminal and once in a pipe."""

import sys
import time
from typing import Final
from urllib.parse import urlsplit

import aiohttp
import anyio
import msgspec
from rich.live import Live

from kpl_integrations.cli.exit_code import CommandFailure, ExitCode, until_signal
from kpl_integrations.cli.terminal import results
from kpl_integrations.cli.top.top_screen import screen
from kpl_integrations.gateway_figures import GatewayView, RateTracker, StatsDocument

# Headline, figures, answers, refusals, two table heads and the blank lines between them.
_OTHER_LINES: Final = 17
# How long the live view waits for a gateway that restarts.
_RESTART_SECONDS: Final = 30.0
_REQUEST_SECONDS: Final = 5.0
_KEY_VARIABLE: Final = "KPL_GATEWAY_KEY"
_LARGEST_ANSWER: Final = 16 * 1024 * 1024


async def ask(session: aiohttp.ClientSession, url: str, key: str | None) -> StatsDocument:
    """Return the figures of the gateway at `url`.

    Raises:
        CommandFailure: it is not reachable, rejects the key, or is not a gateway.
    """
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    try:
        async with session.get(
            f"{url}/v1/stats", headers=headers, timeout=aiohttp.ClientTimeout(_REQUEST_SECONDS), allow_redirects=False
        ) as answer:
            body = await answer.content.read(_LARGEST_ANSWER)
            status = answer.status
    except (aiohttp.ClientError, TimeoutError) as error:
        message = f"no gateway answers at {url}; check the address, or start one with `kpl serve`"
        raise CommandFailure(message) from error
    if status in {401, 403}:
        message = f"the gateway at {url} requires a key; set {_KEY_VARIABLE} to its admin key or to a tenant's key"
        raise CommandFailure(message)
    try:
        return msgspec.json.decode(body, type=StatsDocument)
    except msgspec.DecodeError as error:
        message = f"the server at {url} (status {status}) is not a gateway; give the address that `kpl serve` printed"
        raise CommandFailure(message) from error


def require_url(url: str) -> None:
    """Check that `url` can be the address of a gateway.

    Raises:
        CommandFailure: it is not an HTTP URL.
    """
    try:
        parts = urlsplit(url)
        is_url = parts.scheme in {"http", "https"} and bool(parts.hostname) and parts.port != 0
    except ValueError:
        is_url = False
    if not is_url:
        message = f"{url!r} is not the address of a gateway; write it like http://127.0.0.1:8080"
        raise CommandFailure(message, exit_code=ExitCode.WRONG_USAGE)


class Top:
    """One run of the command. `count` is the number of updates; None runs until Ctrl-C."""

    def __init__(self, url: str, *, key: str | None, interval: float, count: int | None, as_json: bool) -> None:
        self._url = url.rstrip("/")
        self._key = key
        self._interval = interval
        self._as_json = as_json
        self._is_live = sys.stdout.isatty() and not as_json
        self._left = count if count is not None or self._is_live else 1
        self._tracker = RateTracker(self._url)

    async def run(self) -> ExitCode:
        """Show updates until Ctrl-C or until `count` is reached; both are status 0."""
        require_url(self._url)
        await until_signal(self._show)
        return ExitCode.DONE

    async def _show(self) -> ExitCode:
        # The user gave the gateway's address, so environment variables for proxies are ignored.
        async with aiohttp.ClientSession(trust_env=False) as session:
            # The first update has no rates. It also reports a wrong address or key at once.
            await self._update(session)
            if self._is_live:
                await self._show_live(session)
            else:
                while self._left != 0:
                    await anyio.sleep(self._interval)
                    self._print(await self._update(session))
                    self._count_down()
        return ExitCode.DONE

    async def _show_live(self, session: aiohttp.ClientSession) -> None:
        console = results()
        with Live(console=console, screen=True, auto_refresh=False) as live:
            while self._left != 0:
                await anyio.sleep(self._interval)
                rows = max(1, (console.height - _OTHER_LINES) // 2)
                live.update(screen(await self._update_after_restart(session), rows=rows), refresh=True)
                self._count_down()

    async def _update(self, session: aiohttp.ClientSession) -> GatewayView:
        stats = await ask(session, self._url, self._key)
        return self._tracker.update(stats, time.monotonic())

    async def _update_after_restart(self, session: aiohttp.ClientSession) -> GatewayView:
        """Retry until the gateway answers, so that the live view survives a restart of the gateway."""
        deadline = time.monotonic() + _RESTART_SECONDS
        while True:
            try:
                return await self._update(session)
            except CommandFailure:
                if time.monotonic() >= deadline:
                    raise
                await anyio.sleep(self._interval)

    def _print(self, view: GatewayView) -> None:
        if self._as_json:
            sys.stdout.write(msgspec.json.encode(view).decode() + "\n")
            sys.stdout.flush()
        else:
            results().print(screen(view))

    def _count_down(self) -> None:
        if self._left is not None:
            self._left -= 1
