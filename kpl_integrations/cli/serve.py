"""`kpl serve`: the ingest gateway, from one command with a Kinesis of its own to a process behind a load balancer."""

import contextlib
import logging
import socket
import sys
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from typing import Any, Final

from kpl_core import ConfigError, KinesisTransport, ProducerReport
from kpl_core.driver.aiobotocore_transport import AiobotocoreTransport
from kpl_integrations.cli.connection import Connection, is_this_machine
from kpl_integrations.cli.exit_code import ExitCode
from kpl_integrations.cli.failure import CommandFailure
from kpl_integrations.cli.local_server import local_kinesis
from kpl_integrations.cli.signals import on_signal
from kpl_integrations.cli.terminal import note, noted
from kpl_integrations.ingest import IngestGateway, IngestSettings, load_settings
from kpl_integrations.ingest.serving import GatewayServer, bound_socket
from kpl_integrations.ingest.tenants import SIGNALS, FileTenants, OpenTenants, Tenant, TenantDirectory

__all__ = ["Serve"]

_INTRODUCTION: Final = """\
Gateway listens on {url}
  Dashboard at {url}/dashboard
  {kinesis}
  {tenants}

In another terminal:
  curl -i {url}/v1/streams/{stream}/records{authorization} \\
       -H 'Content-Type: application/json' -d '{{"partition_key": "42", "data": "hello"}}'

  seq 1000 | sed 's/.*/{{"partition_key": "&", "data": {{"number": &}}}}/' | \\
  curl -i '{url}/v1/streams/{stream}/records?ack=delivered'{authorization} \\
       -H 'Content-Type: application/x-ndjson' --data-binary @-

  curl {url}/v1/stats{authorization}
  curl {url}/readyz
"""
_TAIL: Final = """\
  kpl tail {stream} --from-start --endpoint-url {endpoint_url}
"""


class Serve:
    """One run of the command. `given` are settings, None where the environment or the default holds."""

    def __init__(self, *, local: bool, streams: Sequence[str], given: Mapping[str, object]) -> None:
        self._local = local
        self._wanted = list(streams)
        self._streams: dict[str, int] = {}
        self._given = dict(given)

    async def run(self) -> ExitCode:
        """Serve until a signal; status 0 if every accepted record was delivered or is kept."""
        self._streams = _wanted_streams(self._wanted)
        logging.getLogger("kpl_integrations").setLevel(logging.INFO)
        try:
            with noted("kpl_integrations", logging.INFO), noted("uvicorn.error", logging.ERROR):
                report = await self._run()
        except ConfigError as error:
            raise CommandFailure(str(error), exit_code=ExitCode.WRONG_USAGE) from error
        note(f"stopped; {report}")
        return ExitCode.NOT_ALL_ARRIVED if report.failed_total else ExitCode.DONE

    async def _run(self) -> ProducerReport:
        # Who runs it alone on this machine wants it gone at Ctrl-C.
        given = {"drain_delay_seconds": 0.0, **_given(self._given)} if self._local else _given(self._given)
        settings = load_settings(**given)
        directory = self._directory(settings)
        with _listening(settings) as listening:
            async with self._kinesis(settings) as (found, transport):
                gateway = IngestGateway(found, directory, transport=transport)
                server = GatewayServer(gateway, listening)
                with on_signal(server.stop):
                    return await server.run(started=lambda: self._introduce(server.url, found))

    def _directory(self, settings: IngestSettings) -> TenantDirectory:
        if settings.tenants is not None:
            return FileTenants(settings.tenants, default_ack=settings.default_ack)
        if not self._local:
            message = (
                "no credentials are configured; name a file of tenants with --tenants (make keys with `kpl keys`), "
                "or try it on this machine with --local"
            )
            raise CommandFailure(message, exit_code=ExitCode.WRONG_USAGE)
        if not is_this_machine(settings.host):
            message = (
                f"--local checks no credentials, and others reach host {settings.host!r}; leave --host alone, or name "
                f"a file of tenants with --tenants"
            )
            raise CommandFailure(message, exit_code=ExitCode.WRONG_USAGE)
        everywhere = dict.fromkeys(SIGNALS, next(iter(self._streams)))
        return OpenTenants(Tenant(id="local", default_ack=settings.default_ack, otlp_streams=everywhere))

    @contextlib.asynccontextmanager
    async def _kinesis(self, settings: IngestSettings) -> AsyncIterator[tuple[IngestSettings, KinesisTransport]]:
        """Find the way to Kinesis, or start one here."""
        if self._local and settings.endpoint_url is None:
            async with local_kinesis(self._streams) as server:
                connection = Connection.to_our_own("", endpoint_url=server.endpoint_url)
                yield _through(settings, connection)
        else:
            connection = await Connection.resolved("", region=settings.region, endpoint_url=settings.endpoint_url)
            yield _through(settings, connection)

    def _introduce(self, url: str, settings: IngestSettings) -> None:
        stream = next(iter(self._streams))
        is_open = settings.tenants is None
        named = ", ".join(f"{name} ({shards} shards)" for name, shards in self._streams.items())
        where = settings.endpoint_url or f"Kinesis in {settings.region}"
        text = _INTRODUCTION.format(
            url=url,
            stream=stream if self._local else "STREAM",
            kinesis=f"Local Kinesis at {where}: {named}; nothing is kept" if self._local else f"Ships to {where}",
            tenants="Credentials are not checked" if is_open else f"Tenants from {settings.tenants}",
            authorization="" if is_open else " -H 'Authorization: Bearer KEY'",
        )
        if self._local and settings.endpoint_url:
            text += _TAIL.format(stream=stream, endpoint_url=settings.endpoint_url)
        sys.stdout.write(text)
        sys.stdout.flush()


def _given(options: Mapping[str, object]) -> dict[str, Any]:
    return {name: value for name, value in options.items() if value is not None}


def _through(settings: IngestSettings, connection: Connection) -> tuple[IngestSettings, KinesisTransport]:
    """Return the settings with what the connection knows, and a transport on it."""
    settings = settings.model_copy(update={"region": connection.region, "endpoint_url": connection.endpoint_url})
    return settings, AiobotocoreTransport(settings.producer_config(), session=connection.session)


@contextlib.contextmanager
def _listening(settings: IngestSettings) -> Iterator[socket.socket]:
    try:
        listening = bound_socket(settings.host, settings.port)
    except OSError as error:
        message = (
            f"port {settings.port} of {settings.host} cannot be used ({error.strerror}); name another with --port, "
            f"or 0 for a free one"
        )
        raise CommandFailure(message) from error
    with listening:
        yield listening


def _wanted_streams(texts: Sequence[str]) -> dict[str, int]:
    """Return streams and their shards from NAME or NAME:SHARDS.

    Raises:
        CommandFailure: a text is neither.
    """
    streams = {}
    for text in texts:
        name, _, shards = text.partition(":")
        if not name or not (shards or "1").isdecimal() or int(shards or "1") < 1:
            message = f"--stream is {text!r}; write NAME or NAME:SHARDS with at least one shard, such as orders:4"
            raise CommandFailure(message, exit_code=ExitCode.WRONG_USAGE)
        streams[name] = int(shards or "1")
    return streams
