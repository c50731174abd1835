"""The commands of `kpl spool`: list, count, drain and export the records of a spool file."""

import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

import anyio
import anyio.lowlevel
import anyio.to_thread
import msgspec
from rich.progress import Progress, TaskID

from kpl_core import DeadLetterOptions, Producer
from kpl_core.durability.dead_letters import ExportReport
from kpl_core.durability.spool import (
    NumberedRecord,
    ReadOnlySpool,
    Spool,
    SpooledRecord,
    SpoolError,
    SpoolStatistics,
    record_to_json,
)
from kpl_integrations.cli.connection import Connection, advice
from kpl_integrations.cli.exit_code import CommandFailure, ExitCode, until_signal
from kpl_integrations.cli.progress import progress
from kpl_integrations.cli.put import RequestTotals
from kpl_integrations.cli.spool_file.dead_letters import export_rows, opened, options_of
from kpl_integrations.cli.terminal import Figure, duration_text, note, print_figures, print_json, printable

_POLL_SECONDS: Final = 0.05
# Records that are claimed at a time to find the first undamaged one.
_MAX_SEARCHED: Final = 100


async def list_records(path: Path, stream: str | None, limit: int, as_json: bool) -> ExitCode:
    """Print a line for each record of `stream` (None: of all), oldest first."""
    now, printed, more = time.time(), 0, False
    with opened(ReadOnlySpool(path)) as spool:
        for page in _pages(spool, stream):
            for stored in page[: limit - printed]:
                if stored.record is None:
                    note(f"record {stored.number} is damaged and skipped")
                else:
                    sys.stdout.write(_line(stored, now, as_json=as_json))
            more = len(page) > limit - printed
            printed += min(len(page), limit - printed)
            if more:
                break
            # Let the loop handle Ctrl-C between two pages.
            await anyio.lowlevel.checkpoint()
    sys.stdout.flush()
    if more:
        note(f"these are the oldest {limit:,}; --limit shows more")
    return ExitCode.DONE


def _pages(spool: ReadOnlySpool, stream: str | None) -> Iterator[list[NumberedRecord]]:
    """Yield the records of a stream (None: of all) with the damaged ones, whose stream is not known."""
    for page in spool.records():
        yield [each for each in page if stream is None or each.record is None or each.record.stream == stream]


def _line(stored: NumberedRecord, now: float, *, as_json: bool) -> str:
    record = stored.record
    assert record is not None  # noqa: S101 - the caller checked
    age = max(0.0, now - record.accepted_at)
    if not as_json:
        line = f"{stored.number:>8}  {duration_text(age):>7}  {record.size_bytes:>9,} B  {record.stream}  "
        return printable(line + record.partition_key) + "\n"
    fields = {
        "number": stored.number,
        "stream": record.stream,
        "partition_key": record.partition_key,
        "size_bytes": record.size_bytes,
        "age_seconds": round(age, 3),
    }
    return msgspec.json.encode(fields).decode() + "\n"


class _StreamTotals(msgspec.Struct):
    records: int = 0
    bytes: int = 0
    oldest_seconds: float = 0.0


async def count(path: Path, as_json: bool) -> ExitCode:
    """Print the number of records, their bytes and the age of the oldest, for each stream."""
    now, damaged = time.time(), 0
    streams: dict[str, _StreamTotals] = {}
    with opened(ReadOnlySpool(path)) as spool:
        for page in spool.records():
            for record in (stored.record for stored in page):
                if record is None:
                    damaged += 1
                    continue
                totals = streams.setdefault(record.stream, _StreamTotals())
                totals.records += 1
                totals.bytes += record.size_bytes
                totals.oldest_seconds = max(totals.oldest_seconds, round(now - record.accepted_at, 3))
            await anyio.lowlevel.checkpoint()
    records, size_bytes = (sum(getattr(each, name) for each in streams.values()) for name in ("records", "bytes"))
    if as_json:
        print_json({"records": records, "bytes": size_bytes, "damaged": damaged, "streams": streams})
        return ExitCode.DONE
    rows = [
        Figure(printable(name), each.records, f"{each.bytes:,} bytes, oldest {duration_text(each.oldest_seconds)}")
        for name, each in sorted(streams.items())
    ]
    if damaged:
        rows.append(Figure("damaged", damaged, "recover them with `sqlite3 FILE .recover`"))
    print_figures([*rows, Figure("total", records, f"records, {size_bytes:,} bytes")], as_json=False)
    return ExitCode.DONE


async def export(path: Path, destination: Path, stream: str | None, as_json: bool) -> ExitCode:
    """Write the records as JSON lines; the destination is replaced at the end or not at all."""

    def work(on_total: Callable[[int], None], on_progress: Callable[[int], None]) -> ExportReport:
        with opened(ReadOnlySpool(path)) as spool:
            on_total(spool.count_records())
            lines = (
                [None if stored.record is None else record_to_json(stored.record) for stored in page]
                for page in _pages(spool, stream)
            )
            return spool.write_lines(destination, lines, on_progress=on_progress)

    return await export_rows(path, destination, work, as_json)


async def drain(
    path: Path,
    rate: float,
    timeout: float | None,
    aggregation: bool | None,
    region: str | None,
    endpoint_url: str | None,
    as_json: bool,
) -> ExitCode:
    """Let a producer replay the spool; a record leaves the file when Kinesis has stored it."""
    found = SpoolStatistics(*[0] * 10)
    damaged = 0

    async def work() -> None:
        nonlocal found, damaged
        # Opening it finds a process that owns the file before anything asks Kinesis.
        found, first = await anyio.to_thread.run_sync(_first_record, path)
        damaged = found.damaged_records
        if first is None:
            return
        if aggregation is None and first.flow is not None:
            message = (
                f"the records in {path} are of a gateway's tenants, which may have aggregation off; give --aggregation "
                f"if all consumers de-aggregate, else --no-aggregation"
            )
            raise CommandFailure(message, exit_code=ExitCode.WRONG_USAGE)
        connection = await Connection.to_stream(first.stream, region=region, endpoint_url=endpoint_url)
        config = connection.producer_config(
            spool=msgspec.structs.replace(options_of(path), replay_records_per_second=rate),
            dead_letters=DeadLetterOptions(redrive=False),
            aggregation_enabled=aggregation is not False,
        )
        totals = RequestTotals()
        async with Producer(config, session=connection.session, hooks=[totals]) as producer:
            letters = producer.dead_letters
            assert letters is not None  # noqa: S101 - its configuration has them
            with progress(as_json=as_json) as bar, anyio.move_on_after(timeout):
                shown = bar.add_task("drain", total=found.records, unit="records", bytes=0)
                try:
                    await _until_empty(letters.spool, found.record_bytes, totals, bar, shown)
                finally:
                    damaged = letters.spool.statistics().damaged_records
            await producer.close(timeout=0.5)

    try:
        ended = await until_signal(work)
        # From the file, because the close after an interruption delivers too.
        with Spool(options_of(path)) as spool:
            last = spool.statistics()
    except SpoolError as error:
        raise CommandFailure(str(error)) from error
    if damaged:
        subject = "1 record is" if damaged == 1 else f"{damaged:,} records are"
        note(f"{subject} damaged; recover with `sqlite3 FILE .recover`")
    return _drained(found, last, ended, as_json=as_json)


def _first_record(path: Path) -> tuple[SpoolStatistics, SpooledRecord | None]:
    """Return what the spool holds, and its first undamaged record; None if there is none."""
    with Spool(options_of(path)) as spool:
        claimed = spool.claim_backlog_nowait(_MAX_SEARCHED).result()
        return spool.statistics(), claimed[0].record if claimed else None


async def _until_empty(spool: Spool, found_bytes: int, totals: RequestTotals, bar: Progress, shown: TaskID) -> None:
    """Wait until each record that is not damaged has left the spool, which had `found_bytes` at the beginning."""
    while (left := (now := spool.statistics()).records - now.damaged_records) > 0:
        bar.update(shown, completed=now.confirmed_records, bytes=max(0, found_bytes - now.record_bytes))
        if (code := totals.newly_failing()) is not None:
            note(f"all requests fail now ({code}) and are retried, {left:,} records left; {advice(code)}")
        await anyio.sleep(_POLL_SECONDS)


def _drained(found: SpoolStatistics, last: SpoolStatistics, ended: ExitCode, *, as_json: bool) -> ExitCode:
    dead_letters = last.letters - found.letters
    left = last.records
    figures = [
        Figure("records", found.records, "found"),
        Figure("delivered", found.records - left - dead_letters),
        Figure("dead_letters", dead_letters, "see `kpl dlq list`" if dead_letters else ""),
        Figure("left", left, "still in the spool" if left else ""),
    ]
    print_figures(figures, as_json=as_json)
    if ended is not ExitCode.DONE:
        note("interrupted; run it again for the rest")
        return ended
    return ExitCode.NOT_ALL_ARRIVED if left or dead_letters else ExitCode.DONE
