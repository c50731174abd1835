"""python -m benchmarks.logging_emit: measure the cost of a log line for its caller, beside the alternatives.

Each handler runs in its own process, without a network, because only the caller is measured. Two figures:
microseconds of the calling thread's CPU for each `logger.info` of ~210 bytes, in bursts with pauses for
the sender between them; and the time a call takes, p50 and p99, at 20,000 lines/s.
`null` is logging itself, with a handler that does nothing.
"""

# ruff: noqa: PLC0415 - each process imports only the one it measures

import argparse
import json
import logging
import logging.handlers
import os
import queue
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from statistics import median, quantiles
from typing import Any, Final, Literal, cast

TEXT: Final = "x" * 170
BURST_LINES: Final = 2_000
BURSTS: Final = 25
PACED_LINES_PER_SECOND: Final = 20_000
PACED_SECONDS: Final = 2.0


class _Null(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        pass


@contextmanager
def _null() -> Iterator[logging.Handler]:
    yield _Null()


@contextmanager
def _ours(json_format: Literal["plain", "ecs"] = "plain") -> Iterator[logging.Handler]:
    from benchmarks.instant_transport import InstantTransport
    from kpl_integrations.logging_handler import KinesisHandler

    handler = KinesisHandler("logs", json_format=json_format, transport=lambda _: InstantTransport(16))
    yield handler
    handler.close()
    counts = handler.counts()
    assert counts.delivered > 0
    if counts.dropped:
        print(f"# dropped {dict(counts.dropped)} of {counts.emitted}", file=sys.stderr)


@contextmanager
def _ours_ecs() -> Iterator[logging.Handler]:
    with _ours("ecs") as handler:
        yield handler


@contextmanager
def _queue_handler() -> Iterator[logging.Handler]:
    lines: queue.Queue[Any] = queue.Queue(-1)
    listener = logging.handlers.QueueListener(lines, _Null())
    listener.start()
    yield logging.handlers.QueueHandler(lines)
    listener.stop()


class _StubLogs:
    """A CloudWatch Logs client that accepts everything at once."""

    def __getattr__(self, name: str) -> Callable[..., dict[str, Any]]:
        return lambda **_: {"nextSequenceToken": "1", "logStreams": [], "logGroups": []}


@contextmanager
def _watchtower() -> Iterator[logging.Handler]:
    import watchtower

    handler: Any = watchtower.CloudWatchLogHandler(
        log_group_name="g", log_stream_name="s", boto3_client=cast("Any", _StubLogs()), create_log_group=False
    )
    yield handler
    handler.close()


@contextmanager
def _opentelemetry() -> Iterator[logging.Handler]:
    from opentelemetry.sdk._logs import LoggerProvider
    from opentelemetry.sdk._logs.export import BatchLogRecordProcessor, LogRecordExporter, LogRecordExportResult

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from opentelemetry.sdk._logs import LoggingHandler

    class Discard(LogRecordExporter):
        def export(self, batch: object) -> LogRecordExportResult:  # noqa: ARG002
            return LogRecordExportResult.SUCCESS

        def shutdown(self) -> None: ...

        def force_flush(self, timeout_millis: int = 0) -> bool:  # noqa: ARG002
            return True

    provider = LoggerProvider()
    provider.add_log_record_processor(BatchLogRecordProcessor(Discard()))
    yield LoggingHandler(logger_provider=provider)
    provider.shutdown()


HANDLERS: Final[dict[str, Callable[[], Any]]] = {
    "null": _null,
    "KinesisHandler": _ours,
    "KinesisHandler ecs": _ours_ecs,
    "QueueHandler": _queue_handler,
    "watchtower": _watchtower,
    "OpenTelemetry": _opentelemetry,
}


def measure(name: str) -> dict[str, float]:
    logger = logging.getLogger("benchmark")
    logger.setLevel(logging.INFO)
    logger.propagate = False
    with HANDLERS[name]() as handler:
        logger.addHandler(handler)
        _burst(logger)
        time.sleep(1.0)
        bursts = []
        for _ in range(BURSTS):
            bursts.append(_burst(logger))
            time.sleep(0.1)
        paced = _paced(logger)
        logger.removeHandler(handler)
    ranks = quantiles(paced, n=100)
    return {"burst_us": min(bursts), "burst_median_us": median(bursts), "p50_us": ranks[49], "p99_us": ranks[98]}


def _burst(logger: logging.Logger) -> float:
    """Return the caller's CPU microseconds for each line."""
    started = time.thread_time_ns()
    for number in range(BURST_LINES):
        logger.info("%09d %s", number, TEXT)
    return (time.thread_time_ns() - started) / BURST_LINES / 1_000


def _paced(logger: logging.Logger) -> list[float]:
    """Return the microseconds each call took, at a steady rate; it waits in a busy loop, as a busy service does."""
    now = time.perf_counter_ns
    gap = 1_000_000_000 // PACED_LINES_PER_SECOND
    took = []
    due = now()
    for number in range(int(PACED_LINES_PER_SECOND * PACED_SECONDS)):
        while now() < due:
            pass
        started = now()
        logger.info("%09d %s", number, TEXT)
        took.append((now() - started) / 1_000)
        due += gap
    return took


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--one", choices=HANDLERS, help="measure one handler in this process, and print JSON")
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    if arguments.one:
        print(json.dumps(measure(arguments.one)))
        return
    rounds: dict[str, list[dict[str, float]]] = {name: [] for name in HANDLERS}
    # Round by round, so that a busy minute of the machine affects all handlers alike.
    for _ in range(arguments.rounds):
        for name, figures in rounds.items():
            ran = subprocess.run(
                [sys.executable, "-W", "ignore", "-m", "benchmarks.logging_emit", "--one", name],
                check=True,
                stdout=subprocess.PIPE,
                text=True,
            )
            figures.append(json.loads(ran.stdout.splitlines()[-1]))
    print(f"load {os.getloadavg()[0]:.1f}; `adds` is the difference to the null handler in the same run\n")
    print("| handler | CPU us a call, best | adds | median | paced p50 us | paced p99 us | adds |")
    print("|---|---|---|---|---|---|---|")
    best = {name: {key: min(each[key] for each in figures) for key in figures[0]} for name, figures in rounds.items()}
    null = best["null"]
    for name, each in best.items():
        burst, p99 = each["burst_us"], each["p99_us"]
        print(
            f"| {name} | {burst:.2f} | {burst - null['burst_us']:.2f} | {each['burst_median_us']:.2f} "
            f"| {each['p50_us']:.2f} | {p99:.2f} | {p99 - null['p99_us']:.2f} |"
        )


if __name__ == "__main__":
    main()
