"""The disk under a producer in trouble: one clear sentence, nothing acknowledged falsely, and the books close."""

import os
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any

import anyio
import pytest

from kpl_core import NotSpooled
from kpl_core.durability.spool import Spool, SpoolCorrupt, SpoolError, SpoolLocked, SpoolUnavailable
from kpl_core.durability.spool.store import Changes, Removed, SpoolStore
from kpl_core.options.reliability import DeadLetterOptions, SpoolOptions
from kpl_core.testing import ErrorAnswer, When
from kpl_integrations.metrics.prometheus import PrometheusMetrics
from tests.support.durability_scene import STREAM, assert_invariant, consumed, producer, service
from tests.support.metrics import Scrape, watched
from tests.support.waiting import until

pytestmark = pytest.mark.anyio


def overwritten(path: Path) -> None:
    """Damage the middle of a spool that holds something."""
    with Spool(SpoolOptions(path=path)) as spool:
        spool.ask(lambda store: store.connection.execute("CREATE TABLE more AS SELECT randomblob(100000)")).result(20.0)
    content = bytearray(path.read_bytes())
    content[16_384:] = os.urandom(len(content) - 16_384)
    path.write_bytes(content)


def somebody_elses(path: Path) -> None:
    path.write_bytes(b"name,quantity\n" * 1_000)


def nothing(_: Path) -> None:
    """Leave the place as it is."""


# What happened to the file, where it is in the folder, what the producer raises, in what words.
AT_THE_START: list[tuple[Callable[[Path], None], str, type[SpoolError], str]] = [
    (overwritten, "spool.db", SpoolCorrupt, "the file is damaged.* move it away with its -wal file"),
    (somebody_elses, "spool.db", SpoolCorrupt, "the file is not an SQLite database.* give the spool another path"),
    (nothing, "missing/spool.db", SpoolUnavailable, "No such file or directory"),
]


@pytest.mark.parametrize("option", ["spool", "dead_letters"])
@pytest.mark.parametrize(("happened", "name", "kind", "words"), AT_THE_START)
async def test_a_producer_does_not_start_on_a_file_in_trouble(
    tmp_path: Path, option: str, happened: Callable[[Path], None], name: str, kind: type[SpoolError], words: str
) -> None:
    path = tmp_path / name
    happened(path)
    options: dict[str, Any] = {
        option: SpoolOptions(path=path) if option == "spool" else DeadLetterOptions(path=path),
    }
    with pytest.raises(kind, match=words):
        async with producer(service(), **options):
            pytest.fail("it started")


async def test_a_second_producer_on_the_same_file_raises_and_names_the_owner(tmp_path: Path) -> None:
    options = SpoolOptions(path=tmp_path / "spool.db", mode="write_ahead", commit_interval_ms=1.0)
    async with producer(service(), spool=options) as first:
        with pytest.raises(SpoolLocked, match=f"process {os.getpid()} owns this spool"):
            async with producer(service(), spool=options):
                pytest.fail("it started")
        assert (await (await first.put(STREAM, partition_key="k", data=b"x"))).successful


async def test_a_disk_that_turns_read_only_refuses_puts_until_it_is_writable(tmp_path: Path) -> None:
    metrics, transport = PrometheusMetrics(), service()
    options = SpoolOptions(path=tmp_path / "spool.db", mode="write_ahead", commit_interval_ms=1.0)
    async with producer(transport, spool=options, hooks=[metrics]) as each:
        watched(each, metrics)
        _ = await (await each.put(STREAM, partition_key="k", data=b"before"))
        await anyio.sleep(0.2)
        assert each.spool is not None
        ask = each.spool.ask
        await until(ask(lambda store: store.connection.execute("PRAGMA query_only = ON").fetchone()).done)
        with pytest.raises(NotSpooled, match=r"read-only.* nothing was stored"):
            _ = await each.put(STREAM, partition_key="k", data=b"refused")
        await anyio.sleep(0.2)
        Scrape(metrics).assert_invariant()
        await until(ask(lambda store: store.connection.execute("PRAGMA query_only = OFF").fetchone()).done)
        _ = await each.put(STREAM, partition_key="k", data=b"after")
        await until(lambda: each.report().delivered == 2)
        Scrape(metrics).assert_invariant()
    assert_invariant(each.report())
    Scrape(metrics).assert_invariant()
    assert each.report().failed == {"NotSpooled": 1}
    assert consumed(transport).keys() == {b"before", b"after"}


def break_commits(monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    """Let every commit from now on fail as SQLite would."""

    def commit(_store: SpoolStore, _changes: Changes) -> Removed:
        error = sqlite3.OperationalError("as the disk says")
        error.sqlite_errorcode = code
        raise error

    monkeypatch.setattr(SpoolStore, "commit", commit)


BROKEN = [
    (sqlite3.SQLITE_CORRUPT, "the file is damaged"),
    (sqlite3.SQLITE_IOERR_FSYNC, "the disk reports an input/output error"),
]


@pytest.mark.parametrize(("code", "words"), BROKEN)
async def test_a_spool_that_breaks_acknowledges_nothing_more_and_keeps_what_it_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int, words: str
) -> None:
    metrics, transport = PrometheusMetrics(), service()
    outage = transport.kinesis.faults.add(ErrorAnswer("InternalFailure"), When(operation="PutRecords"))
    options = SpoolOptions(path=tmp_path / "spool.db", mode="write_ahead", commit_interval_ms=1.0)
    async with producer(transport, spool=options, hooks=[metrics]) as each:
        watched(each, metrics)
        _ = await each.put(STREAM, partition_key="k", data=b"acknowledged")
        with monkeypatch.context() as patch:
            break_commits(patch, code)
            with pytest.raises(NotSpooled, match=words):
                _ = await each.put(STREAM, partition_key="k", data=b"refused")
        with pytest.raises(NotSpooled, match=words):
            _ = await each.put(STREAM, partition_key="k", data=b"refused too")
        Scrape(metrics).assert_invariant()
        report = await each.close(timeout=0.1)
    assert (report.accepted, report.failed, report.spooled) == (3, {"NotSpooled": 2}, 1)
    assert_invariant(report)
    Scrape(metrics).assert_invariant()
    transport.kinesis.faults.remove(outage)
    async with producer(transport, spool=options) as again:
        await until(lambda: again.report().delivered == 1)
    assert consumed(transport).keys() == {b"acknowledged"}


@pytest.mark.parametrize(("code", "words"), [*BROKEN, (sqlite3.SQLITE_FULL, "the disk that holds it is full")])
async def test_a_record_that_no_disk_takes_fails_and_is_logged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, code: int, words: str
) -> None:
    transport = service()
    transport.kinesis.faults.add(ErrorAnswer("InternalFailure"), When(operation="PutRecords"))
    options = SpoolOptions(path=tmp_path / "spool.db", commit_interval_ms=1.0)
    async with producer(transport, spool=options, dead_letters=DeadLetterOptions(), record_ttl_ms=100) as each:
        break_commits(monkeypatch, code)
        delivery = each.put_nowait(STREAM, partition_key="k", data=b"x")
        with anyio.fail_after(20.0):
            result = await delivery
        assert (result.successful, result.kept) == (False, None)
        assert each.report().failed_total == 1
    assert_invariant(each.report())
    assert words in caplog.text
