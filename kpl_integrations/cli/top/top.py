"""`kpl top`: a gateway at a glance, over and over on a terminal, once in a pipe."""

import sys
import time
from typing import Final

import aiohttp
import anyio
import msgspec
from rich.live import Live

from kpl_integrations.cli.exit_code import CommandFailure, ExitCode, until_signal
from kpl_integrations.cli.terminal import results
from kpl_integrations.cli.top.gateway_stats import ask, require_url
from kpl_integrations.cli.top.gateway_view import GatewayView, Watch
from kpl_integrations.cli.top.top_screen import screen

__all__ = ["Top"]

# Headline, figures, answers, refusals, two heads of tables and the blank lines between them.
_OTHER_LINES: Final = 17
# A gateway that is restarted is waited for, so long.
_PATIENCE_SECONDS: Final = 30.0


class Top:
    """One run of the command. `count` is how many times to look, None until Ctrl-C."""

    def __init__(self, url: str, *, key: str | None, interval: float, count: int | None, as_json: bool) -> None:
        self._url = url.rstrip("/")
        self._key = key
        self._interval = interval
        self._as_json = as_json
        self._is_live = sys.stdout.isatty() and not as_json
        self._left = count if count is not None or self._is_live else 1
        self._watch = Watch(self._url)

    async def run(self) -> ExitCode:
        """Look until Ctrl-C, or as often as was wanted; both are status 0."""
        require_url(self._url)
        await until_signal(self._look_on)
        return ExitCode.DONE

    async def _look_on(self) -> ExitCode:
        # The gateway is named by its address: no proxy has to do with it.
        async with aiohttp.ClientSession(trust_env=False) as session:
            # The first look has no rates; it also says at once what is wrong.
            await self._look(session)
            if self._is_live:
                await self._show_live(session)
            else:
                while self._left != 0:
                    await anyio.sleep(self._interval)
                    self._print(await self._look(session))
                    self._count_down()
        return ExitCode.DONE

    async def _show_live(self, session: aiohttp.ClientSession) -> None:
        console = results()
        with Live(console=console, screen=True, auto_refresh=False) as live:
            while self._left != 0:
                await anyio.sleep(self._interval)
                rows = max(1, (console.height - _OTHER_LINES) // 2)
                live.update(screen(await self._patient_look(session), rows=rows), refresh=True)
                self._count_down()

    async def _look(self, session: aiohttp.ClientSession) -> GatewayView:
        stats = await ask(session, self._url, self._key)
        return self._watch.look(stats, time.monotonic())

    async def _patient_look(self, session: aiohttp.ClientSession) -> GatewayView:
        """Look again until the gateway answers: whoever watches a restart wants to see its end."""
        deadline = time.monotonic() + _PATIENCE_SECONDS
        while True:
            try:
                return await self._look(session)
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
