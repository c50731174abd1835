"""How a command ends: exit statuses, failures and signals. docs/howto/cli.md shows the table of statuses."""

import asyncio
import signal
import sys
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from enum import IntEnum
from typing import Final

import anyio


class ExitCode(IntEnum):
    """The exit statuses of all commands. Typer itself uses 2 for wrong usage."""

    DONE = 0
    NOT_ALL_ARRIVED = 1
    WRONG_USAGE = 2
    # Kinesis, or something on this machine, cannot be used: unreachable, no credentials, no stream, no permission.
    UNUSABLE = 3
    # A line or a file of the input.
    BAD_INPUT = 4
    INTERRUPTED = 130
    # As a shell reports SIGPIPE.
    OUTPUT_CLOSED = 141
    TERMINATED = 143


SIGNAL_CODES: Final = {signal.SIGINT: ExitCode.INTERRUPTED, signal.SIGTERM: ExitCode.TERMINATED}


class CommandFailure(Exception):  # noqa: N818 - reads as a sentence where it is raised
    """The command cannot continue. The message is one sentence: the wrong value, then what to do."""

    def __init__(self, message: str, *, exit_code: ExitCode = ExitCode.UNUSABLE) -> None:
        super().__init__(message)
        self.exit_code = exit_code


@contextmanager
def on_signal(callback: Callable[[signal.Signals], object]) -> Iterator[None]:
    """Call `callback` for each SIGINT and SIGTERM inside the block; needs the running asyncio loop."""
    loop = asyncio.get_running_loop()
    # Event loops on Windows do not support signal handlers: there Ctrl-C stays a KeyboardInterrupt.
    with suppress(NotImplementedError):
        for number in SIGNAL_CODES:
            loop.add_signal_handler(number, callback, number)
    try:
        yield
    finally:
        with suppress(NotImplementedError):
            for number in SIGNAL_CODES:
                loop.remove_signal_handler(number)


@contextmanager
def on_hangup(callback: Callable[[], object]) -> Iterator[None]:
    """Call `callback` for each SIGHUP inside the block, where the system has it; needs the running asyncio loop.

    A terminal sends SIGHUP when it is closed. Then it ends the command, and `callback` is not called.
    """
    number = getattr(signal, "SIGHUP", None)
    if number is None or (sys.stdin is not None and sys.stdin.isatty()):
        yield
        return
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(number, callback)
    try:
        yield
    finally:
        loop.remove_signal_handler(number)


async def until_signal(work: Callable[[], Awaitable[ExitCode | None]]) -> ExitCode:
    """Run `work` and return its exit status, or that of the signal that cancelled it."""
    received: list[signal.Signals] = []

    def cancel(number: signal.Signals) -> None:
        received.append(number)
        scope.cancel()

    with anyio.CancelScope() as scope, on_signal(cancel):
        return await work() or ExitCode.DONE
    return SIGNAL_CODES[received[0]]
