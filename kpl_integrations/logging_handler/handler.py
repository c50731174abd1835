"""The handler: formats in the caller's thread, queues without waiting, and leaves the rest to its sender.

    handlers:
      kinesis:
        class: kpl_integrations.logging_handler.KinesisHandler
        stream: logs
        region: us-east-1
        level: INFO

The thread starts with the first record, in the process that logs it; a fork begins anew. `emit` raises nothing.
"""

import contextlib
import logging
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import CancelledError, Future, TimeoutError as FutureTimeoutError
from dataclasses import replace
from typing import Final, Unpack, cast

from kpl_core import BlockingProducer, Config, Producer
from kpl_core.transport.transport import KinesisTransport
from kpl_integrations.early_imports import import_early
from kpl_integrations.last_flush import take_part
from kpl_integrations.logging_handler import process_exit
from kpl_integrations.logging_handler.counts import CLOSED, FORMAT_ERROR, FULL, SENDER_FAILED, LogCounts
from kpl_integrations.logging_handler.entry import ENTRY_BYTES, Entry, entry_size
from kpl_integrations.logging_handler.formatter import JsonFormatter
from kpl_integrations.logging_handler.level_queue import OVERFLOW_RULES, LevelQueue
from kpl_integrations.logging_handler.options import LogOptions, LogSettings, producer_config, without_room
from kpl_integrations.logging_handler.oversize import split, truncate, whole_and_stub
from kpl_integrations.logging_handler.own_threads import (
    OWN_THREADS,
    enter_own_thread,
    is_of_this_process,
    leave_own_thread,
)
from kpl_integrations.logging_handler.partition_key import key_chooser, key_of
from kpl_integrations.logging_handler.sender import SPILL_SHARE, Intake, Sender, say
from kpl_integrations.logging_handler.shared_producer import SHARED_THREAD, SharedProducer

__all__ = ["KinesisHandler"]

_NOTICE_LOGGER: Final = "kpl_integrations.logging_handler"
# The longest partition key: 256 characters of 4 bytes.
_KEY_BYTES: Final = 1_024
# Of close_timeout, what the handler uses at exit. The interpreter needs the rest to take itself down: 0.1 to 0.2 s of
# CPU with a client's modules loaded, which on a busy machine is a second.
_EXIT_SHARE: Final = 0.8
# Of the exit's time, what the early flush may use; and of what is left then, what logging's own flush may use. The
# rest is for the close.
_FLUSH_SHARE: Final = 0.7
_LATE_FLUSH_SHARE: Final = 0.5


class KinesisHandler(logging.Handler):
    """Ships log records to a Kinesis stream.

    Args:
        stream: the stream's name or ARN.
        level: as any handler's.
        config: the producer's options in full, in place of region, endpoint_url, max_sending_bytes and spool_path.
        producer: an open `BlockingProducer` of the application's, in place of one of the handler's own; the
            handler does not close it, so close the handler first.
        transport: makes what replaces the network.
        options: plain words and numbers, each with a default:

            region, endpoint_url: where the stream is; None as for any AWS client.
            json_format: "plain", "ecs" or "otel", unless another formatter is set.
            partition_key: "random", "logger", "trace_id", "extra:<field>" or a function of the log record.
            overflow: "drop_oldest", "drop_newest", "drop_lowest_level" or "block(<seconds>)"; "spool" or "dlq"
                keep on disk what is logged faster than it can be sent.
            oversize: "truncate" or "split" what no Kinesis record holds; "dlq" keeps the whole as a dead letter.
            spool_path: a file on a local disk for what cannot be delivered in time; delivered later.
            max_queue_records, max_queue_bytes: bounds of what waits to be sent.
            max_sending_bytes: the bound of what is being sent.
            close_timeout: seconds that `close`, and with it the exit of the process, may take.
            notice_seconds: how often the stream is told how many records were dropped.

    Raises:
        ConfigError: an option is out of its bounds.
        TypeError: there is no such option.
    """

    def __init__(
        self,
        stream: str,
        *,
        level: int | str = logging.NOTSET,
        config: Config | None = None,
        producer: BlockingProducer | None = None,
        transport: Callable[[Config], KinesisTransport] | None = None,
        **options: Unpack[LogOptions],
    ) -> None:
        super().__init__(level)
        settings = self._settings = LogSettings(**options)
        self.stream = stream
        self.close_timeout = settings.close_timeout
        # Instant on the monotonic clock at which the exit of the process must be over, once it began.
        self.exit_deadline = 0.0
        self._config = producer_config(settings, config, is_shared=producer is not None)
        self._without_room = without_room(settings, self._config, is_shared=producer is not None)
        self._transport = transport
        self._shared = producer
        if producer is None and transport is None:
            import_early(self._config)
        self._choose_key = key_chooser(settings.partition_key)
        self._block_seconds = settings.block_seconds
        self._max_data_bytes = self._config.for_stream(stream).known_max_record_size - _KEY_BYTES
        self._json = JsonFormatter(settings.json_format)
        # Set, so that basicConfig does not set its own.
        self.setFormatter(self._json)
        self._is_closed = False
        self._sender: Sender | None = None
        self.begin_anew()
        process_exit.watch(self)
        take_part(self)

    def begin_anew(self) -> None:
        """Start empty, as a fork's child does: what was accepted before is the parent's to send."""
        # Reentrant: a signal handler may log while its thread is in here.
        self._lock = threading.RLock()
        self._room = threading.Condition(self._lock)
        self._queue = LevelQueue(
            max_records=self._settings.max_queue_records,
            max_bytes=self._settings.max_queue_bytes,
            rule=OVERFLOW_RULES[self._settings.overflow_rule],
        )
        self._refused: Counter[str] = Counter()
        self._loss_was_said = False
        self.exit_deadline = 0.0
        if self._sender is not None:
            process_exit.inherit(self._sender)
        self._sender = None

    def park(self, timeout: float) -> Callable[[], None]:
        """Let the sender stand still while the process forks; return what lets it go on."""
        sender = self._sender
        return (lambda: None) if sender is None else sender.park(timeout)

    def setFormatter(self, fmt: logging.Formatter | None) -> None:  # noqa: N802 - logging's name
        """Use another formatter; None is the handler's own."""
        super().setFormatter(fmt)
        if fmt is None or isinstance(fmt, JsonFormatter):
            self._encode = (fmt or self._json).encode
        else:
            self._encode = lambda record: fmt.format(record).encode(errors="backslashreplace")

    # Per log record

    def handle(self, record: logging.LogRecord) -> bool:
        """Filter and emit, without the handler's own lock: the queue has one, held for less."""
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
        if (record.thread or threading.get_ident()) in OWN_THREADS and is_of_this_process(record):
            return
        if self._shared is not None and record.threadName == SHARED_THREAD and is_of_this_process(record):
            return
        try:
            data = self._encode(record)
            entry: Entry = data
            size = len(data) + ENTRY_BYTES
            if self._choose_key is not None or size > self._max_data_bytes:
                entry = self._entry_of(record, data)
                size = entry_size(entry)
        except Exception:  # noqa: BLE001 - formatters, arguments and key functions are anybody's code
            self._refuse(FORMAT_ERROR)
            # Which writes to a stderr that may be closed, and a `repr` that may fail as the message did.
            with contextlib.suppress(Exception):
                self.handleError(record)
            return
        with self._lock:
            sender = self._sender
            if sender is not None and not sender.is_finished:
                if not self._block_seconds or self._queue.has_room(size):
                    self._queue.put(entry, size, record.levelno)
                    if sender.is_idle:
                        sender.wake()
                    return
            elif not self._start_sender():
                self._refused[CLOSED if self._is_closed else SENDER_FAILED] += 1
                return
            self._wait_for_room(size)
            self._queue.put(entry, size, record.levelno)
            if self._sender is not None and self._sender.is_idle:
                self._sender.wake()

    def _entry_of(self, record: logging.LogRecord, data: bytes) -> Entry:
        """Return what is queued where the bytes alone do not do."""
        key = None if self._choose_key is None else key_of(self._choose_key, record)
        if len(data) <= self._max_data_bytes:
            return data if key is None else (key, data)
        formatter = self.formatter if isinstance(self.formatter, JsonFormatter) else self._json
        text = record.getMessage() if formatter is self.formatter else data.decode()
        if self._settings.oversize == "split":
            return key, split(record, text, formatter, max_bytes=self._max_data_bytes)
        if self._settings.oversize == "dlq":
            return key, whole_and_stub(record, text, formatter, whole=data, max_bytes=self._max_data_bytes)
        return key, truncate(record, text, formatter, original_bytes=len(data), max_bytes=self._max_data_bytes)

    def _wait_for_room(self, size: int) -> None:
        """With the lock held: wait as long as `block(...)` allows."""
        if not self._block_seconds or self._sender is None or self._sender.is_own_thread:
            return
        deadline = time.monotonic() + self._block_seconds
        while not self._queue.has_room(size) and not self._sender.is_finished:
            if self._sender.is_idle:
                self._sender.wake()
            left = deadline - time.monotonic()
            if left <= 0 or not self._room.wait(left):
                return

    def _refuse(self, reason: str) -> None:
        with self._lock:
            self._refused[reason] += 1

    def _start_sender(self) -> bool:
        """With the lock held: start the thread, once; say whether there is one."""
        if self._is_closed or self._sender is not None:
            return False
        # asyncio logs that it made a loop: to us, in this thread, which holds the lock.
        enter_own_thread()
        try:
            sender = Sender(
                self.stream,
                Intake(self._queue, self._refused, self._room),
                self._settings,
                make_producer=self._make_producer,
                make_notice=self._make_notice,
                without_room=self._without_room,
                ended=self._sender_ended,
            )
            sender.start()
        except (RuntimeError, OSError):
            # The interpreter is about to end and starts no threads any more; or there is no file left for a loop's
            # selector, which the next record tries again.
            return False
        finally:
            leave_own_thread()
        self._sender = sender
        return True

    def _make_producer(self, keeps: bool) -> Producer:  # noqa: FBT001 - `ProducerMaker`
        if self._shared is not None:
            return cast("Producer", SharedProducer(self._shared))
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
            return self._encode(notice)
        except Exception:  # noqa: BLE001 - a formatter that wants what only the application's own records have
            return self._json.encode(notice)

    # Waiting and ending

    def flush(self) -> None:
        """Wait until what was emitted has arrived or failed, for `close_timeout` seconds at most.

        Inside `dictConfig`, whose lock the sender's libraries may need, it waits for nothing.
        """
        wait = self.begin_last_flush(_LATE_FLUSH_SHARE)
        if wait is not None:
            wait()

    def begin_last_flush(self, share: float = 1.0) -> Callable[[], None] | None:
        """Begin a flush; return what waits for its end, None where there is nothing to wait for (`last_flush`)."""
        sender = self._sender
        if sender is None or sender.is_own_thread or sender.is_finished or _holds_logging_lock():
            return None
        timeout = self._time_left(share)
        flushed = sender.begin_flush(timeout)

        def wait() -> None:
            with contextlib.suppress(FutureTimeoutError, CancelledError):
                flushed.result(timeout)

        return wait

    def close(self) -> None:
        """Deliver what is there, in `close_timeout` seconds, and say on stderr what was lost; once.

        Inside `dictConfig` the delivery goes on behind it, as long, and the exit of the process waits for it.
        """
        with self._lock:
            sender, was_closed = self._sender, self._is_closed
            self._is_closed = True
        if not was_closed and sender is not None:
            is_behind = sender.is_own_thread or _holds_logging_lock()
            sender.begin_close(self._time_left(1.0), linger=is_behind)
            if not is_behind:
                self.finish_closing()
            elif not sender.is_finished:
                process_exit.keep_until_closed(self)
        super().close()

    def finish_closing(self) -> None:
        """Wait for the sender's end, and say what was lost."""
        sender = self._sender
        if sender is not None:
            sender.join(self._time_left(1.0))
        self._say_loss()
        process_exit.let_go(self)

    def begin_exit(self) -> "Future[bool] | None":
        """The process ends: from now on there is `close_timeout`; return what is flushed in a share of it."""
        now = time.monotonic()
        within = self.close_timeout * _EXIT_SHARE
        self.exit_deadline = now + within
        sender = self._sender
        if sender is None or sender.is_finished or sender.is_closing:
            return None
        sender.spill_from(now + within * SPILL_SHARE)
        # The disk takes its time, too.
        return sender.begin_flush(within * (_FLUSH_SHARE if self._without_room == "wait" else _FLUSH_SHARE / 2))

    def _time_left(self, share: float) -> float:
        if not self.exit_deadline:
            return self.close_timeout
        return max(0.0, self.exit_deadline - time.monotonic()) * share

    def _sender_ended(self, sender: Sender) -> None:
        if sender.is_closing:
            self._say_loss()
            process_exit.let_go(self)

    def _say_loss(self) -> None:
        with self._lock:
            was_said, self._loss_was_said = self._loss_was_said, True
        if was_said:
            return
        counts = self.counts()
        lost = counts.dropped_total + counts.buffered
        if lost:
            reasons = dict(counts.dropped)
            if counts.buffered:
                reasons["Unknown"] = reasons.get("Unknown", 0) + counts.buffered
            listed = ", ".join(f"{count:,} {reason}" for reason, count in sorted(reasons.items()))
            say(self.stream, f"{lost:,} of {counts.emitted:,} log records were lost ({listed})")

    def counts(self) -> LogCounts:
        """Say where every log record of this process is."""
        with self._lock:
            dropped = self._queue.dropped + self._refused
            emitted = self._queue.accepted + self._queue.dropped[FULL] + self._refused.total()
            sender = self._sender
        delivered = kept = 0
        if sender is not None:
            sent = sender.counts()
            delivered, kept = sent.delivered, sent.kept
            dropped.update(sent.dropped)
        return LogCounts(
            emitted=emitted,
            delivered=delivered,
            kept=kept,
            dropped=dropped,
            buffered=emitted - delivered - kept - dropped.total(),
        )

    def __repr__(self) -> str:
        return f"<KinesisHandler {self.stream!r} ({logging.getLevelName(self.level)})>"


def _holds_logging_lock() -> bool:
    """Say whether this thread is inside `dictConfig` or `fileConfig`, which close handlers with logging's lock held."""
    lock = getattr(logging, "_lock", None)
    is_owned = getattr(lock, "_is_owned", None)
    return bool(is_owned is not None and is_owned())
