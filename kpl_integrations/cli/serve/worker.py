"""A gateway process of `kpl serve`: what each one is made of, and the worker process of `--workers`.

The supervisor starts a worker with a socket pair as its standard input. The first line is its `Instructions`;
`ingest/workers/link.py` describes the others. It exits with status 0 if it stopped in order, even if records failed:
its last report has their counts.
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
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final, Self

import anyio
import msgspec

from kpl_core import ConfigError
from kpl_core.durability.spool import SpoolError
from kpl_core.transport import KinesisTransport
from kpl_integrations.cli.connection import Connection, is_this_machine
from kpl_integrations.cli.exit_code import CommandFailure, ExitCode, on_hangup, on_signal
from kpl_integrations.cli.options import endpoint_of_environment
from kpl_integrations.cli.terminal import (
    LogFormat,
    log_format_of_environment,
    print_exceptions_as,
    print_failure,
    show_all_logs,
)
from kpl_integrations.ingest import IngestGateway, IngestSettings
from kpl_integrations.ingest.http.listening import SpareSockets
from kpl_integrations.ingest.serving import GatewayServer
from kpl_integrations.ingest.settings_sources import PREFIX, LoadedSettings, Setting, find_settings, read_settings_file
from kpl_integrations.ingest.tenants import SIGNALS, FileTenants, OpenTenants, Tenant, TenantDirectory
from kpl_integrations.ingest.workers.link import (
    Channel,
    Descriptors,
    StopRequests,
    SupervisorLink,
    WorkerIdentity,
)
from kpl_integrations.ingest.workers.record_counts import RecordCounts
from kpl_integrations.ingest.workers.spool_files import has_more, settings_of_worker

_INPUT: Final = 0
_POLL_SECONDS: Final = 0.25
LOGGED: Final = {"kpl_integrations": logging.INFO, "kpl_core": logging.INFO, "uvicorn.error": logging.ERROR}
# A developer presses Ctrl-C, and no load balancer has to notice. Any web page could reach the gateway through the
# developer's browser, so it answers only to loopback names, and to those that are allowed.
_LOCAL: Final = {
    "drain_delay_seconds": Setting(0.0, "--local"),
    "allowed_hosts": Setting("localhost", "--local"),
}
_ENDPOINT: Final = f"{PREFIX}ENDPOINT_URL"


class Given(msgspec.Struct, frozen=True, kw_only=True):
    """What the command line says about settings: its options, those of `--set`, and the file of `--config`.

    The file is read once, because a worker that replaces another one must have the settings of its gateway, even if the
    file was edited for a later start.
    """

    options: dict[str, Any]
    assigned: dict[str, str]
    file: str | None
    local: bool
    file_text: str | None = None

    def with_file_text(self) -> Self:
        """Return the same with what the file has now.

        Raises:
            ConfigError: it cannot be read.
        """
        if self.file is None:
            return self
        return msgspec.structs.replace(self, file_text=read_settings_file(Path(self.file)))

    def log_format(self) -> LogFormat:
        """Return the log format of the settings, even if another setting is wrong."""
        in_file = None
        with contextlib.suppress(ValueError, RecursionError):
            in_file = tomllib.loads(self.file_text or "").get("log_format")
        return log_format_of_environment(self.assigned.get("log_format"), in_file)

    def settings(self) -> LoadedSettings:
        """Return the settings of the command line, the environment and the file.

        Raises:
            ConfigError: one is unknown or invalid.
        """
        given = {name: value for name, value in self.options.items() if value is not None}
        # Another Kinesis that the environment names is not local.
        ignored = {_ENDPOINT} if self.local else set()
        environment = {name: text for name, text in os.environ.items() if name.upper() not in ignored}
        settings, made = find_settings(
            given,
            file=None if self.file is None else Path(self.file),
            file_text=self.file_text,
            environment=environment,
            assigned=self.assigned,
            presets=_LOCAL if self.local else {},
        )
        if self.local:
            _require_local_endpoint(made.get("endpoint_url"))
        elif settings.producer.endpoint_url is None and (endpoint := endpoint_of_environment()) is not None:
            settings = settings.with_producer(endpoint_url=endpoint)
            made = {**made, "endpoint_url": Setting(endpoint, "AWS_ENDPOINT_URL_KINESIS or AWS_ENDPOINT_URL")}
        return LoadedSettings(settings, made)


def _require_local_endpoint(endpoint: Setting | None) -> None:
    if endpoint is not None and not endpoint.origin.startswith("--"):
        message = (
            f"{endpoint.origin}: endpoint_url is set, and --local starts a Kinesis of its own; remove one of them, or "
            f"name a local Kinesis with --endpoint-url"
        )
        raise ConfigError(message)


class Instructions(msgspec.Struct, frozen=True, kw_only=True):
    """What a worker is: `given` is the command line, `embedded_url` the local Kinesis that the command started.

    Without sockets among its `descriptors` the worker only drains an orphaned spool.
    """

    identity: WorkerIdentity
    descriptors: Descriptors
    given: Given
    first_stream: str
    embedded_url: str | None


@contextlib.contextmanager
def known_failures() -> Iterator[None]:
    """Raise CommandFailure for settings or a spool that cannot be used."""
    try:
        yield
    except ConfigError as error:
        raise CommandFailure(str(error), exit_code=ExitCode.WRONG_USAGE) from error
    except SpoolError as error:
        raise CommandFailure(str(error)) from error


def tenant_directory(settings: IngestSettings, *, local: bool, first_stream: str) -> TenantDirectory:
    """Return the tenants that may use the gateway.

    Raises:
        CommandFailure: there are no tenants, and the gateway would be open to other machines, or the tenants file
            cannot be used.
    """
    if settings.tenants is not None:
        try:
            has_spool = settings.spool is not None
            return FileTenants(settings.tenants, default_ack=settings.default_ack, has_spool=has_spool)
        except ConfigError as error:
            raise CommandFailure(str(error), exit_code=ExitCode.BAD_INPUT) from error
    if not local:
        message = (
            "no tenants are configured, so no client could send records; name a file of tenants with --tenants (make "
            "keys with `kpl keys`), or try it on this machine with --local"
        )
        raise CommandFailure(message, exit_code=ExitCode.WRONG_USAGE)
    if not is_this_machine(settings.host):
        message = (
            f"--local checks no credentials, and other machines reach host {settings.host!r}; omit --host, or name "
            f"a file of tenants with --tenants"
        )
        raise CommandFailure(message, exit_code=ExitCode.WRONG_USAGE)
    streams = dict.fromkeys(SIGNALS, first_stream)
    return OpenTenants(Tenant(id="local", default_ack=settings.default_ack, otlp_streams=streams))


async def connect(settings: IngestSettings, embedded_url: str | None) -> tuple[IngestSettings, KinesisTransport]:
    """Return the settings with region and endpoint filled in, and a transport to the embedded Kinesis or to AWS.

    Raises:
        CommandFailure: region or credentials are missing.
    """
    if embedded_url is not None:
        connection = Connection.to_own_server("", endpoint_url=embedded_url)
    else:
        connection = await Connection.resolved(
            "", region=settings.producer.region, endpoint_url=settings.producer.endpoint_url
        )
    settings = settings.with_producer(region=connection.region, endpoint_url=connection.endpoint_url)
    return settings, await connection.transport(settings.producer_config())


async def _run() -> None:
    if not stat.S_ISSOCK(os.fstat(_INPUT).st_mode):
        message = "`kpl serve --workers` starts the workers; start that command instead"
        raise CommandFailure(message)
    shown = log_format_of_environment()
    channel = await Channel.over(socket.socket(fileno=_INPUT))
    status = ExitCode.DONE
    try:
        first = await channel.receive()
        if first is not None:
            with known_failures(), contextlib.ExitStack() as logs:
                instructions = msgspec.json.decode(first, type=Instructions)
                identity = instructions.identity
                shown = instructions.given.log_format()._replace(worker=identity.worker, drains=identity.drains)
                print_exceptions_as(shown)
                logs.enter_context(show_all_logs(LOGGED, shown))
                await _serve(instructions, channel)
    except CommandFailure as failure:
        shown.failure(failure)
        status = failure.exit_code
    # All is closed and reported. uvloop's own closing was seen to hang, so do not wait for it.
    sys.stderr.flush()
    os._exit(status)


async def _serve(instructions: Instructions, channel: Channel) -> None:
    identity, descriptors = instructions.identity, instructions.descriptors
    link = SupervisorLink(channel, identity, RecordCounts.of_worker(descriptors.counts))
    settings = settings_of_worker(instructions.given.settings().settings, link.identity.worker)
    directory = tenant_directory(settings, local=instructions.given.local, first_stream=instructions.first_stream)
    settings, transport = await connect(settings, instructions.embedded_url)
    gateway = IngestGateway(settings, directory, transport=transport, supervisor=link)
    if not descriptors.sockets:
        stopped = anyio.Event()
        with _obeying(link, lambda _: stopped.set()):
            await _drain(gateway, link.channel, stopped)
    else:
        sockets = {number: socket.socket(fileno=each) for number, each in enumerate(descriptors.sockets)}
        with sockets.pop(identity.worker) as listening:
            spares = SpareSockets(sockets)
            server = GatewayServer(gateway, listening, spares)
            link.accept_from = spares.accept_from
            link.reload = server.reload

            def stop(number: signal.Signals) -> None:
                link.channel.post(b"leaving")
                server.stop(number)

            with _obeying(link, stop), on_hangup(server.reload):
                await server.run(started=lambda: link.channel.post(b"ready"))


@contextlib.contextmanager
def _obeying(link: SupervisorLink, stop: Callable[[signal.Signals], object]) -> Iterator[None]:
    """Call `stop` when the supervisor or a signal asks for it, or the supervisor has ended."""
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
    print_exceptions_as(log_format_of_environment())
    try:
        anyio.run(_run, backend_options={"use_uvloop": importlib.util.find_spec("uvloop") is not None})
    except CommandFailure as failure:
        print_failure(failure)
    return ExitCode.UNUSABLE


if __name__ == "__main__":
    sys.exit(main())
