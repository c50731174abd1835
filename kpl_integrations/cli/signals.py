"""SIGINT and SIGTERM as a callback, so that a command ends in order and with the right status."""

import asyncio
import signal
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Final

import anyio

from kpl_integrations.cli.exit_code import ExitCode

__all__ = ["exit_code_of", "on_signal", "until_signal"]

_EXIT_CODES: Final = {signal.SIGINT: ExitCode.INTERRUPTED, signal.SIGTERM: ExitCode.TERMINATED}


def exit_code_of(number: signal.Signals) -> ExitCode:
    """Return the exit status of a command that a signal kept from finishing."""
    return _EXIT_CODES[number]


@contextmanager
def on_signal(callback: Callable[[signal.Signals], object]) -> Iterator[None]:
    """Call `callback` for each SIGINT and SIGTERM inside the block; needs the running asyncio loop."""
    loop = asyncio.get_running_loop()
    # Windows' loops know no signal handlers: there Ctrl-C stays a KeyboardInterrupt.
    with suppress(NotImplementedError):
        for number in _EXIT_CODES:
            loop.add_signal_handler(number, callback, number)
    try:
        yield
    finally:
        with suppress(NotImplementedError):
            for number in _EXIT_CODES:
                loop.remove_signal_handler(number)


async def until_signal(work: Callable[[], Awaitable[ExitCode]]) -> ExitCode | signal.Signals:
    """Return what `work` returns, or the signal that cancelled it."""
    received: list[signal.Signals] = []

    def cancel(number: signal.Signals) -> None:
        received.append(number)
        scope.cancel()

    with anyio.CancelScope() as scope, on_signal(cancel):
        return await work()
    return received[0]
