"""`kpl put`: lines from a file or a pipe into a stream, and how far they got."""

import signal
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, aclosing
from pathlib import Path
from typing import Final

import anyio
from rich.progress import DownloadColumn, Progress, TaskID, TextColumn

from kpl_core import InvalidUserRecord, Producer, ProducerReport, RecordResult
from kpl_core.options.kinesis_limits import MIB
from kpl_core.records.record_result import EXPIRED
from kpl_integrations.cli.aws_failures import advice
from kpl_integrations.cli.connection import Connection
from kpl_integrations.cli.demo.traffic import Traffic
from kpl_integrations.cli.exit_code import ExitCode
from kpl_integrations.cli.failure import CommandFailure
from kpl_integrations.cli.put.confirmed_lines import ConfirmedLines
from kpl_integrations.cli.put.input_lines import InputLines
from kpl_integrations.cli.put.record_line import ReadLine
from kpl_integrations.cli.signals import exit_code_of, on_signal
from kpl_integrations.cli.terminal import Figure, complain, note, print_figures, progress

__all__ = ["Put", "cause_of"]

_LOOK_SECONDS: Final = 0.1
# Requests that fail for so long are worth a word; a bar that stands still says nothing.
_PATIENCE_SECONDS: Final = 3.0
# A file is read faster than one shard takes it, 1 MiB a second: what is read ahead must not expire waiting.
_OUTSTANDING_BYTES: Final = 16 * MIB
_TTL_MS: Final = 60_000
# After Ctrl-C: what was put is worth a moment, and a second Ctrl-C ends that too.
_LAST_MOMENT_SECONDS: Final = 5.0
# After a failure: what one shard takes of what was read ahead, and a little more.
_AFTER_FAILURE_SECONDS: Final = 20.0


class Put:
    """One run of the command."""

    def __init__(
        self,
        stream: str,
        file: Path,
        read_line: ReadLine,
        *,
        skip: int,
        endpoint_url: str | None,
        region: str | None,
        as_json: bool,
    ) -> None:
        self._stream = stream
        self._file = file
        self._read_line = read_line
        self._skip = skip
        self._endpoint_url = endpoint_url
        self._region = region
        self._as_json = as_json
        self._confirmed = ConfirmedLines()
        self._traffic = Traffic()
        self._bytes_put = 0
        self._has_put = False
        self._bad_input: CommandFailure | None = None
        self._skipped_past: CommandFailure | None = None
        self._signal: signal.Signals | None = None

    async def run(self) -> ExitCode:
        """Put all lines, or as many as can be; say how far it got."""
        with InputLines.opened(self._file) as lines:
            connection = await Connection.resolved(self._stream, region=self._region, endpoint_url=self._endpoint_url)
            await connection.require_stream()
            if lines.is_terminal:
                note(f"type lines to put into {self._stream}; Ctrl-D ends them")
            started_at = time.monotonic()
            config = connection.producer_config(record_ttl_ms=_TTL_MS, max_outstanding_bytes=_OUTSTANDING_BYTES)
            producer = Producer(config, session=connection.session, hooks=[self._traffic])
            async with producer:
                await self._put_all(lines, producer)
                report = await producer.close(timeout=0.5)
            self._confirmed.advance()
        # Figures of nothing would only hide what went wrong.
        if report.accepted or not (self._bad_input or self._skipped_past):
            self._print(report, seconds=time.monotonic() - started_at)
        return self._outcome(report)

    async def _put_all(self, lines: InputLines, producer: Producer) -> None:
        """Put until the input ends, a line is bad, a record failed, or a signal came; then wait for results."""
        reading, waiting = anyio.CancelScope(), anyio.CancelScope()

        def stop(seconds: float) -> None:
            reading.cancel()
            waiting.deadline = min(waiting.deadline, anyio.current_time() + seconds)

        def signalled(number: signal.Signals) -> None:
            if self._signal is not None:
                waiting.cancel()
                return
            self._signal = number
            note(f"waiting {_LAST_MOMENT_SECONDS:g} seconds for what is on its way; once more ends it now")
            stop(_LAST_MOMENT_SECONDS)

        with _bar(lines) as bar, on_signal(signalled):
            shown = bar.add_task("put", total=lines.size_bytes, lines=0)
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(self._watch, producer, stop, bar, shown)
                with reading:
                    await self._read(lines, producer)
                with waiting:
                    await producer.flush()
                tasks.cancel_scope.cancel()

    async def _watch(self, producer: Producer, stop: Callable[[float], object], bar: Progress, shown: TaskID) -> None:
        """Show how far it is, and stop when a record failed: what comes after it would leave a gap."""
        told = False
        while True:
            await anyio.sleep(_LOOK_SECONDS)
            self._confirmed.advance()
            bar.update(shown, completed=self._confirmed.byte_count, lines=self._confirmed.line_count)
            failing = self._traffic.failing
            if failing is None:
                told = False
            elif not told and anyio.current_time() - failing[1] > _PATIENCE_SECONDS:
                told = True
                note(f"no request succeeds now ({failing[0]}); each record is tried for {_TTL_MS / 1000:g} seconds")
            if producer.report().failed_total:
                stop(_AFTER_FAILURE_SECONDS)

    async def _read(self, lines: InputLines, producer: Producer) -> None:
        number = begins_at = 0
        try:
            async with aclosing(lines.blocks()) as blocks:
                async for block in blocks:
                    for line in block:
                        number += 1
                        await self._put_line(line, number, begins_at, producer)
                        begins_at += len(line)
            if number < self._skip:
                message = (
                    f"--skip is {self._skip:,} and {lines.name} has {number:,} lines; check that it is the same input"
                )
                self._skipped_past = CommandFailure(message, exit_code=ExitCode.BAD_INPUT)
        except InvalidUserRecord as error:
            message = f"line {number} of {lines.name}: {error}"
            self._bad_input = CommandFailure(message, exit_code=ExitCode.BAD_INPUT)
        except CommandFailure as failure:
            self._bad_input = failure

    async def _put_line(self, line: bytes, number: int, begins_at: int, producer: Producer) -> None:
        content = line.removesuffix(b"\n").removesuffix(b"\r")
        if number <= self._skip or not content or content.isspace():
            self._confirmed.passed_over(number, begins_at, len(line))
            return
        record = self._read_line(content, number)
        delivery = await producer.put(
            self._stream,
            partition_key=record.partition_key,
            data=record.data,
            explicit_hash_key=record.explicit_hash_key,
        )
        self._bytes_put += len(record.data)
        self._confirmed.put(number, begins_at, len(line), delivery)
        if not self._has_put:
            self._has_put = True
            await self._traffic.shard_map_known()

    def _print(self, report: ProducerReport, *, seconds: float) -> None:
        traffic = self._traffic
        confirmed = self._confirmed.line_count
        per_second = report.delivered / seconds if seconds else 0.0
        figures = [
            Figure("records", report.accepted, f"{report.accepted:,}"),
            Figure("bytes", self._bytes_put, f"{self._bytes_put:,}", "of data"),
            Figure("delivered", report.delivered, f"{report.delivered:,}", f"{per_second:,.0f} a second"),
            Figure("failed", report.failed_total, f"{report.failed_total:,}", _reasons(report)),
            Figure("confirmed_lines", confirmed, f"{confirmed:,}", "of the input, from its beginning"),
            Figure(
                "aggregation_ratio",
                round(traffic.aggregation_ratio, 1),
                f"{traffic.aggregation_ratio:,.1f}",
                "user records in a Kinesis record",
            ),
            Figure("put_records_calls", traffic.requests, f"{traffic.requests:,}"),
            Figure("throttled", traffic.throttled_records, f"{traffic.throttled_records:,}", "Kinesis records"),
            Figure("seconds", round(seconds, 3), f"{seconds:,.1f}"),
        ]
        print_figures(figures, as_json=self._as_json)

    def _outcome(self, report: ProducerReport) -> ExitCode:
        """Say what went wrong, if anything, and how to go on."""
        go_on = f"go on with --skip {self._confirmed.line_count}"
        if self._signal is not None:
            note(f"interrupted; {go_on}")
            return exit_code_of(self._signal)
        if self._confirmed.first_failure is not None:
            number, result = self._confirmed.first_failure
            code, said = cause_of(result)
            message = (
                f"{report.failed_total:,} of {report.accepted:,} records were not delivered, "
                f"the first of them line {number} ({code}: {said}); {advice(code)}, then {go_on}"
            )
            complain(CommandFailure(message))
            return ExitCode.NOT_ALL_ARRIVED
        if self._bad_input is not None:
            message = f"{self._bad_input}; then {go_on}"
            complain(CommandFailure(message))
            return self._bad_input.exit_code
        if self._skipped_past is not None:
            complain(self._skipped_past)
            return self._skipped_past.exit_code
        return ExitCode.DONE


def _bar(lines: InputLines) -> AbstractContextManager[Progress]:
    counted = TextColumn("{task.fields[lines]:,} lines")
    if lines.is_terminal:
        return progress(counted, hidden=True)  # it would be drawn over what is being typed
    return progress(counted) if lines.size_bytes is None else progress(DownloadColumn(), counted)


def cause_of(result: RecordResult) -> tuple[str, str]:
    """Return code and text of what went wrong: of a record that expired, what went wrong before that."""
    causes = [attempt for attempt in result.attempts if attempt.error_code != EXPIRED] or result.attempts
    return causes[-1].error_code or "", " ".join((causes[-1].error_message or "").split()).rstrip(".")


def _reasons(report: ProducerReport) -> str:
    return ", ".join(f"{count:,} {reason}" for reason, count in sorted(report.failed.items()))
