"""`kpl serve`: the ingest gateway, for a try with a local Kinesis, or in production with one or several processes."""

import contextlib
import socket
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Final

import msgspec

from kpl_core import ProducerReport
from kpl_integrations.cli.exit_code import CommandFailure, ExitCode, on_hangup, on_signal
from kpl_integrations.cli.local import local_kinesis, port_failure, streams_of
from kpl_integrations.cli.serve.print_config import printed_settings
from kpl_integrations.cli.serve.worker import (
    LOGGED,
    Given,
    Instructions,
    connect,
    known_failures,
    tenant_directory,
)
from kpl_integrations.cli.terminal import print_exceptions_as, show_all_logs
from kpl_integrations.gateway_figures import StatsDocument
from kpl_integrations.ingest import IngestGateway, IngestSettings
from kpl_integrations.ingest.http.certificate import ServerCertificate
from kpl_integrations.ingest.http.listening import listening_sockets
from kpl_integrations.ingest.serving import GatewayServer, bound_socket, url_of
from kpl_integrations.ingest.settings_sources import LoadedSettings
from kpl_integrations.ingest.workers.link import WorkerIdentity
from kpl_integrations.ingest.workers.spool_files import durable_path, file_of_worker, numbered_files, orphaned_spools
from kpl_integrations.ingest.workers.supervisor import Supervisor, WorkerFailed

_WORKER_COMMAND: Final = (sys.executable, "-m", "kpl_integrations.cli.serve.worker")
# Beyond the drain delay and the closing: for the last answers, and on a busy machine.
_GRACE_SECONDS: Final = 15.0
# The reason of records that a dead worker had accepted. With a spool the next run may still find them in it.
_LOST: Final = "WorkerDied"
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
    """One run of the command."""

    def __init__(self, *, streams: Sequence[str], given: Given) -> None:
        self._local = given.local
        self._stream_texts = list(streams)
        self._streams: dict[str, int] = {}
        self._given = given
        self.log_format = given.log_format()

    async def run(self) -> ExitCode:
        """Serve until a signal; status 0 if every accepted record was delivered or is kept in a file."""
        self._streams = streams_of(self._stream_texts)
        self._first_stream = next(iter(self._streams))
        settings = self._loaded().settings
        with known_failures(), show_all_logs(LOGGED, self.log_format):
            report = await self._run(settings)
        counts = msgspec.structs.asdict(report) | {"failed": report.failed_total, "failures": report.failed}
        level = "info" if report.all_delivered else "warning"
        self.log_format.note(f"stopped; {report}", counts, level=level)
        return ExitCode.NOT_ALL_ARRIVED if report.failed_total else ExitCode.DONE

    async def print_config(self) -> ExitCode:
        """Print every setting and where it comes from."""
        sys.stdout.write(printed_settings(self._loaded()))
        return ExitCode.DONE

    def _loaded(self) -> LoadedSettings:
        with known_failures():
            self._given = self._given.with_file_text()
            # The file may say how its own errors are printed.
            self.log_format = self._given.log_format()
            print_exceptions_as(self.log_format)
            return self._given.settings()

    async def _run(self, settings: IngestSettings) -> ProducerReport:
        if settings.tls_certificate is not None and settings.tls_key is not None:
            # Before anything is opened, and before the workers that would all fail.
            ServerCertificate(settings.tls_certificate, settings.tls_key)
        directory = tenant_directory(settings, local=self._local, first_stream=self._first_stream)
        if settings.workers == 1:
            self._warn_of_orphaned_spools(settings)
        async with contextlib.AsyncExitStack() as stack:
            sockets = stack.enter_context(_listening(settings))
            embedded_url = None
            if self._local and settings.producer.endpoint_url is None:
                embedded_url = (await stack.enter_async_context(local_kinesis(self._streams))).endpoint_url
            connected, transport = await connect(settings, embedded_url)
            url = url_of(sockets[0], is_tls=settings.tls_certificate is not None)
            started = partial(self._introduce, url, connected)
            if settings.workers > 1:
                instructed = partial(
                    Instructions,
                    given=self._given,
                    first_stream=self._first_stream,
                    embedded_url=embedded_url,
                )
                return await _supervise(settings, sockets, instructed, started=started)
            gateway = IngestGateway(connected, directory, transport=transport)
            server = GatewayServer(gateway, sockets[0])
            with on_signal(server.stop), on_hangup(server.reload):
                return await server.run(started=started)

    def _warn(self, text: str) -> None:
        self.log_format.note(text if self.log_format.is_json else f"warning: {text}", level="warning")

    def _warn_of_orphaned_spools(self, settings: IngestSettings) -> None:
        path = durable_path(settings)
        count = 0 if path is None else len(numbered_files(path))
        if count:
            self._warn(
                f"{path} has {count} files beside it of an earlier run with --workers; run with --workers 2 or more to "
                f"deliver the records in them"
            )

    def _introduce(self, url: str, settings: IngestSettings) -> None:
        stream = self._first_stream
        is_open = settings.tenants is None
        named = ", ".join(
            f"{name} ({shards} {'shard' if shards == 1 else 'shards'})" for name, shards in self._streams.items()
        )
        endpoint = settings.producer.endpoint_url or f"Kinesis in {settings.producer.region}"
        kinesis = f"Local Kinesis at {endpoint}: {named}; it keeps nothing" if self._local else f"Ships to {endpoint}"
        tenants = "Credentials are not checked" if is_open else f"Tenants from {settings.tenants}"
        if self.log_format.is_json:
            fields = {"url": url, "kinesis": kinesis, "tenants": tenants, "processes": settings.workers}
            self.log_format.note(f"Gateway listens on {url}", fields, to=sys.stdout)
            return
        text = _INTRODUCTION.format(
            url=url,
            stream=stream if self._local else "STREAM",
            kinesis=kinesis,
            tenants=tenants,
            authorization="" if is_open else " -H 'Authorization: Bearer KEY'",
            workers=f"  {settings.workers} processes\n" if settings.workers > 1 else "",
        )
        if self._local and settings.producer.endpoint_url:
            text += _TAIL.format(stream=stream, endpoint_url=settings.producer.endpoint_url)
        sys.stdout.write(text)
        sys.stdout.flush()


async def _supervise(
    settings: IngestSettings,
    sockets: Sequence[socket.socket],
    instructed: Callable[..., Instructions],
    *,
    started: Callable[[], object],
) -> ProducerReport:
    """Serve with one worker for each socket until a signal; return what became of all workers' records.

    Raises:
        CommandFailure: a worker could not start, or this system cannot run several.
    """
    if sys.platform == "win32":
        message = "several workers need a POSIX system; omit --workers"
        raise CommandFailure(message, exit_code=ExitCode.WRONG_USAGE)
    with tempfile.TemporaryDirectory(prefix="kpl-serve-", ignore_cleanup_errors=True) as folder:
        orphaned = {number: file_of_worker(settings, number) for number in orphaned_spools(settings, len(sockets))}
        numbers = [*range(len(sockets)), *orphaned]
        supervisor = Supervisor(
            _WORKER_COMMAND,
            # Paths become strings, which the worker's settings accept.
            lambda identity, descriptors: msgspec.json.encode(
                instructed(identity=identity, descriptors=descriptors), enc_hook=str
            ),
            sockets=sockets,
            identities=[
                WorkerIdentity(worker=number, count=len(numbers), folder=folder, drains=orphaned.get(number, ""))
                for number in numbers
            ],
            grace_seconds=settings.drain_delay_seconds + settings.close_seconds + _GRACE_SECONDS,
        )
        try:
            with on_signal(supervisor.stop), on_hangup(supervisor.reload):
                return _report((await supervisor.run(started=started)).stats)
        except WorkerFailed as failed:
            raise CommandFailure(str(failed)) from failed


def _report(stats: StatsDocument) -> ProducerReport:
    """Return the counts of all workers as those of one producer."""
    counts = msgspec.structs.asdict(stats.records)
    lost = counts.pop("lost")
    counts["failed"] = counts["failed"] | ({_LOST: lost} if lost else {})
    return ProducerReport(**counts, complete=not counts["failed"] and not counts["buffered"])


@contextlib.contextmanager
def _listening(settings: IngestSettings) -> Iterator[list[socket.socket]]:
    try:
        if settings.workers > 1:
            sockets = listening_sockets(settings.host, settings.port, settings.workers)
        else:
            sockets = [bound_socket(settings.host, settings.port)]
    except OSError as error:
        raise port_failure(error, settings.host, settings.port) from error
    try:
        yield sockets
    finally:
        for each in sockets:
            each.close()
