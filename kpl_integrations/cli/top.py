"""`kpl top`: read `/v1/stats` of a gateway and show it, repeatedly on a terminal and once in a pipe."""

import itertools
import sys
import time
from collections.abc import Iterable, Sequence
from typing import Final
from urllib.parse import urlsplit

import aiohttp
import anyio
import msgspec
from rich.console import Group, RenderableType
from rich.live import Live
from rich.padding import Padding
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from kpl_integrations.cli.exit_code import CommandFailure, ExitCode, until_signal
from kpl_integrations.cli.terminal import print_json, results
from kpl_integrations.gateway_figures import GatewayView, RateTracker, StatsDocument

# Headline, figures, answers, refusals, two table heads and the blank lines between them.
_OTHER_LINES: Final = 17
# How long the live view waits for a gateway that restarts.
_RESTART_SECONDS: Final = 30.0
_REQUEST_SECONDS: Final = 5.0
_KEY_VARIABLE: Final = "KPL_GATEWAY_KEY"
_LARGEST_ANSWER: Final = 16 * 1024 * 1024
_BLOCKS: Final = " ▁▂▃▄▅▆▇█"
_STATE_STYLES: Final = {"open": "bold green", "draining": "bold yellow"}
_NEARLY_FULL: Final = 0.8
_BAR_WIDTH: Final = 24
# Rows for streams, and as many for tenants, on a small terminal.
_MOST_ROWS: Final = 12
_THOUSANDS: Final = ((1e9, "G"), (1e6, "M"), (1e3, "k"))


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
        count = count if count is not None or self._is_live else 1
        self._updates = itertools.count() if count is None else range(count)
        self._tracker = RateTracker(self._url)

    async def run(self) -> ExitCode:
        """Show updates until Ctrl-C or until `count` is reached; both are status 0."""
        require_url(self._url)
        await until_signal(self._show)
        return ExitCode.DONE

    async def _show(self) -> None:
        # The user gave the gateway's address, so environment variables for proxies are ignored.
        async with aiohttp.ClientSession(trust_env=False) as session:
            # The first update has no rates. It also reports a wrong address or key at once.
            await self._update(session)
            if self._is_live:
                await self._show_live(session)
            else:
                for _ in self._updates:
                    await anyio.sleep(self._interval)
                    self._print(await self._update(session))

    async def _show_live(self, session: aiohttp.ClientSession) -> None:
        console = results()
        with Live(console=console, screen=True, auto_refresh=False) as live:
            for _ in self._updates:
                await anyio.sleep(self._interval)
                rows = max(1, (console.height - _OTHER_LINES) // 2)
                live.update(screen(await self._update_after_restart(session), rows=rows), refresh=True)

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
            print_json(view)
        else:
            results().print(screen(view))


def screen(view: GatewayView, *, rows: int = _MOST_ROWS) -> RenderableType:
    """Return the whole screen with at most `rows` streams and at most `rows` tenants."""
    parts: list[RenderableType] = [_headline(view)]
    if view.records is not None:
        parts.append(Padding(_figures(view), (1, 0, 0, 0)))
    if view.answers_per_second:
        parts.append(Padding(_rates("answers", view.answers_per_second), (1, 0, 0, 0)))
    if any(view.refusals_per_second.values()):
        parts.append(_rates("refused", view.refusals_per_second))
    if view.streams:
        parts.append(Padding(_streams(view, rows), (1, 0, 0, 0)))
    if view.tenants:
        parts.append(Padding(_tenants(view, rows), (1, 0, 0, 0)))
    return Group(*parts)


def _headline(view: GatewayView) -> Text:
    line = Text(f"{view.url}  ")
    line.append(view.state, _STATE_STYLES.get(view.state, "bold red"))
    if view.delivered_history:
        line.append(f"  {_sparkline(view.delivered_history)}", "cyan")
    return line


def _figures(view: GatewayView) -> Table:
    table = Table.grid(padding=(0, 2))
    records, room = view.records, view.room
    assert records is not None  # noqa: S101 - the caller checked
    failed = sum(records.failed.values())
    table.add_row("accepted", _bold(f"{_short(view.accepted_per_second)}/s"), f"{records.accepted:,} in all")
    table.add_row("delivered", _bold(f"{_short(view.delivered_per_second)}/s"), f"{records.delivered:,} in all")
    reasons = ", ".join(f"{count:,} {reason}" for reason, count in sorted(records.failed.items()))
    table.add_row("failed", Text(f"{failed:,}", "bold red" if failed else "bold"), reasons)
    if records.lost:
        table.add_row("lost", Text(f"{records.lost:,}", "bold red"), "with a worker that died")
    if records.spooled or records.dead_lettered:
        table.add_row("kept", _bold(f"{records.spooled:,} spooled"), f"{records.dead_lettered:,} dead letters")
    if room is not None and room.max_bytes:
        used, limit = _size(room.outstanding_bytes), _size(room.max_bytes)
        words = f"{used} of {limit}, {room.outstanding_records:,} records"
        table.add_row("buffer", _bar(room.used_share), words)
    return table


def _rates(name: str, rates: dict[str, float]) -> Text:
    line = Text(f"{name}  ")
    for label, rate in rates.items():
        line.append(f"{label} ", "dim")
        line.append(f"{_short(rate)}/s   ", "bold")
    return line


def _streams(view: GatewayView, rows: int) -> Table:
    table = _table("stream", "accepted/s", "delivered/s", "waiting", "in flight", "buffered", "failed", "breakers")
    for each in view.streams[:rows]:
        breakers = ", ".join(f"{shard or 'stream'} {state}" for shard, state in each.breakers.items())
        table.add_row(
            each.stream,
            _short(each.accepted_per_second),
            _short(each.delivered_per_second),
            f"{each.waiting:,}",
            f"{each.in_flight:,}",
            f"{each.buffered:,}",
            Text(f"{each.failed:,}", "red" if each.failed else ""),
            Text(breakers or "closed", "red" if breakers else "dim"),
        )
    return _with_more(table, view.streams, rows)


def _tenants(view: GatewayView, rows: int) -> Table:
    table = _table("tenant", "requests/s", "records/s", "refused/s", "waiting", "waiting size")
    for each in view.tenants[:rows]:
        table.add_row(
            each.tenant,
            _short(each.requests_per_second),
            _short(each.records_per_second),
            Text(_short(each.refused_per_second), "yellow" if each.refused_per_second else ""),
            f"{each.waiting_records:,}",
            _size(each.waiting_bytes),
        )
    return _with_more(table, view.tenants, rows)


def _table(*columns: str) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold dim", padding=(0, 2, 0, 0))
    for number, name in enumerate(columns):
        table.add_column(name, justify="right" if number > 0 and name != "breakers" else "left", no_wrap=True)
    return table


def _with_more(table: Table, all_of_them: Sequence[object], rows: int) -> Table:
    if len(all_of_them) > rows:
        table.add_row(Text(f"and {len(all_of_them) - rows:,} more", "dim"))
    return table


def _bar(share: float) -> ProgressBar:
    style = "red" if share >= _NEARLY_FULL else "green"
    return ProgressBar(total=1.0, completed=min(1.0, share), width=_BAR_WIDTH, complete_style=style)


def _bold(text: str) -> Text:
    return Text(text, "bold")


def _sparkline(values: Iterable[float]) -> str:
    shown = list(values)
    most = max(shown)
    if most <= 0:
        return ""
    return "".join(_BLOCKS[round(value / most * (len(_BLOCKS) - 1))] for value in shown)


def _size(size_bytes: float) -> str:
    """Return a size in the units of the options and the pages, such as 32.0 MiB."""
    for unit, letter in ((1 << 30, "Gi"), (1 << 20, "Mi"), (1 << 10, "Ki")):
        if size_bytes >= unit:
            return f"{size_bytes / unit:,.1f} {letter}B"
    return f"{size_bytes:.0f} B"


def _short(number: float) -> str:
    """Return a number in at most five characters, such as 12.3k."""
    for size, letter in _THOUSANDS:
        if number >= size:
            return f"{number / size:.1f}{letter}"
    return f"{number:.0f}" if number == int(number) else f"{number:.1f}"
