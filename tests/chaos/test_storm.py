"""A storm of twenty seconds in real time, with the dead letters on disk: stored, one alarm, all redriven."""

import gc
import logging
import os
import signal
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from kpl_core import Config, DeadLetterOptions, Producer, ProducerReport, TierPolicy, decode
from kpl_core.durability.dead_letters import LetterReader
from kpl_core.durability.spool import DeadLetter, LetterFilter
from kpl_core.hooks import DeadLetterAlarm, Fact
from kpl_integrations.local_kinesis import LocalKinesis, LocalKinesisProcess
from kpl_integrations.metrics.prometheus import PrometheusMetrics
from tests.chaos.withheld_cpu import withheld_seconds
from tests.support.durability_scene import STREAM, Storm, assert_invariant, assert_streams_add_up
from tests.support.metrics import Scrape, watched
from tests.support.waiting import until

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(400)]

ALARM_DEPTH = 1_000
# More than the longest pause after a failure on a busy machine.
STANDSTILL_SECONDS = 30.0
# Critical user records in flight when the producer ends after the storm.
LATE = 100


class Alarms:
    """A hook that records the depth alarm: True for raised, False for cleared."""

    def __init__(self) -> None:
        self.said: list[bool] = []

    def __call__(self, fact: Fact) -> None:
        if isinstance(fact, DeadLetterAlarm):
            self.said.append(fact.raised)


def config(endpoint_url: str, path: Path, **options: Any) -> Config:
    letters = DeadLetterOptions(
        path=path,
        alarm_depth=ALARM_DEPTH,
        redrive_base_seconds=2.0,
        redrive_cap_seconds=5.0,
        redrive_records_per_second=20_000.0,
        redrive_in_flight_records=2_000,
    )
    return Config(
        region="us-east-1",
        endpoint_url=endpoint_url,
        aws_access_key_id="testing",
        aws_secret_access_key="testing",
        dead_letters=letters,
        tiers=TierPolicy(),
        **options,
    )


async def test_a_storm_of_bulk_records_delays_no_critical_one_and_is_redriven(
    tmp_path: Path, is_short: bool, capsys, caplog
) -> None:
    path = tmp_path / "letters.db"
    caplog.set_level(logging.CRITICAL)
    # The objects of pytest and its plugins are not the producer's, and cost the collector 0.15 s at a time.
    gc.collect()
    gc.freeze()
    report = await _storm(path, is_short=is_short, capsys=capsys)
    with LetterReader(path) as reader:
        letters = [each.letter for page in reader.pages(LetterFilter()) for each in page if each.letter is not None]
    assert len(letters) == report.dead_lettered > 10 * ALARM_DEPTH
    _assert_filed(letters)
    await _assert_redriven(path, letters)


async def _storm(path: Path, *, is_short: bool, capsys: Any) -> ProducerReport:
    """Run the storm with redrive active, and end while critical user records are in flight."""
    alarms, metrics = Alarms(), PrometheusMetrics()
    with LocalKinesisProcess({STREAM: 1}) as kinesis:
        options = config(kinesis.endpoint_url, path, max_outstanding_bytes=2 << 20)
        async with Producer(options, hooks=[alarms, metrics]) as producer:
            watched(producer, metrics)
            withheld = partial(withheld_seconds, os.getpid(), kinesis.pid)
            await Storm(producer, seconds=1.0).run()
            unloaded = Storm(producer, seconds=3.0 if is_short else 8.0, withheld=withheld)
            await unloaded.run()
            before = withheld()
            storm = Storm(producer, seconds=5.0 if is_short else 20.0, bulk_factor=20.0, withheld=withheld)
            await storm.run()
            starved = max(now - before.get(thread, 0.0) for thread, now in withheld().items())
            Scrape(metrics).assert_invariant()
            # The service hangs, so that these are still in flight when the producer ends.
            os.kill(kinesis.pid, signal.SIGSTOP)
            for number in range(LATE):
                _ = producer.put_nowait(STREAM, partition_key="late", data=b"late %d" % number, tier="critical")
            report = await producer.close(timeout=0.0)
            os.kill(kinesis.pid, signal.SIGCONT)
            assert_streams_add_up(producer)
    with capsys.disabled():
        p99s = f"critical p99: unloaded {unloaded.p99():.3f} s, in the storm {storm.p99():.3f} s"
        print(f"\n{p99s}, beside {starved:.1f} s without a processor; {report}")  # noqa: T201
    assert_invariant(report)
    Scrape(metrics).assert_invariant()
    assert storm.refused_critical == 0
    assert len(storm.latencies) == storm.critical
    assert storm.p99() <= 2 * unloaded.p99()
    assert report.failed_total == 0
    assert alarms.said == [True]
    return report


def _assert_filed(letters: Iterable[DeadLetter]) -> None:
    bulk = [letter for letter in letters if letter.tier == "bulk"]
    shed = [letter for letter in bulk if letter.reason == "rate_limited"]
    assert len(shed) > 0.9 * len(bulk)
    assert {letter.reason for letter in bulk} <= {"rate_limited", "shutdown"}
    assert {letter.severity for letter in bulk} == {"debug"}
    assert all(str(letter.source_timestamp).startswith("t") for letter in bulk)
    late = [letter for letter in letters if letter.tier != "bulk"]
    assert {(letter.tier, letter.reason) for letter in late} == {("critical", "shutdown")}
    assert len(late) == LATE


def _has_fewer_dead_letters(producer: Producer, count: int) -> bool:
    return producer.report().dead_lettered < count


async def _assert_redriven(path: Path, letters: list[DeadLetter]) -> None:
    """Restart with more shards: the producer empties the queue automatically, critical letters first."""
    alarms, metrics = Alarms(), PrometheusMetrics()
    async with LocalKinesis({STREAM: 32}) as kinesis:
        async with Producer(config(kinesis.endpoint_url, path), hooks=[alarms, metrics]) as producer:
            watched(producer, metrics)
            while (left := producer.report().dead_lettered) > 0:
                # On any machine, however slow, the count must decrease.
                has_fallen = partial(_has_fewer_dead_letters, producer, left)
                await until(has_fallen, seconds=STANDSTILL_SECONDS)
            Scrape(metrics).assert_invariant()
            assert_streams_add_up(producer)
        report = producer.report()
        assert_invariant(report)
        assert (report.accepted, report.delivered, report.failed_total) == (len(letters), len(letters), 0)
        arrived = []
        for stored in sorted(kinesis.fake.records(STREAM), key=lambda each: each.arrived_ms):
            user_records = decode(stored.data)
            arrived += [stored.data] if user_records is None else [each.data for each in user_records]
    assert len(arrived) >= len(letters)
    places = [place for place, data in enumerate(arrived) if data.startswith(b"late ")]
    assert len(places) >= LATE
    # They arrived last, and are due like the others within the first seconds.
    assert max(places) < len(arrived) / 2
    assert alarms.said == [True, False]
    with LetterReader(path) as reader:
        assert reader.count(LetterFilter()) == {}
