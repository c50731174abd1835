"""One worker process of `kpl serve --workers`. The supervisor starts it, with a socket pair as its standard input.

The first line is its `Instructions`; `ingest/workers/link.py` describes the others. It exits with status 0 if it
stopped in order, even if records failed: its last report has their counts.
"""

import asyncio
import contextlib
import importlib.util
import logging
import os
import signal
import socket
import stat
import sys
from collections.abc import Callable, Iterator
from typing import Any, Final

import anyio
import msgspec

from kpl_integrations.cli.exit_code import CommandFailure, ExitCode, on_signal
from kpl_integrations.cli.serve.gateway_parts import connect, known_failures, tenant_directory
from kpl_integrations.cli.terminal import note, print_failure
from kpl_integrations.ingest import IngestGateway, load_settings
from kpl_integrations.ingest.serving import GatewayServer
from kpl_integrations.ingest.workers.identity import WorkerIdentity
from kpl_integrations.ingest.workers.link import Channel, StopRequests, SupervisorLink
from kpl_integrations.ingest.workers.spool_files import has_more, settings_of_worker

_INPUT: Final = 0
_POLL_SECONDS: Final = 0.25
_LOGGED: Final = (("kpl_integrations", logging.INFO), ("kpl_core", logging.INFO), ("uvicorn.error", logging.ERROR))


class Instructions(msgspec.Struct, frozen=True, kw_only=True):
    """What a worker is: `given` are the command's options, `embedded_url` the local Kinesis that the command started.

    `descriptor` is that of the listening socket; without one the worker only drains an orphaned spool.
    """

    identity: WorkerIdentity
    descriptor: int | None
    given: dict[str, Any]
    local: bool
    first_stream: str
    embedded_url: str | None


class _LogLines(logging.Handler):
    """Writes log records to stderr, with the number of the worker."""

    def __init__(self, worker: int) -> None:
        super().__init__()
        self._worker = worker

    def emit(self, record: logging.LogRecord) -> None:
        """Write one line."""
        note(f"{record.levelname.lower()}: worker {self._worker}: {record.getMessage()}")


async def _run() -> None:
    if not stat.S_ISSOCK(os.fstat(_INPUT).st_mode):
        message = "`kpl serve --workers` starts the workers; start that command instead"
        raise CommandFailure(message)
    channel = await Channel.over(socket.socket(fileno=_INPUT))
    status = ExitCode.DONE
    try:
        first = await channel.receive()
        if first is not None:
            with known_failures():
                await _serve(msgspec.json.decode(first, type=Instructions), channel)
    except CommandFailure as failure:
        print_failure(failure)
        status = failure.exit_code
    # All is closed and reported. uvloop's own closing was seen to hang, so do not wait for it.
    sys.stderr.flush()
    os._exit(status)


async def _serve(instructions: Instructions, channel: Channel) -> None:
    for name, level in _LOGGED:
        logging.getLogger(name).addHandler(_LogLines(instructions.identity.worker))
        logging.getLogger(name).setLevel(level)
    link = SupervisorLink(channel, instructions.identity)
    settings = settings_of_worker(load_settings(**instructions.given), link.identity.worker)
    directory = tenant_directory(settings, local=instructions.local, first_stream=instructions.first_stream)
    settings, transport = await connect(settings, instructions.embedded_url)
    gateway = IngestGateway(settings, directory, transport=transport, supervisor=link)
    if instructions.descriptor is None:
        stopped = anyio.Event()
        with _obeying(link, lambda _: stopped.set()):
            await _drain(gateway, link.channel, stopped)
    else:
        with socket.socket(fileno=instructions.descriptor) as listening:
            server = GatewayServer(gateway, listening)
            with _obeying(link, server.stop):
                await server.run(started=lambda: link.channel.post(b"ready"))


@contextlib.contextmanager
def _obeying(link: SupervisorLink, stop: Callable[[signal.Signals], object]) -> Iterator[None]:
    """Call `stop` when the supervisor or a signal asks for it, or the supervisor is gone."""
    requests = StopRequests(stop)
    # No task group: it would wrap the errors that `main` turns into an exit status.
    task = asyncio.create_task(link.run(requests))
    try:
        with on_signal(requests.signalled):
            yield
    finally:
        task.cancel()


async def _drain(gateway: IngestGateway, channel: Channel, stopped: anyio.Event) -> None:
    """Deliver what an orphaned spool holds, dead letters due for redrive included, without accepting requests."""
    async with gateway:
        channel.post(b"ready")
        letters = gateway.producer.dead_letters
        while not stopped.is_set() and letters is not None and await has_more(letters):
            with anyio.move_on_after(_POLL_SECONDS):
                await stopped.wait()


def main() -> int:
    """Serve, and exit with the status; return one only if this process was not started by the supervisor."""
    try:
        anyio.run(_run, backend_options={"use_uvloop": importlib.util.find_spec("uvloop") is not None})
    except CommandFailure as failure:
        print_failure(failure)
    return ExitCode.UNUSABLE


if __name__ == "__main__":
    sys.exit(main())
