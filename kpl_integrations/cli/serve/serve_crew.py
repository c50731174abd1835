"""`kpl serve --workers N`: starts the workers, watches over them, and adds up their accounts."""

import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from socket import socket
from typing import Any, Final

import msgspec

from kpl_core import ProducerReport
from kpl_integrations.cli.exit_code import ExitCode
from kpl_integrations.cli.failure import CommandFailure
from kpl_integrations.cli.serve.serve_worker import Briefing
from kpl_integrations.cli.signals import on_signal
from kpl_integrations.ingest import IngestSettings
from kpl_integrations.ingest.stats.totals import GatewayTotals
from kpl_integrations.ingest.workers.burial import Burial
from kpl_integrations.ingest.workers.crew import Crew, WorkerFailed
from kpl_integrations.ingest.workers.own_files import heirs
from kpl_integrations.ingest.workers.seat import Seat

__all__ = ["LOST", "serve_by_many"]

_COMMAND: Final = (sys.executable, "-m", "kpl_integrations.cli.serve.serve_worker")
# Beyond the drain delay and the closing: the last answers, and a machine that is busy.
_GRACE_SECONDS: Final = 15.0
# The reason of records that a dead worker had accepted: with a spool they may be in it, for the next run.
LOST: Final = "WorkerDied"


async def serve_by_many(
    settings: IngestSettings,
    sockets: Sequence[socket],
    *,
    briefing: Mapping[str, Any],
    started: Callable[[], object],
) -> ProducerReport:
    """Serve on `sockets`, a worker each, until a signal; return what became of the records of all.

    Raises:
        CommandFailure: a worker could not begin, or this system cannot have several.
    """
    try:
        from kpl_core.coordination.stores.file import FileStore  # noqa: PLC0415 - fcntl is not everywhere
    except ImportError as error:
        message = "several workers need a POSIX system; leave --workers out"
        raise CommandFailure(message, exit_code=ExitCode.WRONG_USAGE) from error

    def briefing_of(seat: Seat, descriptor: int | None) -> bytes:
        return msgspec.json.encode(Briefing(seat=seat, descriptor=descriptor, **briefing)) + b"\n"

    with tempfile.TemporaryDirectory(prefix="kpl-serve-", ignore_cleanup_errors=True) as folder:
        numbers = [*range(len(sockets)), *heirs(settings, len(sockets))]
        crew = Crew(
            _COMMAND,
            lambda seat, descriptor: (
                msgspec.json.encode(Briefing(seat=seat, descriptor=descriptor, **briefing)) + b"\n"
            ),
            sockets=sockets,
            seats=[
                Seat(worker=number, life=1, count=len(numbers), folder=folder, takes=place < len(sockets))
                for place, number in enumerate(numbers)
            ],
            burial=Burial(FileStore(Path(folder) / "totals")),
            grace_seconds=settings.drain_delay_seconds + settings.close_seconds + _GRACE_SECONDS,
        )
        try:
            with on_signal(crew.stop):
                return _report(await crew.run(started=started))
        except WorkerFailed as failed:
            status = ExitCode(failed.status) if failed.status in set(ExitCode) else ExitCode.UNUSABLE
            message = f"{failed}; what it said stands above"
            raise CommandFailure(message, exit_code=status) from failed


def _report(totals: GatewayTotals) -> ProducerReport:
    """Return the accounts of all workers as those of one producer."""
    records = totals.stats.records
    failed = records.failed | ({LOST: records.lost} if records.lost else {})
    return ProducerReport(
        accepted=records.accepted,
        delivered=records.delivered,
        failed=failed,
        spooled=records.spooled,
        dead_lettered=records.dead_lettered,
        buffered=records.buffered,
        buffered_bytes=records.buffered_bytes,
        complete=not failed and not records.buffered,
    )
