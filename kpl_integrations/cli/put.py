"""`kpl put`: puts lines from a file or a pipe into a stream, and reports which lines are confirmed."""

import math
import signal
import time
from collections.abc import Callable
from contextlib import aclosing
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import anyio
from rich.progress import Progress, TaskID

from kpl_core import InvalidUserRecord, Producer, ProducerReport, RecordResult
from kpl_core.hooks import Fact, RequestCompleted, ShardMapRefreshed
from kpl_core.options.kinesis_limits import MIB
from kpl_core.records.record_result import EXPIRED
from kpl_integrations.cli.connection import Connection, advice
from kpl_integrations.cli.exit_code import SIGNAL_CODES, CommandFailure, ExitCode, on_signal
from kpl_integrations.cli.progress import progress
from kpl_integrations.cli.put_input import ConfirmedLines, InputLines, ReadLine
from kpl_integrations.cli.terminal import Figure, note, print_failure, print_figures

_POLL_SECONDS: Final = 0.1
# Print a note when requests have failed for this long; a progress bar that does not move explains nothing.
_PATIENCE_SECONDS: Final = 3.0
# A file is read faster than a shard accepts it (1 MiB a second), and records read ahead must not expire.
_OUTSTANDING_BYTES: Final = 16 * MIB
_TTL_MS: Final = 60_000
# After Ctrl-C, wait this long for records in flight; a second Ctrl-C ends the wait.
_AFTER_SIGNAL_SECONDS: Final = 5.0
# After a failed record, wait this long for records in flight: one shard accepts the read-ahead in 16 seconds.
_AFTER_FAILURE_SECONDS: Final = 20.0
_SHARD_MAP_SECONDS: Final = 1.0


@dataclass
class PutCommand:
    """One run of the command."""

    stream: str
    file: Path
    read_line: ReadLine
    skip: int
    endpoint_url: str | None
    region: str | None
    as_json: bool

    def __post_init__(self) -> None:
        self._confirmed = ConfirmedLines()
        self._totals = RequestTotals()
        self._bytes_put = 0
        self._has_put = False
        self._bad_input: CommandFailure | None = None
        self._skip_too_large: CommandFailure | None = None
        self._signal: signal.Signals | None = None

    async def run(self) -> ExitCode:
        """Put all lines, or as many as possible; print the summary."""
        with InputLines.opened(self.file) as lines:
            connection = await Connection.to_stream(self.stream, region=self.region, endpoint_url=self.endpoint_url)
            if lines.is_terminal:
                note(f"type lines to put into {self.stream}; press Ctrl-D at the end")
            started_at = time.monotonic()
            config = connection.producer_config(record_ttl_ms=_TTL_MS, max_outstanding_bytes=_OUTSTANDING_BYTES)
            producer = Producer(config, session=connection.session, hooks=[self._totals])
            async with producer:
                await self._put_all(lines, producer)
                report = await producer.close(timeout=0.5)
            self._confirmed.advance()
        # A table of zeros would only hide the error message.
        if report.accepted or not (self._bad_input or self._skip_too_large):
            self._print(report, seconds=time.monotonic() - started_at)
        return self._outcome(report)

    async def _put_all(self, lines: InputLines, producer: Producer) -> None:
        """Put until the input ends, a line is bad, a record fails or a signal arrives; then wait for results."""
        reading, waiting = anyio.CancelScope(), anyio.CancelScope()

        def stop(seconds: float) -> None:
            reading.cancel()
            waiting.deadline = min(waiting.deadline, anyio.current_time() + seconds)

        def signalled(number: signal.Signals) -> None:
            if self._signal is not None:
                waiting.cancel()
                return
            self._signal = number
            note(f"waiting {_AFTER_SIGNAL_SECONDS:g} seconds for records in flight; signal again to stop now")
            stop(_AFTER_SIGNAL_SECONDS)

        # A bar would overwrite typed text.
        with progress(as_json=self.as_json, hidden=lines.is_terminal) as bar, on_signal(signalled):
            shown = bar.add_task("put", total=lines.size_bytes, unit="bytes", lines=0)
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(self._watch, producer, stop, bar, shown)
                with reading:
                    await self._read(lines, producer)
                with waiting:
                    await producer.flush()
                tasks.cancel_scope.cancel()

    async def _watch(self, producer: Producer, stop: Callable[[float], object], bar: Progress, shown: TaskID) -> None:
        """Update the progress bar, and stop when a record failed, because later lines would leave a gap."""
        while True:
            await anyio.sleep(_POLL_SECONDS)
            self._confirmed.advance()
            bar.update(shown, completed=self._confirmed.byte_count, lines=self._confirmed.line_count)
            if (code := self._totals.newly_failing()) is not None:
                note(f"all requests fail now ({code}); each record is retried for {_TTL_MS / 1000:g} seconds")
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
            if number < self.skip:
                message = (
                    f"--skip is {self.skip:,} and {lines.name} has {number:,} lines; check that it is the same input"
                )
                self._skip_too_large = CommandFailure(message, exit_code=ExitCode.BAD_INPUT)
        except InvalidUserRecord as error:
            message = f"line {number} of {lines.name}: {error}"
            self._bad_input = CommandFailure(message, exit_code=ExitCode.BAD_INPUT)
        except CommandFailure as failure:
            self._bad_input = failure

    async def _put_line(self, line: bytes, number: int, begins_at: int, producer: Producer) -> None:
        content = line.removesuffix(b"\n").removesuffix(b"\r")
        if number <= self.skip or not content or content.isspace():
            self._confirmed.skip(number, begins_at, len(line))
            return
        record = self.read_line(content, number)
        delivery = await producer.internal.put_unacknowledged(self.stream, record)
        self._bytes_put += len(record.data)
        self._confirmed.put(number, begins_at, len(line), delivery)
        if not self._has_put:
            self._has_put = True
            await self._totals.shard_map_known()

    def _print(self, report: ProducerReport, *, seconds: float) -> None:
        totals = self._totals
        confirmed = self._confirmed.line_count
        per_second = report.delivered / seconds if seconds else 0.0
        figures = [
            Figure("records", report.accepted),
            Figure("bytes", self._bytes_put, "of data"),
            Figure("delivered", report.delivered, f"{per_second:,.0f} a second"),
            Figure("failed", report.failed_total, failure_reasons(report)),
            Figure("confirmed_lines", confirmed, "of the input, from its beginning"),
            Figure("aggregation_ratio", round(totals.aggregation_ratio, 1), "user records in a Kinesis record"),
            Figure("put_records_calls", totals.requests),
            Figure("throttled", totals.throttled_records, "Kinesis records"),
            Figure("seconds", round(seconds, 3), text=f"{seconds:,.1f}"),
        ]
        print_figures(figures, as_json=self.as_json)

    def _outcome(self, report: ProducerReport) -> ExitCode:
        """Print the failure, if any, with the option to continue with; return the exit status."""
        advice_to_continue = f"continue with --skip {self._confirmed.line_count}"
        if self._signal is not None:
            note(f"interrupted; {advice_to_continue}")
            return SIGNAL_CODES[self._signal]
        if self._confirmed.first_failure is not None:
            number, result = self._confirmed.first_failure
            code, text = cause_of(result)
            message = (
                f"{report.failed_total:,} of {report.accepted:,} records were not delivered, "
                f"the first of them line {number} ({code}: {text}); {advice(code)}, then {advice_to_continue}"
            )
            print_failure(CommandFailure(message))
            return ExitCode.NOT_ALL_ARRIVED
        if self._bad_input is not None:
            message = f"{self._bad_input}; then {advice_to_continue}"
            print_failure(CommandFailure(message))
            return self._bad_input.exit_code
        if self._skip_too_large is not None:
            print_failure(self._skip_too_large)
            return self._skip_too_large.exit_code
        return ExitCode.DONE


def cause_of(result: RecordResult) -> tuple[str, str]:
    """Return code and text of the last error; for an expired record, of the last error before it expired."""
    causes = [attempt for attempt in result.attempts if attempt.error_code != EXPIRED] or result.attempts
    return causes[-1].error_code or "", " ".join((causes[-1].error_message or "").split()).rstrip(".")


def failure_reasons(report: ProducerReport) -> str:
    """Return the reasons of failed records with their counts."""
    return ", ".join(f"{count:,} {reason}" for reason, count in sorted(report.failed.items()))


class RequestTotals:
    """A hook that counts requests and their records. `kpl demo` uses it too."""

    def __init__(self) -> None:
        self.requests = 0
        self.kinesis_records = 0
        self.throttled_records = 0
        # User records in requests; a record that is sent twice counts twice.
        self.user_records = 0
        # Error code and time (loop clock) of the first failed request since the last successful one; `math.inf` once it
        # was reported.
        self._failing: tuple[str, float] | None = None
        self._shard_map_known = anyio.Event()

    def __call__(self, fact: Fact) -> None:
        """Count a completed request, and notice when the shard map is known."""
        if isinstance(fact, ShardMapRefreshed):
            self._shard_map_known.set()
        if not isinstance(fact, RequestCompleted):
            return
        self.requests += 1
        self.kinesis_records += fact.kinesis_records
        self.user_records += fact.user_records
        self.throttled_records += sum(fact.throttled_by_shard.values())
        if fact.error_code is None:
            self._failing = None
        elif self._failing is None:
            self._failing = fact.error_code, fact.ended_at

    def newly_failing(self) -> str | None:
        """Return the error code when all requests have failed for three seconds; once, until one succeeds."""
        if self._failing is None or anyio.current_time() - self._failing[1] <= _PATIENCE_SECONDS:
            return None
        code, _ = self._failing
        self._failing = code, math.inf
        return code

    async def shard_map_known(self) -> None:
        """Wait until the stream's shards are known, at most one second (listing them may be forbidden).

        A producer lists the shards after a stream's first user record, and sends records unaggregated until then. A
        caller with many records should wait after the first.
        """
        with anyio.move_on_after(_SHARD_MAP_SECONDS):
            await self._shard_map_known.wait()

    @property
    def aggregation_ratio(self) -> float:
        """The average number of user records in a Kinesis record; 0 before the first."""
        return self.user_records / self.kinesis_records if self.kinesis_records else 0.0
