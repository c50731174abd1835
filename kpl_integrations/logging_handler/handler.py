"""The handler: formats in the caller's thread, queues without waiting, and leaves the rest to its sender.

    handlers:
      kinesis:
        class: kpl_integrations.logging_handler.KinesisHandler
        stream: logs
        region: us-east-1
        level: INFO

The sender's thread starts with the first record, in the process that logs it. A forked child starts empty. `emit`
raises nothing.
"""

import contextlib
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, Final, Unpack

from kpl_core import BlockingProducer, Config, KplError, Producer
from kpl_core.background.process_end import (
    FLUSH_SHARE,
    Intake,
    ProcessListener,
    import_early,
    keep_for_parent,
    listen,
    spare_thread,
)
from kpl_core.background.sender import BackgroundSender, SenderEnded, SenderStuck
from kpl_core.background.sigterm import flush_on_sigterm
from kpl_core.background.stderr_report import shown_cause
from kpl_core.options.validation import require_kind
from kpl_core.records.user_record import require_stream
from kpl_core.transport import KinesisTransport
from kpl_integrations.logging_handler.entry import ENTRY_BYTES, Entry, encode_large, entry_size, key_chooser, key_of
from kpl_integrations.logging_handler.formatter import JsonFormatter, LargeLine
from kpl_integrations.logging_handler.level_queue import (
    CLOSED,
    FORMAT_ERROR,
    OVERFLOW_RULES,
    SENDER_FAILED,
    SHUTDOWN,
    LevelQueue,
    LogCounts,
    SenderQueue,
)
from kpl_integrations.logging_handler.options import LogOptions, log_settings, producer_config, without_room
from kpl_integrations.logging_handler.progress import write_to_stderr
from kpl_integrations.logging_handler.sender import SENDER_THREADS, SPILL_SHARE, LogSender

_NOTICE_LOGGER: Final = "kpl_integrations.logging_handler"
# The longest partition key: 256 characters of 4 bytes.
_KEY_BYTES: Final = 1_024
# The share of close_timeout that the handler uses when the process exits. The interpreter needs the rest to finalize:
# 0.1 to 0.2 s of CPU with a client's modules loaded, which on a busy machine is a second.
_EXIT_SHARE: Final = 0.8
# The share of the time left at exit that the flush of `logging.shutdown` may use; the rest is for its close.
_LATE_FLUSH_SHARE: Final = 0.5


def _is_foreign(record: logging.LogRecord) -> bool:
    return record.thread not in SENDER_THREADS


# What the producer logs about its close, the handler reports itself, with the count of log records.
logging.getLogger("kpl_core").addFilter(_is_foreign)


class KinesisHandler(logging.Handler, ProcessListener):
    """Ships log records to a Kinesis stream.

    Args:
        stream: the stream's name or ARN; required.
        level: as any handler's.
        config: the producer's options in full, in place of region, endpoint_url, max_sending_bytes and spool_path;
            or a table of them for `Config.from_mapping`, as `dictConfig` can have it.
        producer: an open `BlockingProducer` of the application, used instead of a producer of the handler's own.
            The handler does not close it, so close the handler first.
        transport: makes the transport that replaces the network.
        options: plain words and numbers, each with a default:

            region, endpoint_url: where the stream is; None as for any AWS client.
            json_format: "plain", "ecs" or "otel", unless another formatter is set.
            partition_key: "random", "logger", "trace_id", "extra:<field>" or a function of the log record.
            overflow: "drop_oldest", "drop_newest", "drop_lowest_level" or "block(<seconds>)"; "spool" or "dlq"
                keep on disk what is logged faster than it can be sent.
            oversize: "truncate" or "split" a record that is too large; "dlq" keeps the whole as a dead letter.
            spool_path: a file on a local disk for what cannot be delivered in time; delivered later.
            max_queue_bytes: bound of the queue; max_queue_records: a second bound, None for none.
            max_sending_bytes: the bound of what is being sent.
            close_timeout: seconds that `close`, and so the exit of the process, may take. None: they end 5 seconds
                after the last delivery, and at most 1 second for each MiB of max_queue_bytes later.
            notice_seconds: seconds between notices in the stream of how many records were dropped.
            flush_on_sigterm: flush before SIGTERM ends the process, and call the handler that was set for it. True:
                within 3 seconds; a number: within so many. None: only in children of multiprocessing.

    Raises:
        ConfigError: there is no stream, an option is out of its bounds, or it excludes another one.
        InvalidUserRecord: no stream can have this name.
        TypeError: there is no such option.
    """

    def __init__(
        self,
        stream: str = "",
        *,
        level: int | str = logging.NOTSET,
        config: Config | Mapping[str, Any] | None = None,
        producer: BlockingProducer | None = None,
        transport: Callable[[Config], KinesisTransport] | None = None,
        **options: Unpack[LogOptions],
    ) -> None:
        # In `dictConfig` a name without ext:// stays a str, and the first log call would raise.
        require_kind(
            "producer", producer, BlockingProducer | None, "an open BlockingProducer; dictConfig needs 'ext://'"
        )
        settings = self._settings = log_settings(stream, config, dict(options), is_shared=producer is not None)
        require_stream(stream)
        self.stream = stream
        self.close_timeout = settings.patience_seconds
        # The instant on the monotonic clock at which the exit must be over, once it has begun; 0 before.
        self._exit_deadline = 0.0
        self._config = producer_config(settings, config, is_shared=producer is not None)
        self._without_room = without_room(settings, self._config, is_shared=producer is not None)
        self._transport = transport
        self._shared = producer
        if producer is None and transport is None:
            import_early(self._config)
        self._choose_key = key_chooser(settings.partition_key)
        self._block_seconds = settings.block_seconds
        self._max_data_bytes = self._config.for_stream(stream).known_max_record_size - _KEY_BYTES
        self._encode_large = partial(encode_large, rule=settings.oversize, max_bytes=self._max_data_bytes)
        self._json = JsonFormatter(settings.json_format)
        # Only now: `logging` flushes at the exit each handler that began, also one whose options are wrong.
        super().__init__(level)
        # Without a formatter, basicConfig would set its own.
        self.setFormatter(self._json)
        self._is_closed = False
        self._sender: LogSender | None = None
        self.begin_child()
        self.flushes_at_sigterm = settings.flush_on_sigterm is not False
        listen(self)
        flush_on_sigterm(settings.flush_on_sigterm)

    def begin_child(self) -> None:
        """Start empty, as a forked child does: the parent sends what was accepted before."""
        # Reentrant, because a signal handler may log while its thread is in here.
        self._lock = threading.RLock()
        self._room = threading.Condition(self._lock)
        self.intake: Intake = Intake(self._room, raises=False)
        self._queue = LevelQueue(
            max_records=self._settings.max_queue_records or sys.maxsize,
            max_bytes=self._settings.max_queue_bytes,
            rule=OVERFLOW_RULES[self._settings.overflow_rule],
        )
        self._loss_was_reported = False
        self._exit_deadline = 0.0
        if self._sender is not None:
            keep_for_parent(self._sender)
            SENDER_THREADS.clear()
        self._sender = None
        # The first record may come after the main thread has ended.
        self._spare = None if self._shared or self._is_closed else spare_thread("kpl-log-sender", self)

    def pause_for_fork(self, timeout: float) -> Callable[[], object]:
        """Stop the sender's thread while the process forks."""
        sender = self._sender
        return (lambda: None) if sender is None or sender.is_finished else sender.pause(timeout)

    def setFormatter(self, fmt: logging.Formatter | None) -> None:  # noqa: N802 - logging's name
        """Use another formatter; None selects the handler's own."""
        super().setFormatter(fmt)
        self._line: Callable[[logging.LogRecord], bytes | LargeLine]
        if fmt is None:
            self._line = self._json.line
        elif isinstance(fmt, JsonFormatter):
            # A subclass may encode in another way.
            self._line = fmt.line if type(fmt).encode is JsonFormatter.encode else fmt.encode
        else:
            self._line = lambda record: fmt.format(record).encode(errors="backslashreplace")

    # Per log record

    def handle(self, record: logging.LogRecord) -> bool:
        """Filter and emit without the handler's own lock; the queue's lock is held for a shorter time."""
        if self.filters:
            verdict = self.filter(record)
            if not verdict:
                return False
            if isinstance(verdict, logging.LogRecord):
                # From Python 3.12 on a filter may replace the record.
                record = verdict
        self.emit(record)
        return True

    def emit(self, record: logging.LogRecord) -> None:
        """Queue the record; raises nothing, and waits only with `overflow="block(...)"`."""
        if (record.thread or threading.get_ident()) in SENDER_THREADS and _is_of_this_process(record):
            return
        try:
            data = self._line(record)
            entry: Entry = data
            size = len(data) + ENTRY_BYTES
            if self._choose_key is not None or size > self._max_data_bytes:
                entry = self._entry_of(record, data)
                size = entry_size(entry)
        except Exception:  # noqa: BLE001 - code of formatters, arguments and key functions
            self._refuse(FORMAT_ERROR)
            # It writes to a stderr that may be closed, and uses a `repr` that may fail as the message did.
            with contextlib.suppress(Exception):
                self.handleError(record)
            return
        with self._lock:
            sender = self._sender
            if sender is None or sender.is_finished:
                sender = self._start_sender()
                if sender is None:
                    self._queue.refuse(CLOSED if self._is_closed else self._refusal)
                    return
            if self._block_seconds:
                self._wait_for_room(size, sender)
            if self.intake.is_stopped and not _holds_logging_lock() and not self.intake.admits():
                self._queue.refuse(CLOSED)
                return
            self._queue.put(entry, size, record.levelno)
            if sender.is_idle:
                sender.wake()

    def _entry_of(self, record: logging.LogRecord, data: bytes | LargeLine) -> Entry:
        """Return what is queued for a record that is too large or has a chosen partition key."""
        key = None if self._choose_key is None else key_of(self._choose_key, record)
        if isinstance(data, bytes) and len(data) > self._max_data_bytes:
            formatter = self.formatter
            if isinstance(formatter, JsonFormatter):
                line = formatter.large_line(record, record.getMessage())
            else:
                line = self._json.large_line(record, data.decode())
            line.whole, data = data, line
        if isinstance(data, LargeLine) and len(data) + ENTRY_BYTES > self._settings.max_queue_bytes:
            # The queue takes it only if it becomes shorter.
            return key, self._encode_large(data)
        return data if key is None else (key, data)

    def _wait_for_room(self, size: int, sender: LogSender) -> None:
        """With the lock held: wait as long as `block(...)` allows."""
        deadline = time.monotonic() + self._block_seconds
        while not sender.is_current and not self._queue.has_room(size) and not sender.is_finished:
            if sender.is_idle:
                sender.wake()
            left = deadline - time.monotonic()
            if left <= 0 or not self._room.wait(left):
                return

    def _refuse(self, reason: str) -> None:
        with self._lock:
            self._queue.refuse(reason)

    def _start_sender(self) -> LogSender | None:
        """With the lock held: start the sender, once; return None if that fails."""
        if self._is_closed or self._sender is not None:
            return None
        # asyncio logs that it made a loop: to this handler, in this thread, which holds the lock.
        SENDER_THREADS.add(threading.get_ident())
        try:
            sender = LogSender(
                self.stream,
                SenderQueue(self._queue, self._lock, self._room, self._encode_large),
                self._settings,
                shared=self._shared,
                make_producer=self._make_producer,
                make_notice=self._make_notice,
                without_room=self._without_room,
                ended=self._sender_ended,
            )
            is_started = sender.start(self._spare)
        except (RuntimeError, OSError):
            # The interpreter finalizes and starts no threads, or no file descriptor is left for a loop's selector. The
            # next record tries again.
            return None
        finally:
            SENDER_THREADS.discard(threading.get_ident())
        if not is_started:
            return None
        self._sender = sender
        return sender

    @property
    def _refusal(self) -> str:
        """Why a record is refused now that there is no sender."""
        if self._sender is not None:
            return self._sender.end_reason
        return SENDER_FAILED if self._shared is None else SHUTDOWN

    def _make_producer(self, keeps: bool) -> Producer:  # noqa: FBT001 - False keeps nothing on disk
        config = self._config if keeps else replace(self._config, spool=None, dead_letters=None)
        return Producer(config, transport=None if self._transport is None else self._transport(config))

    def _make_notice(self, dropped: dict[str, int]) -> bytes:
        count = sum(dropped.values())
        notice = logging.makeLogRecord(
            {
                "name": _NOTICE_LOGGER,
                "levelno": logging.WARNING,
                "levelname": "WARNING",
                "msg": f"{count:,} log records were dropped",
                "dropped_records": count,
                "dropped_by_reason": dropped,
            }
        )
        try:
            line = self._line(notice)
        except Exception:  # noqa: BLE001 - a formatter may need fields that only the application's records have
            line = self._json.line(notice)
        return line if isinstance(line, bytes) else line.encode()

    # Waiting and ending

    def flush(self) -> None:
        """Wait until what was emitted has arrived or failed, as long as `close_timeout` allows.

        Inside `dictConfig`, whose lock the sender's libraries may need, it waits for nothing.
        """
        wait = self._begin_flush(self._time_left(_LATE_FLUSH_SHARE))
        if wait is not None:
            wait()

    def _begin_flush(self, timeout: float) -> Callable[[], object] | None:
        sender = self._sender
        if sender is None or sender.is_current or sender.is_finished or _holds_logging_lock():
            return None
        try:
            wait_for_flush = sender.begin_flush(timeout)
        except SenderEnded:
            return None

        def wait() -> None:
            with contextlib.suppress(KplError, SenderEnded, SenderStuck):
                wait_for_flush(timeout)

        return wait

    def close(self) -> None:
        """Deliver what is there as long as `close_timeout` allows, and report on stderr what was lost; once.

        Inside `dictConfig` it returns at once. The sender goes on for as long, and the exit of the process waits.
        """
        with self._lock:
            sender, was_closed = self._sender, self._is_closed
            self._is_closed = True
            if self._spare is not None:
                self._spare.end()
        if sender is None:
            self._report_loss()
        elif not was_closed:
            is_in_background = sender.is_current or _holds_logging_lock()
            sender.begin_close(self._time_left(1.0), linger=is_in_background)
            if not is_in_background:
                self.finish_closing()
        super().close()

    def finish_closing(self) -> None:
        """Wait for the end of a sender that is closing, and report what was lost."""
        sender = self._sender
        if sender is not None:
            sender.join(self._time_left(1.0))
        self._report_loss()

    def begin_last_flush(self, share: float = 1.0, seconds: float | None = None) -> Callable[[], object] | None:
        """Start a flush within `seconds`, or `share` of `close_timeout`. If the handler is closing, wait for that.

        A share below 1 means that the process exits afterwards, and the exit gets a part of the time too.
        """
        sender = self._sender
        if sender is not None and sender.is_closing and not sender.is_finished:
            return self.finish_closing
        if seconds is None:
            seconds = self.close_timeout * (share if share == 1.0 else share * _EXIT_SHARE)
        return self._begin_flush(seconds)

    def undelivered(self) -> tuple[int, str]:
        """Return how many log records wait in the queue and in the producer."""
        return self.counts().buffered, f"log records to stream {self.stream!r}"

    def end_by_signal(self) -> None:
        """Report on stderr what is not delivered."""
        self._report_loss()

    @property
    def sender(self) -> BackgroundSender | None:
        """Return what delivers; None before the first record."""
        return None if self._sender is None else self._sender.background

    def begin_exit(self, spent: float) -> Callable[[], object] | None:
        """Limit everything that follows to the rest of `close_timeout`; `logging.shutdown` flushes and closes."""
        now = time.monotonic()
        within = self.close_timeout * _EXIT_SHARE
        # A flush that took longer did so because records were delivered.
        within -= min(spent, within * FLUSH_SHARE) if self._settings.extra_seconds else min(spent, within)
        self._exit_deadline = now + within
        sender = self._sender
        if sender is None or sender.is_finished:
            return None
        sender.spill_from(now + within * SPILL_SHARE)
        return self.finish_closing if sender.is_closing else None

    def close_in_child(self) -> None:
        """Close: no `logging.shutdown` follows in a child of multiprocessing."""
        self.close()

    def _time_left(self, share: float) -> float:
        """Return how many seconds a flush or close may take; `share` is that of the rest once the process exits."""
        if not self._exit_deadline:
            return self.close_timeout
        return max(0.0, self._exit_deadline - time.monotonic()) * share

    def _sender_ended(self, sender: LogSender) -> None:
        if sender.is_closing:
            self._report_loss()

    def _report_loss(self) -> None:
        with self._lock:
            was_reported, self._loss_was_reported = self._loss_was_reported, True
        if was_reported:
            return
        counts = self.counts()
        lost = counts.dropped_total + counts.buffered
        if lost:
            reasons = dict(counts.dropped)
            if counts.buffered:
                reasons["Unknown"] = reasons.get("Unknown", 0) + counts.buffered
            listed = ", ".join(f"{count:,} {reason}" for reason, count in sorted(reasons.items()))
            failure = None if self._sender is None else self._sender.last_failure()
            cause = "" if failure is None else f"; the last request failed: {shown_cause(failure)}"
            if self._sender is None and SHUTDOWN in reasons:
                cause = "; its BlockingProducer was not open, so log inside `with producer:`"
            write_to_stderr(self.stream, f"{lost:,} of {counts.emitted:,} log records were lost ({listed}){cause}")

    def counts(self) -> LogCounts:
        """Return where every log record of this process is."""
        with self._lock:
            if self._sender is not None:
                return self._sender.counts()
            emitted, dropped = self._queue.accepted + self._queue.refused, +self._queue.dropped
        return LogCounts(emitted=emitted, delivered=0, dropped=dropped, buffered=emitted - dropped.total())

    def __repr__(self) -> str:
        return f"<KinesisHandler {self.stream!r} ({logging.getLevelName(self.level)})>"


def _is_of_this_process(record: logging.LogRecord) -> bool:
    """Return True if a record was made here.

    A record that came through a queue may be from another process: a forked child gives its first threads the same
    identities that the parent's threads have.
    """
    return record.process is None or record.process == os.getpid()


def _holds_logging_lock() -> bool:
    """Return True inside `dictConfig` and `fileConfig`, which close handlers with logging's lock held."""
    is_owned = getattr(getattr(logging, "_lock", None), "_is_owned", None)
    return bool(is_owned is not None and is_owned())
