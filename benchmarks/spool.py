"""python -m benchmarks.spool [FOLDER]: measure the spool beside raw batched SQLite, on the same disk, round by round.

Records carry 1 KiB of data and are committed about 500 to a transaction, WAL, synchronous FULL. Raw
SQLite is the best of three: one INSERT a row (executemany) with SQLite's own page size, the same with the
spool's page size, and the spool's many rows to a statement. Each round runs all variants once, and a
ratio is computed within its round. All of them include the disk's fsync.
"""

import os
import sqlite3
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from statistics import median

from benchmarks.machine import calibration_ms, describe_machine
from kpl_core.durability.spool import Spool, SpooledRecord, SpoolOptions

RECORDS = 60_000
PER_COMMIT = 500
DATA = os.urandom(1_024)
ROUNDS = 5
SPOOL_PAGE_BYTES = 16_384


def raw(folder: Path, *, page_bytes: int, rows_per_statement: int) -> float:
    """Return the records a second of raw SQLite."""
    connection = sqlite3.connect(folder / "raw.db", isolation_level=None)
    for pragma in (f"page_size = {page_bytes}", "journal_mode = WAL", "synchronous = FULL"):
        connection.execute(f"PRAGMA {pragma}")
    connection.execute("CREATE TABLE records (id INTEGER PRIMARY KEY, data BLOB)")
    values = ",".join(["(?,?)"] * rows_per_statement)
    started_at = time.perf_counter()
    for first in range(0, RECORDS, PER_COMMIT):
        connection.execute("BEGIN")
        if rows_per_statement == 1:
            rows = [(number, DATA) for number in range(first, first + PER_COMMIT)]
            connection.executemany("INSERT INTO records VALUES (?,?)", rows)
        else:
            for start in range(first, first + PER_COMMIT, rows_per_statement):
                flat = [value for number in range(start, start + rows_per_statement) for value in (number, DATA)]
                connection.execute(f"INSERT INTO records VALUES {values}", flat)  # noqa: S608 - question marks
        connection.execute("COMMIT")
    seconds = time.perf_counter() - started_at
    assert connection.execute("SELECT count(*) FROM records").fetchone() == (RECORDS,)
    connection.close()
    return RECORDS / seconds


@contextmanager
def spool_in(folder: Path) -> Iterator[Spool]:
    with Spool(SpoolOptions(path=folder / "spool.db", commit_max_records=PER_COMMIT)) as spool:
        yield spool


def appended(spool: Spool, *, claim: bool, per_append: int = PER_COMMIT) -> list[range]:
    """Append all records, at most 10,000 of them without an acknowledgement; return their ids."""
    ids: list[range] = []
    waiting: deque[Future[range]] = deque()
    for first in range(0, RECORDS, per_append):
        records = [SpooledRecord("orders", f"key-{number}", DATA, 1.7e9) for number in range(first, first + per_append)]
        waiting.append(spool.append_nowait(records, claim=claim))
        if len(waiting) > 10_000 // per_append:
            ids.append(waiting.popleft().result())
    return ids + [future.result() for future in waiting]


def append_chunks(folder: Path) -> float:
    """Return records a second acknowledged, put 500 at a time."""
    with spool_in(folder) as spool:
        started_at = time.perf_counter()
        appended(spool, claim=True)
        seconds = time.perf_counter() - started_at
        assert spool.statistics().records == RECORDS
    return RECORDS / seconds


def append_singly(folder: Path) -> float:
    """Return records a second acknowledged, each put and acknowledged alone."""
    with spool_in(folder) as spool:
        started_at = time.perf_counter()
        appended(spool, claim=True, per_append=1)
        return RECORDS / (time.perf_counter() - started_at)


def append_and_confirm(folder: Path) -> float:
    """Return records a second that enter the spool and leave it again."""
    with spool_in(folder) as spool:
        started_at = time.perf_counter()
        waiting: deque[Future[range]] = deque()
        marks: list[Future[None]] = []
        for first in range(0, RECORDS, PER_COMMIT):
            records = [
                SpooledRecord("orders", f"key-{number}", DATA, 1.7e9) for number in range(first, first + PER_COMMIT)
            ]
            waiting.append(spool.append_nowait(records, claim=True))
            if len(waiting) > 20:
                marks.append(spool.confirm(waiting.popleft().result()))
        marks += [spool.confirm(future.result()) for future in waiting]
        for mark in marks:
            mark.result()
        seconds = time.perf_counter() - started_at
        assert spool.statistics().records == 0
    return RECORDS / seconds


def replay(folder: Path) -> float:
    """Return records a second read back from the backlog."""
    with spool_in(folder) as spool:
        appended(spool, claim=False)
        started_at = time.perf_counter()
        read = 0
        while claimed := spool.claim_backlog_nowait(1_000).result():
            read += len(claimed)
        seconds = time.perf_counter() - started_at
        assert read == RECORDS
    return RECORDS / seconds


@contextmanager
def busy_interpreter() -> Iterator[None]:
    """Run a thread that competes for the interpreter lock, as a busy event loop does."""
    ended = threading.Event()

    def spin() -> None:
        while not ended.is_set():
            sum(range(1_000))

    thread = threading.Thread(target=spin)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def acknowledgement_ms(folder: Path, *, busy: bool) -> tuple[float, float]:
    """Return median and 99th percentile, in ms, from append to acknowledgement of 100 records, one at a time."""
    waits = []
    with spool_in(folder) as spool:
        records = [SpooledRecord("orders", f"key-{number}", DATA, 1.7e9) for number in range(100)]
        for _ in range(200):
            started_at = time.perf_counter()
            if busy:
                with busy_interpreter():
                    spool.append_nowait(records, claim=True).result()
            else:
                spool.append_nowait(records, claim=True).result()
            waits.append((time.perf_counter() - started_at) * 1000)
    waits.sort()
    return median(waits), waits[int(len(waits) * 0.99)]


def main() -> int:
    place = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(tempfile.gettempdir())
    raws: dict[str, Callable[[Path], float]] = {
        "raw SQLite, a row a statement, 4 KiB pages": lambda f: raw(f, page_bytes=4_096, rows_per_statement=1),
        "raw SQLite, a row a statement, 16 KiB pages": lambda f: raw(f, page_bytes=16_384, rows_per_statement=1),
        "raw SQLite, 250 rows a statement, 16 KiB pages": lambda f: raw(
            f, page_bytes=SPOOL_PAGE_BYTES, rows_per_statement=250
        ),
    }
    spools: dict[str, Callable[[Path], float]] = {
        "spool, 500 records an append": append_chunks,
        "spool, one record an append": append_singly,
        "spool, append and confirm": append_and_confirm,
        "spool, reading the backlog": replay,
    }
    rates: dict[str, list[float]] = {name: [] for name in (*raws, *spools)}
    for _ in range(ROUNDS):
        for name, measure in {**raws, **spools}.items():
            with tempfile.TemporaryDirectory(dir=place) as folder:
                rates[name].append(measure(Path(folder)))
    best_raw = [max(rates[name][number] for name in raws) for number in range(ROUNDS)]
    print(f"{describe_machine()}; calibration loop {calibration_ms():.1f} ms; {ROUNDS} interleaved rounds\n")
    print(f"{'records of 1 KiB a second':48} {'median':>10} {'smallest':>10} {'largest':>10}   of the best raw")
    for name, values in rates.items():
        share = median(value / best for value, best in zip(values, best_raw, strict=True))
        print(f"{name:48} {median(values):10,.0f} {min(values):10,.0f} {max(values):10,.0f} {share:10.0%}")
    print("\nms from append to acknowledgement, 100 records, one after another (4 ms of it is the group's wait)")
    for busy in (False, True):
        with tempfile.TemporaryDirectory(dir=place) as folder:
            middle, late = acknowledgement_ms(Path(folder), busy=busy)
        print(f"{'beside a busy thread' if busy else 'alone':48} median {middle:6.1f}   p99 {late:6.1f}")
    share = median(value / best for value, best in zip(rates["spool, 500 records an append"], best_raw, strict=True))
    print(f"\nspool / best raw SQLite: {share:.0%}, wanted: 50 %")
    return 0 if share >= 0.5 else 1


if __name__ == "__main__":
    sys.exit(main())
