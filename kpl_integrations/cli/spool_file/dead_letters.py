"""The commands of `kpl dlq`: list, show, redrive, export and purge the dead letters of a spool file."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Final, TypeVar

import anyio.from_thread
import anyio.lowlevel
import anyio.to_thread
import msgspec
from rich.progress import Progress, TaskID

from kpl_core import Producer, RecordResult, SpoolOptions, UserRecord
from kpl_core.durability.dead_letters import (
    DeadLetterQueue,
    ExportReport,
    LetterReader,
    RedriveProgress,
    Redriver,
    purge,
)
from kpl_core.durability.delivery_pace import DeliveryPace
from kpl_core.durability.spool import (
    AsyncSpool,
    DeadLetter,
    LetterFilter,
    ReadOnlySpool,
    Spool,
    SpooledRecord,
    SpoolError,
    letter_to_json,
)
from kpl_core.producer.delivery import call_when_finished
from kpl_integrations.cli.connection import Connection
from kpl_integrations.cli.exit_code import CommandFailure, ExitCode, until_signal
from kpl_integrations.cli.progress import progress
from kpl_integrations.cli.terminal import Figure, note, print_figures, printable

Reader = TypeVar("Reader", bound=ReadOnlySpool)
_IN_FLIGHT: Final = 500
_BYTES_IN_FLIGHT: Final = 8 << 20
# So many letters are searched for an undamaged one.
_MAX_SEARCHED: Final = 100


async def count(path: Path, wanted: LetterFilter, as_json: bool) -> ExitCode:
    """Print the number of matching letters by reason."""
    with opened(LetterReader(path)) as letters:
        counts, spooled = letters.count(wanted), letters.count_records()
    figures = [Figure(reason, number) for reason, number in counts.items()]
    print_figures([*figures, Figure("total", sum(counts.values()), "dead letters")], as_json=as_json)
    if spooled:
        note(f"{path} also has {spooled:,} spooled records; see `kpl spool count {path}` and `kpl spool drain {path}`")
    return ExitCode.DONE


async def list_letters(path: Path, wanted: LetterFilter, limit: int, as_json: bool) -> ExitCode:
    """Print a line for each matching letter, critical ones first."""
    with opened(LetterReader(path)) as letters:
        for page in letters.pages(wanted, limit=limit):
            for stored in page:
                if stored.letter is None:
                    note(f"letter {stored.number} is damaged and skipped")
                else:
                    sys.stdout.write(_line(stored.letter, as_json=as_json))
            # Let the loop handle Ctrl-C between two pages.
            await anyio.lowlevel.checkpoint()
        total = sum(letters.count(wanted).values())
    sys.stdout.flush()
    if total > limit:
        note(f"{limit:,} of {total:,} letters; --limit shows more")
    return ExitCode.DONE


def _line(letter: DeadLetter, *, as_json: bool) -> str:
    if as_json:
        return letter_to_json(letter).decode() + "\n"
    error = f"{letter.error_code or '-'}: {letter.error_message or '-'}"
    line = f"{letter.id}  {letter.tier:8}  {letter.reason:17}  {letter.stream}  {letter.partition_key}  {error}"
    return printable(line) + "\n"


async def show(path: Path, letter_id: str) -> ExitCode:
    """Print one letter as JSON with its data in base64."""
    with opened(LetterReader(path)) as letters:
        stored = letters.find(letter_id)
    if stored is None or stored.letter is None:
        message = f"there is no letter {letter_id!r} in {path}; `kpl dlq list {path} --letters` shows the ids"
        raise CommandFailure(message, exit_code=ExitCode.BAD_INPUT)
    sys.stdout.write(msgspec.json.format(letter_to_json(stored.letter)).decode() + "\n")
    return ExitCode.DONE


async def export(path: Path, destination: Path, wanted: LetterFilter, as_json: bool) -> ExitCode:
    """Write the matching letters as JSON lines; the destination is replaced at the end or not at all."""

    def work(on_total: Callable[[int], None], on_progress: Callable[[int], None]) -> ExportReport:
        with opened(LetterReader(path)) as letters:
            on_total(sum(letters.count(wanted).values()))
            return letters.export(wanted, destination, on_progress=on_progress)

    return await export_rows(path, destination, work, as_json)


async def export_rows(
    path: Path,
    destination: Path,
    work: Callable[[Callable[[int], None], Callable[[int], None]], ExportReport],
    as_json: bool,
) -> ExitCode:
    """Run `work(on_total, on_progress)`, which writes the destination, in a thread, and print its report."""
    report = ExportReport(0, 0)

    def shown_work() -> None:
        nonlocal report
        with progress(as_json=as_json) as bar:
            shown = bar.add_task("export", total=None, unit="records")
            try:
                report = work(lambda total: bar.update(shown, total=total), partial(_advanced, bar, shown))
            except OSError as error:
                message = f"{destination} cannot be written ({error.strerror}); check its path, permissions and disk"
                raise CommandFailure(message, exit_code=ExitCode.BAD_INPUT) from error

    ended = await until_signal(partial(anyio.to_thread.run_sync, shown_work))
    if ended is not ExitCode.DONE:
        note(f"interrupted; {destination} is unchanged")
        return ended
    figures = [Figure("exported", report.written, f"to {destination}"), Figure("damaged", report.damaged)]
    print_figures(figures, as_json=as_json)
    if report.damaged:
        note(f"damaged rows are in {path} only; recover them with `sqlite3 FILE .recover` before you delete them")
    return ExitCode.DONE


async def purge_letters(path: Path, wanted: LetterFilter, as_json: bool) -> ExitCode:
    """Delete the matching letters permanently. If it is interrupted, some are deleted; run it again."""
    purged = 0

    def work() -> None:
        with Spool(options_of(path)) as spool, progress(as_json=as_json) as bar:
            queue = DeadLetterQueue(spool)
            shown = bar.add_task("purge", total=sum(queue.count_nowait(wanted).result().values()), unit="letters")

            def advanced(done: int) -> None:
                nonlocal purged
                purged = done
                _advanced(bar, shown, done)

            purge(queue, wanted, on_progress=advanced)

    try:
        ended = await until_signal(partial(anyio.to_thread.run_sync, work))
    except SpoolError as error:
        raise CommandFailure(str(error)) from error
    print_figures([Figure("purged", purged)], as_json=as_json)
    if ended is not ExitCode.DONE:
        note("interrupted; run it again for the rest")
    return ended


def _advanced(bar: Progress, shown: TaskID, done: int) -> None:
    """Show the progress of work in a thread, which ends here after a signal."""
    bar.update(shown, completed=done)
    anyio.from_thread.check_cancelled()


async def redrive(
    path: Path,
    wanted: LetterFilter,
    rate: float,
    region: str | None,
    endpoint_url: str | None,
    as_json: bool,
) -> ExitCode:
    """Send the matching letters again, critical ones first; delivered letters leave the file."""
    last = RedriveProgress(0, 0, 0, 0)
    # Of the letters that have a result.
    done_bytes = 0

    async def work() -> None:
        nonlocal last
        async with AsyncSpool(Spool(options_of(path))) as spool:
            queue = DeadLetterQueue(spool.spool)
            stream = await _first_stream(queue, spool, wanted)
            if stream is None:
                return
            connection = await Connection.to_stream(stream, region=region, endpoint_url=endpoint_url)
            async with Producer(connection.producer_config(), session=connection.session) as producer:
                with progress(as_json=as_json) as bar:
                    shown = bar.add_task("redrive", total=None, unit="letters", bytes=0)

                    def show(now: RedriveProgress) -> None:
                        nonlocal last
                        last = now
                        bar.update(shown, total=now.total, completed=sum(now[1:]), bytes=done_bytes)

                    def count(size_bytes: int) -> None:
                        nonlocal done_bytes
                        done_bytes += size_bytes

                    redriver = Redriver(queue, _put_into(producer, count), _pace(rate))
                    last = await redriver.redrive(wanted, on_progress=show)

    try:
        ended = await until_signal(work)
    except SpoolError as error:
        raise CommandFailure(str(error)) from error
    left = last.total - last.delivered
    figures = [
        Figure("letters", last.total, "matched"),
        Figure("delivered", last.delivered),
        Figure("failed", last.failed, "still in the queue"),
        Figure("damaged", last.damaged),
    ]
    print_figures(figures, as_json=as_json)
    if ended is not ExitCode.DONE:
        note("interrupted; run it again for the rest")
        return ended
    return ExitCode.NOT_ALL_ARRIVED if left else ExitCode.DONE


async def _first_stream(queue: DeadLetterQueue, spool: AsyncSpool, wanted: LetterFilter) -> str | None:
    """Return the stream of the first undamaged matching letter, as name or ARN; None if there is none."""
    for stored in await spool.mailbox.wait_for(queue.select_nowait(wanted, _MAX_SEARCHED)):
        if stored.letter is not None:
            return stored.letter.stream
    return None


def _put_into(
    producer: Producer, count: Callable[[int], object]
) -> Callable[[SpooledRecord, Callable[[RecordResult], None]], None]:
    """Return what puts a letter; `count` gets the bytes of key and data of each that has its result."""

    def put(record: SpooledRecord, finished: Callable[[RecordResult], None], /) -> None:
        def counted(result: RecordResult) -> None:
            count(len(record.partition_key.encode()) + len(record.data))
            finished(result)

        letter = UserRecord(record.partition_key, record.data, record.explicit_hash_key, tier=record.tier)
        delivery = producer.internal.put_record_nowait(record.stream, letter)
        call_when_finished(delivery, counted)

    return put


def _pace(rate: float) -> DeliveryPace:
    return DeliveryPace(
        records_per_second=rate,
        bytes_per_second=1e9,
        in_flight_records=_IN_FLIGHT,
        in_flight_bytes=_BYTES_IN_FLIGHT,
        # The user waits, so pauses after failures have no jitter and their minimum length.
        chance=lambda: 0.0,
    )


def options_of(path: Path) -> SpoolOptions:
    """Return options that open an existing spool file.

    Raises:
        CommandFailure: there is no such file.
    """
    if path.is_dir():
        found = sorted(lock.stem for lock in path.glob("*.lock") if lock.with_suffix("").is_file())
        files = f"one of its spools: {', '.join(found)}" if found else "the producer's spool file"
        message = f"{path} is a folder; give the path of {files}"
        raise CommandFailure(message, exit_code=ExitCode.BAD_INPUT)
    if not path.is_file():
        message = f"{path} is not a file; give the path of the producer's spool"
        raise CommandFailure(message, exit_code=ExitCode.BAD_INPUT)
    # The producer's bounds are unknown; nothing here enlarges the file.
    return SpoolOptions(path=path, max_bytes=1 << 44, max_dead_letter_bytes=1 << 44)


@contextmanager
def opened(reader: Reader) -> Iterator[Reader]:
    """Open a spool file for reading; turn its errors into a CommandFailure."""
    options_of(reader.path)
    try:
        with reader:
            yield reader
    except SpoolError as error:
        raise CommandFailure(str(error), exit_code=ExitCode.BAD_INPUT) from error
