"""The work of `kpl dlq`: look at the dead letters of a spool file, send them again, export or delete them."""

import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Final, Self

import anyio
import anyio.to_thread
import msgspec

from kpl_core import Producer, RecordResult, SpoolOptions
from kpl_core.driver.result_callback import ResultCallback
from kpl_core.spool import (
    AsyncSpool,
    DeadLetterQueue,
    DeliveryPace,
    LetterFilter,
    LetterReader,
    RedriveProgress,
    Redriver,
    Spool,
    SpooledRecord,
    SpoolError,
    StoredLetter,
    letter_to_json,
    purge,
)
from kpl_integrations.cli.connection import Connection
from kpl_integrations.cli.exit_code import ExitCode
from kpl_integrations.cli.failure import CommandFailure
from kpl_integrations.cli.signals import exit_code_of, until_signal
from kpl_integrations.cli.terminal import Figure, note, print_figures, progress

__all__ = ["count", "export", "list_letters", "purge_letters", "redrive", "show"]

_IN_FLIGHT: Final = 500
_BYTES_IN_FLIGHT: Final = 8 << 20
# So many letters in a row are not all damaged.
_LOOK_THROUGH: Final = 100


async def count(path: Path, wanted: LetterFilter, as_json: bool) -> ExitCode:
    """Print how many letters match, by reason."""
    with _Letters(path) as letters:
        counts = letters.count(wanted)
    figures = [Figure(reason, number, f"{number:,}") for reason, number in counts.items()]
    total = sum(counts.values())
    print_figures([*figures, Figure("total", total, f"{total:,}", "dead letters")], as_json=as_json)
    return ExitCode.DONE


async def list_letters(path: Path, wanted: LetterFilter, limit: int, as_json: bool) -> ExitCode:
    """Print a line for each letter that matches, critical first."""
    with _Letters(path) as letters:
        for page in letters.pages(wanted, limit=limit):
            sys.stdout.write("".join(_line(stored, as_json=as_json) for stored in page))
        total = sum(letters.count(wanted).values())
    sys.stdout.flush()
    if total > limit:
        note(f"{limit:,} of {total:,} letters; --limit shows more")
    return ExitCode.DONE


def _line(stored: StoredLetter, *, as_json: bool) -> str:
    letter = stored.letter
    if letter is None:
        return f"# letter {stored.number} is damaged\n"
    if as_json:
        return letter_to_json(letter).decode() + "\n"
    said = f"{letter.error_code or '-'}: {letter.error_message or '-'}"
    return f"{letter.id}  {letter.tier:8}  {letter.reason:17}  {letter.stream}  {letter.partition_key}  {said}\n"


async def show(path: Path, letter_id: str) -> ExitCode:
    """Print one letter as JSON, its data in base64."""
    with _Letters(path) as letters:
        stored = letters.find(letter_id)
    if stored is None or stored.letter is None:
        message = f"there is no letter {letter_id!r} in {path}; `kpl dlq list {path} --letters` shows the ids"
        raise CommandFailure(message, exit_code=ExitCode.BAD_INPUT)
    sys.stdout.write(msgspec.json.format(letter_to_json(stored.letter)).decode() + "\n")
    return ExitCode.DONE


async def export(path: Path, destination: Path, wanted: LetterFilter, as_json: bool) -> ExitCode:
    """Write the letters that match as JSON lines; the file appears complete or not at all."""
    with _Letters(path) as letters, progress() as bar:
        shown = bar.add_task("export", total=sum(letters.count(wanted).values()))
        exported = letters.export(wanted, destination, on_progress=lambda done: bar.update(shown, completed=done))
    written, damaged = exported
    figures = [
        Figure("exported", written, f"{written:,}", f"to {destination}"),
        Figure("damaged", damaged, f"{damaged:,}"),
    ]
    print_figures(figures, as_json=as_json)
    if damaged:
        note(f"the damaged ones are in {path} only; recover it with `sqlite3 FILE .recover` before they are purged")
    return ExitCode.DONE


async def purge_letters(path: Path, wanted: LetterFilter, as_json: bool) -> ExitCode:
    """Delete the letters that match, for good. Interrupted, it has deleted some; run it again."""

    def work() -> int:
        with Spool(_options(path)) as spool, progress() as bar:
            queue = DeadLetterQueue(spool)
            shown = bar.add_task("purge", total=sum(queue.count_nowait(wanted).result().values()))
            return purge(queue, wanted, on_progress=lambda done: bar.update(shown, completed=done))

    try:
        purged = await anyio.to_thread.run_sync(work)
    except SpoolError as error:
        raise CommandFailure(str(error)) from error
    print_figures([Figure("purged", purged, f"{purged:,}")], as_json=as_json)
    return ExitCode.DONE


async def redrive(
    path: Path,
    wanted: LetterFilter,
    rate: float,
    region: str | None,
    endpoint_url: str | None,
    as_json: bool,
) -> ExitCode:
    """Send the letters that match again, critical first; what Kinesis took leaves the file."""
    last = RedriveProgress(0, 0, 0, 0)

    async def work() -> ExitCode:
        nonlocal last
        async with AsyncSpool(Spool(_options(path))) as spool:
            queue = DeadLetterQueue(spool.spool)
            stream = await _first_stream(queue, spool, wanted)
            if stream is None:
                return ExitCode.DONE
            connection = await Connection.resolved(stream, region=region, endpoint_url=endpoint_url)
            await connection.require_stream()
            async with Producer(connection.producer_config(), session=connection.session) as producer:
                with progress() as bar:
                    shown = bar.add_task("redrive", total=None)

                    def told(now: RedriveProgress) -> None:
                        nonlocal last
                        last = now
                        bar.update(shown, total=now.total, completed=sum(now[1:]))

                    redriver = Redriver(queue, _put_into(producer), _pace(rate))
                    last = await redriver.redrive(wanted, on_progress=told)
        return ExitCode.DONE

    try:
        ended = await until_signal(work)
    except SpoolError as error:
        raise CommandFailure(str(error)) from error
    left = last.total - last.delivered
    figures = [
        Figure("letters", last.total, f"{last.total:,}", "matched"),
        Figure("delivered", last.delivered, f"{last.delivered:,}"),
        Figure("failed", last.failed, f"{last.failed:,}", "stay in the queue"),
        Figure("damaged", last.damaged, f"{last.damaged:,}"),
    ]
    print_figures(figures, as_json=as_json)
    if isinstance(ended, signal.Signals):
        note("interrupted; run it again for the rest")
        return exit_code_of(ended)
    return ExitCode.NOT_ALL_ARRIVED if left else ExitCode.DONE


async def _first_stream(queue: DeadLetterQueue, spool: AsyncSpool, wanted: LetterFilter) -> str | None:
    """Return the stream of the first whole letter that matches, an ARN in it says which region; None if none does."""
    for stored in await spool.mailbox.wait_for(queue.select_nowait(wanted, _LOOK_THROUGH)):
        if stored.letter is not None:
            return stored.letter.stream
    return None


def _put_into(producer: Producer) -> Callable[[SpooledRecord, Callable[[RecordResult], None]], None]:
    def put(record: SpooledRecord, finished: Callable[[RecordResult], None], /) -> None:
        delivery = producer.put_nowait(
            record.stream,
            partition_key=record.partition_key,
            data=record.data,
            explicit_hash_key=record.explicit_hash_key,
            tier=record.tier,
        )
        ResultCallback(delivery, finished)

    return put


def _pace(rate: float) -> DeliveryPace:
    return DeliveryPace(
        records_per_second=rate,
        bytes_per_second=1e9,
        in_flight_records=_IN_FLIGHT,
        in_flight_bytes=_BYTES_IN_FLIGHT,
        # A person waits: the pauses after failures are as short as they can be.
        chance=lambda: 0.0,
    )


def _options(path: Path) -> SpoolOptions:
    if not path.is_file():
        message = f"{path} is no file; give the path that the producer's spool has"
        raise CommandFailure(message, exit_code=ExitCode.BAD_INPUT)
    # It was filled under other bounds; nothing here makes it larger.
    return SpoolOptions(path=path, max_bytes=1 << 44, max_dead_letter_bytes=1 << 44)


class _Letters(LetterReader):
    """Says what a spool file says, as a failure of the command."""

    def __enter__(self) -> Self:
        try:
            return super().__enter__()
        except SpoolError as error:
            raise CommandFailure(str(error), exit_code=ExitCode.BAD_INPUT) from error
