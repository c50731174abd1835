"""One worker of `kpl serve --workers`: a process that is told on its standard input what to be, and ends with it.

Its first line is a `Briefing`; the end of the input means that whoever started it is gone. It says `ready` on its
standard output, once. Its status is 0 if it ended in order, whatever became of the records: its totals tell that.
"""

import asyncio
import contextlib
import importlib.util
import logging
import os
import signal
import socket
import sys
from collections.abc import Callable, Iterator
from typing import Any, Final

import anyio
import msgspec

from kpl_core import ConfigError
from kpl_core.durability.spool import SpoolError
from kpl_integrations.cli.exit_code import CommandFailure, ExitCode, on_signal
from kpl_integrations.cli.serve.echoes import Echoes
from kpl_integrations.cli.serve.serve_parts import connection_of, through, who_may
from kpl_integrations.cli.terminal import note, print_failure
from kpl_integrations.ingest import IngestGateway, load_settings
from kpl_integrations.ingest.serving import GatewayServer
from kpl_integrations.ingest.workers.crew import READY
from kpl_integrations.ingest.workers.leftovers import holds_more
from kpl_integrations.ingest.workers.own_files import own_settings
from kpl_integrations.ingest.workers.seat import Seat

__all__ = ["Briefing", "main"]

_INPUT: Final = 0
_LOOK_SECONDS: Final = 0.25
_LOGGED: Final = (("kpl_integrations", logging.INFO), ("kpl_core", logging.INFO), ("uvicorn.error", logging.ERROR))


class Briefing(msgspec.Struct, frozen=True, kw_only=True):
    """What a worker is told: `given` are the command's options, `our_own` the URL of the Kinesis that it started.

    `descriptor` is the number of the listening socket; without one it only empties its spool.
    """

    seat: Seat
    descriptor: int | None
    given: dict[str, Any]
    local: bool
    first_stream: str
    our_own: str | None


class _Notes(logging.Handler):
    """Says who says it."""

    def __init__(self, worker: int) -> None:
        super().__init__()
        self._worker = worker

    def emit(self, record: logging.LogRecord) -> None:
        """Print one line on stderr."""
        note(f"{record.levelname.lower()}: worker {self._worker}: {record.getMessage()}")


async def _run(briefing: Briefing) -> None:
    """Serve, and be gone: everything is closed and told by then, and uvloop's own closing was seen to wait for ever."""
    await _serve(briefing)
    sys.stderr.flush()
    os._exit(ExitCode.DONE)


async def _serve(briefing: Briefing) -> None:
    settings = own_settings(load_settings(**briefing.given), briefing.seat.worker)
    directory = who_may(settings, local=briefing.local, first_stream=briefing.first_stream)
    settings, transport = through(settings, await connection_of(settings, briefing.our_own))
    gateway = IngestGateway(settings, directory, transport=transport, seat=briefing.seat)
    if briefing.descriptor is None:
        await _empty(gateway)
        return
    with socket.socket(fileno=briefing.descriptor) as listening:
        server = GatewayServer(gateway, listening)
        echoes = Echoes()

        def stop(number: signal.Signals = signal.SIGTERM) -> None:
            # Counted twice it would mean "hurry", and what was taken a moment ago would fail.
            if not echoes.is_echo(number, anyio.current_time()):
                server.stop(number)

        with on_signal(stop), _until_alone(stop):
            await server.run(started=_say_ready)


async def _empty(gateway: IngestGateway) -> None:
    """Deliver what an old file holds, without taking anything: records, and the letters that are tried again."""
    stopped = anyio.Event()

    def stop(_: signal.Signals = signal.SIGTERM) -> None:
        stopped.set()

    with on_signal(stop), _until_alone(stop):
        async with gateway:
            _say_ready()
            letters = gateway.producer.dead_letters
            while not stopped.is_set() and letters is not None and await holds_more(letters):
                with anyio.move_on_after(_LOOK_SECONDS):
                    await stopped.wait()


@contextlib.contextmanager
def _until_alone(stop: Callable[[], object]) -> Iterator[None]:
    """Stop when nobody holds the other end of the input any more."""
    loop = asyncio.get_running_loop()

    def look() -> None:
        if not os.read(_INPUT, 4_096):
            loop.remove_reader(_INPUT)
            stop()

    loop.add_reader(_INPUT, look)
    try:
        yield
    finally:
        loop.remove_reader(_INPUT)


def _say_ready() -> None:
    # Whoever wanted to know may be gone: the end of the input tells that.
    with contextlib.suppress(OSError):
        os.write(sys.stdout.fileno(), READY)


def _briefing() -> Briefing:
    line = b""
    while not line.endswith(b"\n"):
        # Byte by byte: what follows belongs to the loop.
        byte = os.read(_INPUT, 1)
        if not byte:
            message = "a worker is started by `kpl serve --workers`, which tells it what to be; start that"
            raise CommandFailure(message)
        line += byte
    return msgspec.json.decode(line, type=Briefing)


def main() -> int:
    """Serve; return the exit status."""
    try:
        briefing = _briefing()
        for name, level in _LOGGED:
            logging.getLogger(name).addHandler(_Notes(briefing.seat.worker))
            logging.getLogger(name).setLevel(level)
        options = {"use_uvloop": importlib.util.find_spec("uvloop") is not None}
        anyio.run(_run, briefing, backend_options=options)
    except ConfigError as error:
        print_failure(CommandFailure(str(error)))
        return ExitCode.WRONG_USAGE
    except SpoolError as error:
        print_failure(CommandFailure(str(error)))
        return ExitCode.UNUSABLE
    except CommandFailure as failure:
        print_failure(failure)
        return failure.exit_code
    return ExitCode.DONE


if __name__ == "__main__":
    sys.exit(main())
