"""Watches whether log records arrive: it extends a close while they do, and reports on stderr when they do not.

The stream cannot carry such a report, because it is what is broken. It goes to stderr itself, as that of
`logging.lastResort` does: a logger could lead back to the handler. The stream gets notices of dropped records.
"""

import contextlib
import math
import secrets
import sys
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Final

from kpl_core import BufferFull, InvalidUserRecord, KplError, NotSpooled, Producer, ProducerClosed, RecordResult
from kpl_core.background.stderr_report import shown_cause
from kpl_core.producer.delivery import call_when_finished
from kpl_integrations.logging_handler.formatter import text_of
from kpl_integrations.logging_handler.level_queue import LogCounts

# How long records may wait while none is delivered.
_STALLED_SECONDS: Final = 4.0
_QUIET_SECONDS: Final = 60.0
LOOK_SECONDS: Final = 0.5


class TimeExtension:
    """How long a flush or close may go on beyond its time, up to `extra_seconds`: while records are delivered."""

    def __init__(self, extra_seconds: float) -> None:
        self._extra_seconds = extra_seconds
        self._timeout, self._latest_end = 0.0, -math.inf
        self._progress_at, self._delivered = -math.inf, 0

    def begin(self, timeout: float, now: float) -> None:
        """Start a flush or close of `timeout` seconds."""
        self._timeout = timeout
        self._latest_end = now + timeout + self._extra_seconds if self._extra_seconds else -math.inf

    def until(self, delivered: int, now: float) -> float:
        """Return the instant at which it ends if nothing is delivered after the first `delivered` records."""
        if delivered != self._delivered:
            self._delivered, self._progress_at = delivered, now
        return min(self._progress_at + self._timeout, self._latest_end)


class DropNotices:
    """Puts notices into the stream of how many records were dropped, by reason.

    `make_notice` formats what was dropped since the last notice. `drops` returns what was dropped so far. Instants are
    seconds on the monotonic clock.
    """

    def __init__(self, stream: str, seconds: float, make_notice: Callable[[dict[str, int]], bytes], now: float) -> None:
        self._stream, self._seconds, self._make_notice = stream, seconds, make_notice
        self._reported: Counter[str] = Counter()
        self._due_at = now + seconds

    def put_due(self, drops: Callable[[], Counter[str]], producer: Producer, now: float) -> None:
        """Put the notice that is due, if something was dropped; if there is no room, try again next time."""
        if now >= self._due_at:
            self._due_at = now + self._seconds
            self._due_at = self._due_at if self.put(drops, producer) else now

    def put(self, drops: Callable[[], Counter[str]], producer: Producer) -> bool:
        """Put a notice of what was dropped since the last one; return False if it must be put later."""
        dropped = drops()
        news = dropped - self._reported
        if not news:
            return True
        notice = self._make_notice(dict(news))
        try:
            delivery = producer.put_nowait(
                self._stream, partition_key=secrets.token_hex(8), data=notice, tier="critical"
            )
        except (BufferFull, NotSpooled, ProducerClosed):
            return False
        except InvalidUserRecord:
            # The stream takes no record of this size; the next notice reports this again.
            return True
        self._reported = dropped

        def finished(result: RecordResult) -> None:
            if not (result.successful or result.kept):
                # The notice did not arrive, so the next one reports this again.
                self._reported -= news

        call_when_finished(delivery, finished)
        return True


class TroubleReport:
    """Reports lost records at once, and a stream without deliveries after 4 seconds; then once a minute at most.

    Instants are seconds on the monotonic clock.
    """

    def __init__(self, stream: str, now: float) -> None:
        self._stream = stream
        self._settled = 0
        # The time of the opening, the latest delivery, or the look at which records began to wait.
        self._progress_at = now
        self._lost = 0
        self._was_open = False
        self._look_at = self._quiet_until = self._error_quiet_until = -math.inf
        # True if some records had no result at the latest look.
        self.has_unsettled = False

    def look(
        self, counts: Callable[[], LogCounts], lost: Mapping[str, int], producer: Producer | None, now: float
    ) -> None:
        """Look, twice a second at most, and write the report that is due.

        Args:
            counts: returns where every log record is.
            lost: of the dropped ones, those that had left the queue, by error code.
            producer: the producer, None before it is open.
            now: the present instant.
        """
        if now < self._look_at:
            return
        self._look_at = now + LOOK_SECONDS
        failure = None if producer is None else producer.last_failure(self._stream)
        if producer is not None and not self._was_open:
            # From here on records can leave. To make a client takes seconds on a busy machine.
            self._was_open, self._progress_at = True, now
        report = self._due(counts(), sum(lost.values()), failure, now)
        if report is not None:
            write_to_stderr(self._stream, report)

    def entry_failed(self, reason: str, error: BaseException, now: float) -> None:
        """Report an error in the sender's thread at once. `look` reports how many records were lost."""
        if now >= self._error_quiet_until:
            self._error_quiet_until = now + _QUIET_SECONDS
            write_to_stderr(
                self._stream, f"a log record is lost ({reason}): {error_text(error)}; reported once a minute at most"
            )

    def _due(self, counts: LogCounts, lost: int, failure: str | None, now: float) -> str | None:
        settled, had_unsettled = counts.delivered + counts.kept, self.has_unsettled
        self.has_unsettled = counts.buffered > 0
        # The sender of an idle handler looks again only when a record comes.
        if settled != self._settled or not (had_unsettled and self.has_unsettled):
            self._settled, self._progress_at = settled, now
        is_stalled = now - self._progress_at >= _STALLED_SECONDS
        if now < self._quiet_until or not (is_stalled or lost > self._lost):
            return None
        self._quiet_until, self._lost = now + _QUIET_SECONDS, lost
        if failure is not None:
            cause = f" ({shown_cause(failure)})"
        else:
            cause = f" (nothing was delivered for {now - self._progress_at:.0f} s)" if is_stalled else ""
        reasons = ", ".join(f"{count:,} {reason}" for reason, count in sorted(counts.dropped.items()))
        return (
            f"log records {'do not arrive' if cause else 'are lost'}{cause}: of {counts.emitted:,} records "
            f"{counts.delivered:,} are delivered, {counts.buffered:,} wait, {counts.kept:,} are kept on disk, "
            f"{counts.dropped_total:,} are lost{f' ({reasons})' if reasons else ''}; reported once a minute at most"
        )


def error_text(error: BaseException) -> str:
    """Return what a line on stderr says of an error, without secrets."""
    if isinstance(error, KplError):
        return str(error)
    return shown_cause(f"{type(error).__qualname__}: {text_of(error)}")


def write_to_stderr(stream: str, text: str) -> None:
    """Write a line about a handler to stderr, for what cannot be logged."""
    # An application may replace stderr. Its mistake must not stop the sender.
    with contextlib.suppress(Exception):
        sys.stderr.write(f"KinesisHandler for stream {stream!r}: {text}\n")
