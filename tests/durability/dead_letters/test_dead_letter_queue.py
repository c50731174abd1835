"""The dead-letter queue: stored with the spool, critical first, redriven with jitter, with an alarm."""

import logging
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from kpl_core.durability.dead_letters import DeadLetterQueue, DepthAlarm
from kpl_core.durability.spool import DeadLetter, LetterFilter, Spool, SpoolClosed, SpoolFull, SpoolOptions
from kpl_core.hooks import DeadLetterAlarm
from kpl_core.options.reliability import DeadLetterOptions
from kpl_core.records.record_result import Reason
from kpl_core.records.user_record import Tier
from kpl_core.version import producer_version
from tests.support.durability_scene import EXPIRED, THROTTLED, failed, spooled

SECONDS = 20.0


@dataclass
class Clock:
    now: float = 1_000_000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def spool(tmp_path: Path) -> Iterator[Spool]:
    with Spool(
        SpoolOptions(path=tmp_path / "spool.db", commit_interval_ms=0.0, max_dead_letter_bytes=1024 * 1024)
    ) as each:
        yield each


@pytest.fixture
def queue(spool: Spool, clock: Clock) -> DeadLetterQueue:
    options = DeadLetterOptions(redrive_base_seconds=10, redrive_cap_seconds=100)
    return DeadLetterQueue(spool, options=options, wall_clock=clock, chance=lambda: 1.0)


def add(queue: DeadLetterQueue, number: int, tier: Tier = "normal", reason: Reason = "throttled") -> DeadLetter:
    letter = queue.letter(spooled(number, tier=tier), reason, result=failed(THROTTLED, EXPIRED))
    queue.add_nowait([letter]).result(SECONDS)
    return letter


def next_due_in(queue: DeadLetterQueue) -> float | None:
    return queue.due_nowait(10).result(SECONDS).next_due_in


def all_letters(queue: DeadLetterQueue, wanted: LetterFilter | None = None) -> list[DeadLetter | None]:
    return [each.letter for each in queue.select_nowait(wanted or LetterFilter(), 1_000).result(SECONDS)]


def test_the_attempts_of_a_letter_are_in_unix_time(queue: DeadLetterQueue) -> None:
    """Without an offset their clock is taken for that of the letter."""
    result = failed(THROTTLED, EXPIRED)
    assert queue.letter(spooled(), "ttl", result=result).last_attempt == EXPIRED.ended_at
    letter = queue.letter(spooled(), "ttl", result=result, wall_offset=1_000.0)
    assert letter.last_attempt == EXPIRED.ended_at + 1_000.0


def test_a_stored_letter_equals_the_original(queue: DeadLetterQueue) -> None:
    letter = add(queue, 1)
    assert all_letters(queue) == [letter]
    assert letter.producer_version == producer_version()
    assert letter.attempts == 2
    assert queue.depth == 1
    assert queue.added == {"throttled": 1}


def test_a_record_moves_from_the_spool_to_the_letters_in_one_transaction(queue: DeadLetterQueue, spool: Spool) -> None:
    ids = spool.append_nowait([spooled(1)], claim=True).result(SECONDS)
    commits = spool.statistics().commits
    queue.add_nowait([queue.letter(spooled(1), "ttl")], spooled_ids=ids).result(SECONDS)
    statistics = spool.statistics()
    assert (statistics.records, statistics.letters, statistics.commits) == (0, 1, commits + 1)


def test_without_room_no_record_moves_to_the_letters(queue: DeadLetterQueue, spool: Spool) -> None:
    record = spooled(data=bytes(800_000))
    add(queue, 0)
    ids = spool.append_nowait([record], claim=True).result(SECONDS)
    letter = queue.letter(record, "ttl")
    with pytest.raises(SpoolFull, match="redrive, export or purge"):
        queue.add_nowait([letter, letter], spooled_ids=ids)
    assert queue.failing
    statistics = spool.statistics()
    assert (statistics.claimed_records, statistics.letters) == (1, 1)


def test_due_letters_are_read_critical_first_then_longest_due(queue: DeadLetterQueue, clock: Clock) -> None:
    tiers: list[Tier] = ["bulk", "normal", "critical", "bulk", "critical"]
    for number, tier in enumerate(tiers):
        add(queue, number, tier)
        clock.now += 1
    assert queue.due_nowait(10).result(SECONDS).letters == []
    assert next_due_in(queue) == 5.0
    clock.now += 6
    due = queue.due_nowait(10).result(SECONDS).letters
    assert [each.letter.data for each in due if each.letter] == [b"1", b"0"]
    clock.now += 10
    due = queue.due_nowait(10).result(SECONDS).letters
    assert [each.letter.data for each in due if each.letter] == [b"2", b"4", b"1", b"0", b"3"]
    assert next_due_in(queue) is None


def test_each_failed_redrive_makes_a_letter_due_later(queue: DeadLetterQueue, clock: Clock) -> None:
    add(queue, 1)
    waits = []
    for _ in range(5):
        wait = next_due_in(queue)
        assert wait is not None
        waits.append(wait)
        clock.now += wait
        (stored,) = queue.due_nowait(10).result(SECONDS).letters
        queue.try_later([stored]).result(SECONDS)
    assert waits == [10, 20, 40, 80, 100]


def test_a_corrected_clock_makes_letters_due_that_were_scheduled_too_late(queue: DeadLetterQueue, clock: Clock) -> None:
    """The clock was a year ahead at first; those letters would have been redriven a year later."""
    year = 365 * 86_400.0
    clock.now += year
    ahead = add(queue, 1)
    clock.now -= year
    add(queue, 2)
    clock.now += 5.0
    assert [stored.letter for stored in queue.due_nowait(10).result(SECONDS).letters] == [ahead]
    queue.try_later(queue.due_nowait(10).result(SECONDS).letters).result(SECONDS)
    assert queue.due_nowait(10).result(SECONDS).letters == []
    assert queue.due_nowait(10).result(SECONDS).next_due_in == 5.0


def test_a_letter_that_no_retry_can_cure_is_never_due(queue: DeadLetterQueue, clock: Clock) -> None:
    add(queue, 1, reason="invalid")
    clock.now += 1e9
    assert queue.due_nowait(10).result(SECONDS).letters == []
    assert next_due_in(queue) is None
    assert len(all_letters(queue)) == 1


def test_a_removed_letter_frees_its_bytes_once(queue: DeadLetterQueue, spool: Spool) -> None:
    add(queue, 1)
    letters = queue.select_nowait(LetterFilter(), 10).result(SECONDS)
    queue.remove(letters).result(SECONDS)
    queue.remove(letters).result(SECONDS)
    assert (spool.statistics().letters, spool.statistics().letter_bytes) == (0, 0)


def test_letters_are_selected_by_each_filter_field(queue: DeadLetterQueue) -> None:
    first = add(queue, 1, "critical", "ttl")
    second = add(queue, 2, "bulk", "rate_limited")
    for wanted in (
        LetterFilter(tier="bulk"),
        LetterFilter(reason="rate_limited"),
        LetterFilter(ids=(second.id,)),
        LetterFilter(ids=(second.id, "none"), stream="orders", seen_from=1.0, seen_before=4e9),
    ):
        assert all_letters(queue, wanted) == [second]
    assert all_letters(queue, LetterFilter(tenant="unknown")) == []
    assert all_letters(queue, LetterFilter(ids=())) == []
    assert all_letters(queue, LetterFilter(seen_before=1.0)) == []
    assert all_letters(queue) == [first, second]
    assert queue.count_nowait(LetterFilter()).result(SECONDS) == {"rate_limited": 1, "ttl": 1}


def test_letters_survive_a_restart(tmp_path: Path) -> None:
    options = SpoolOptions(path=tmp_path / "spool.db")
    with Spool(options) as spool:
        letter = add(DeadLetterQueue(spool), 1)
    with Spool(options) as spool:
        assert all_letters(DeadLetterQueue(spool)) == [letter]
        assert spool.statistics().letters == 1


def test_the_alarm_escalates_once_for_each_crossing(spool: Spool, caplog: pytest.LogCaptureFixture) -> None:
    escalations: list[DeadLetterAlarm] = []
    queue = DeadLetterQueue(spool, alarm=DepthAlarm(3), on_escalation=escalations.append)
    with caplog.at_level(logging.INFO, logger="kpl_core"):
        for number in range(6):
            add(queue, number)
        queue.remove(queue.select_nowait(LetterFilter(), 5).result(SECONDS)).result(SECONDS)
        queue.watch_depth()
    assert [(each.raised, each.depth) for each in escalations] == [(True, 3), (False, 1)]
    assert [record.levelname for record in caplog.records] == ["ERROR", "INFO"]
    assert "kpl dlq list" in caplog.text


def test_an_on_escalation_callback_that_raises_is_logged(spool: Spool, caplog: pytest.LogCaptureFixture) -> None:
    def page(_: DeadLetterAlarm) -> None:
        message = "the pager is broken"
        raise RuntimeError(message)

    queue = DeadLetterQueue(spool, alarm=DepthAlarm(1), on_escalation=page)
    add(queue, 1)
    assert "the pager is broken" in caplog.text
    add(queue, 2)
    assert queue.depth == 2


def test_listeners_are_called_for_every_change(queue: DeadLetterQueue) -> None:
    heard = []
    queue.listen(lambda: heard.append(1))
    add(queue, 1)
    letters = queue.select_nowait(LetterFilter(), 10).result(SECONDS)
    queue.try_later(letters).result(SECONDS)
    queue.remove(letters).result(SECONDS)
    assert len(heard) == 3


def test_a_closed_queue_raises_spool_closed(tmp_path: Path) -> None:
    with Spool(SpoolOptions(path=tmp_path / "spool.db")) as spool:
        queue = DeadLetterQueue(spool)
    with pytest.raises(SpoolClosed):
        queue.add_nowait([queue.letter(spooled(), "ttl")])
