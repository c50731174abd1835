"""`kpl serve`: the ingest gateway, from one command with a Kinesis of its own to a process behind a load balancer."""

import contextlib
import logging
import socket
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Final

from kpl_core import ConfigError, ProducerReport
from kpl_core.durability.spool import SpoolError
from kpl_integrations.cli.exit_code import CommandFailure, ExitCode, on_signal
from kpl_integrations.cli.serve.serve_crew import serve_by_many
from kpl_integrations.cli.serve.serve_parts import connection_of, own_kinesis, settings_given, through, who_may
from kpl_integrations.cli.terminal import note, show_logs
from kpl_integrations.ingest import IngestGateway, IngestSettings, load_settings
from kpl_integrations.ingest.http.listening import listening_sockets, require_certificate
from kpl_integrations.ingest.serving import GatewayServer, bound_socket, url_of
from kpl_integrations.ingest.settings import unknown_variables
from kpl_integrations.ingest.workers.own_files import kept_in, left_by_workers

__all__ = ["Serve"]

_INTRODUCTION: Final = """\
Gateway listens on {url}
  Dashboard at {url}/dashboard
  {kinesis}
  {tenants}
{workers}
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
        try:
            with show_logs("kpl_integrations", logging.INFO), show_logs("uvicorn.error", logging.ERROR):
                report = await self._run()
        except ConfigError as error:
            raise CommandFailure(str(error), exit_code=ExitCode.WRONG_USAGE) from error
        except SpoolError as error:
            raise CommandFailure(str(error)) from error
        note(f"stopped; {report}")
        return ExitCode.NOT_ALL_ARRIVED if report.failed_total else ExitCode.DONE

    async def _run(self) -> ProducerReport:
        given = settings_given(self._given, local=self._local)
        settings = load_settings(**given)
        for variable in unknown_variables():
            note(f"warning: {variable} is set, and the gateway has no such setting; is it misspelt?")
        if settings.tls_certificate is not None and settings.tls_key is not None:
            require_certificate(settings.tls_certificate, settings.tls_key)
        directory = who_may(settings, local=self._local, first_stream=self._first_stream)
        if settings.workers > 1:
            return await self._run_many(settings, given)
        _warn_of_files_left(settings)
        with _listening(settings) as sockets:
            async with own_kinesis(settings, self._streams, local=self._local) as our_own:
                found, transport = through(settings, await connection_of(settings, our_own))
                gateway = IngestGateway(found, directory, transport=transport)
                server = GatewayServer(gateway, sockets[0])
                with on_signal(server.stop):
                    return await server.run(started=lambda: self._introduce(server.url, found))

    async def _run_many(self, settings: IngestSettings, given: Mapping[str, object]) -> ProducerReport:
        with _listening(settings) as sockets:
            url = url_of(sockets[0], is_tls=settings.tls_certificate is not None)
            async with own_kinesis(settings, self._streams, local=self._local) as our_own:
                found, _ = through(settings, await connection_of(settings, our_own))
                return await serve_by_many(
                    settings,
                    sockets,
                    briefing={
                        "given": {name: _plain(value) for name, value in given.items()},
                        "local": self._local,
                        "first_stream": self._first_stream,
                        "our_own": our_own,
                    },
                    started=lambda: self._introduce(url, found),
                )

    @property
    def _first_stream(self) -> str:
        return next(iter(self._streams))

    def _introduce(self, url: str, settings: IngestSettings) -> None:
        stream = self._first_stream
        is_open = settings.tenants is None
        named = ", ".join(
            f"{name} ({shards} {'shard' if shards == 1 else 'shards'})" for name, shards in self._streams.items()
        )
        where = settings.endpoint_url or f"Kinesis in {settings.region}"
        text = _INTRODUCTION.format(
            url=url,
            stream=stream if self._local else "STREAM",
            kinesis=f"Local Kinesis at {where}: {named}; nothing is kept" if self._local else f"Ships to {where}",
            tenants="Credentials are not checked" if is_open else f"Tenants from {settings.tenants}",
            authorization="" if is_open else " -H 'Authorization: Bearer KEY'",
            workers=f"  {settings.workers} processes\n" if settings.workers > 1 else "",
        )
        if self._local and settings.endpoint_url:
            text += _TAIL.format(stream=stream, endpoint_url=settings.endpoint_url)
        sys.stdout.write(text)
        sys.stdout.flush()


def _plain(value: object) -> object:
    """Return an option as JSON can say it."""
    return value if isinstance(value, bool | int | float | str) else str(value)


def _warn_of_files_left(settings: IngestSettings) -> None:
    """Say so if there are spools, or dead letters, that nobody opens."""
    path = kept_in(settings)
    left = [] if path is None else left_by_workers(path)
    if left:
        note(
            f"warning: {path} has {len(left)} files beside it of an earlier run with --workers; what they "
            f"hold is delivered by a run with --workers 2 or more"
        )


@contextlib.contextmanager
def _listening(settings: IngestSettings) -> Iterator[list[socket.socket]]:
    try:
        if settings.workers > 1:
            sockets = listening_sockets(settings.host, settings.port, settings.workers)
        else:
            sockets = [bound_socket(settings.host, settings.port)]
    except OSError as error:
        message = (
            f"port {settings.port} of {settings.host} cannot be used ({error.strerror}); name another with --port, "
            f"or 0 for a free one"
        )
        raise CommandFailure(message) from error
    try:
        yield sockets
    finally:
        for each in sockets:
            each.close()


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
