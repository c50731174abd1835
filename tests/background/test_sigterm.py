"""SIGTERM at random instants: what was accepted before arrives, within 3 seconds.

A Python signal handler interrupts the main thread in the middle of any call, also while it holds a sender's lock.
`python -m tests.background.test_sigterm 200` sends 200 signals to each kind of process, and prints the table.
"""

import json
import os
import subprocess
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from kpl_core.testing import FakeKinesis, Latency, When
from kpl_integrations.local_kinesis import LocalKinesis, ThreadedLocalKinesis
from tests.support.consumers import user_records
from tests.support.running_program import environment

PROGRAM = Path(__file__).parent / "programs" / "signalled_program.py"
POOLED = PROGRAM.with_name("pooled_program.py")
MISSED = PROGRAM.with_name("missed_signal_program.py")
ACCOUNT = {"AWS_ACCESS_KEY_ID": "local", "AWS_SECRET_ACCESS_KEY": "local", "NO_PROXY": "127.0.0.1"}
SENDERS = ("producer", "handler", "block")
STARTS = ("alone", "fork", "spawn", "forkserver")
# The bound of the flush.
END_SECONDS = 3.0
# How long a process and its parent may take besides, on a busy machine.
MARGIN_SECONDS = 5.0
SIGTERM_EXIT = -15

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork on this system")


class Signalled(NamedTuple):
    """What became of the processes of one kind."""

    ended: list[dict[str, Any]]
    lost: int
    printed: str

    @property
    def returned(self) -> int:
        return sum(each["returned"] for each in self.ended)

    @property
    def slowest(self) -> float:
        return max(float(each["seconds"]) for each in self.ended)


def signal_processes(sender: str, start: str, signals: int, *, answer_seconds: float = 0.0) -> Signalled:
    with ThreadedLocalKinesis(LocalKinesis({"records": 2}, enforce_limits=False)) as kinesis:
        kinesis.call(lambda fake, _now: fake.faults.add(Latency(answer_seconds), When(operation="PutRecords")))
        run = subprocess.run(
            [sys.executable, PROGRAM, sender, start, str(signals)],
            env=environment({**ACCOUNT, "KPL_ENDPOINT_URL": kinesis.endpoint_url}),
            capture_output=True,
            text=True,
            timeout=60 + 15 * signals,
            check=False,
        )
        assert run.returncode == 0, run.stderr
        ended = [json.loads(line) for line in run.stdout.splitlines()]
        assert len(ended) == signals
        arrived = kinesis.call(lambda fake, _now: numbers_by_name(fake))
    lost = sum(len(set(range(each["returned"])) - arrived[each["name"]]) for each in ended)
    return Signalled(ended, lost, run.stderr)


def numbers_by_name(fake: FakeKinesis) -> defaultdict[str, set[int]]:
    found: defaultdict[str, set[int]] = defaultdict(set)
    for record in user_records(fake, "records"):
        name, _, number = record.data.decode().partition("/")
        found[name].add(int(number))
    return found


@pytest.mark.timeout(300)
@pytest.mark.parametrize("start", STARTS)
@pytest.mark.parametrize("sender", SENDERS)
@pytest.mark.long
def test_no_accepted_record_is_lost_at_a_signal_at_a_random_instant(sender: str, start: str) -> None:
    signalled = signal_processes(sender, start, signals=5)
    assert {each["code"] for each in signalled.ended} == {SIGTERM_EXIT}
    assert (signalled.lost, signalled.printed) == (0, "")
    assert signalled.slowest < END_SECONDS + MARGIN_SECONDS


def test_a_producer_in_a_loop_of_puts_delivers_before_sigterm_ends_it() -> None:
    signalled = signal_processes("producer", "alone", signals=3)
    assert {each["code"] for each in signalled.ended} == {SIGTERM_EXIT}
    assert (signalled.lost, signalled.printed) == (0, "")
    assert signalled.slowest < END_SECONDS + MARGIN_SECONDS


@pytest.mark.parametrize("sender", ["producer", "handler"])
def test_no_accepted_record_is_lost_while_kinesis_answers_slowly(sender: str) -> None:
    """Nothing was delivered for half a second, so what was put then was refused: a log handler said nothing of it."""
    signalled = signal_processes(sender, "alone", signals=2, answer_seconds=0.8)
    assert (signalled.lost, signalled.printed) == (0, "")


@pytest.mark.long
@pytest.mark.parametrize("start", STARTS[1:])
@pytest.mark.parametrize("application", ["nothing", "trio"])
def test_the_children_of_a_pool_deliver_what_they_logged_by_default(start: str, application: str) -> None:
    """`trio.run` warns of a wakeup file descriptor that is not its own; of ours it need not."""
    handled_by, arrived, printed = run_with_kinesis(POOLED, start, application)
    assert (handled_by, len(arrived), printed) == ("flush_and_go_on", 1_001, "")


@pytest.mark.parametrize("start", STARTS[1:])
@pytest.mark.parametrize("application", ["nothing", "trio"])
def test_a_child_hears_a_signal_that_does_not_interrupt_its_main_thread(start: str, application: str) -> None:
    """Where `trio.run` had the wakeup file descriptor, a pool's worker never stopped waiting for its semaphore."""
    status, arrived, printed = run_with_kinesis(MISSED, start, application)
    assert (status, len(arrived), printed) == (str(SIGTERM_EXIT), 1, "")


@pytest.mark.long
@pytest.mark.parametrize(("application", "handled_by"), [("False", "0"), ("a handler", "default_int_handler")])
def test_a_child_that_opts_out_or_has_a_handler_of_its_own_keeps_it(application: str, handled_by: str) -> None:
    assert run_with_kinesis(POOLED, "fork", application)[0] == handled_by


def run_with_kinesis(program: Path, start: str, application: str) -> tuple[str, set[int], str]:
    """Return what the program prints on stdout, which log lines arrived, and what it prints on stderr."""
    with ThreadedLocalKinesis(LocalKinesis({"records": 2}, enforce_limits=False)) as kinesis:
        run = subprocess.run(
            [sys.executable, program, start, application],
            env=environment({**ACCOUNT, "KPL_ENDPOINT_URL": kinesis.endpoint_url}),
            capture_output=True,
            text=True,
            timeout=50,
            check=False,
        )
        lines = kinesis.call(lambda fake, _now: [json.loads(record.data) for record in user_records(fake, "records")])
    return run.stdout, {int(line["message"].partition("/")[2]) for line in lines}, run.stderr


def main(signals: int, only: str = "") -> None:
    """Signal as many processes of each kind whose name contains `only`, and print what became of them."""
    sys.stdout.write("| process | signals | puts that returned | lost | above 3 s | slowest, s | stderr |\n")
    sys.stdout.write("| --- | ---: | ---: | ---: | ---: | ---: | --- |\n")
    for start in STARTS:
        for sender in SENDERS:
            if only not in f"{sender}, {start}":
                continue
            found = signal_processes(sender, start, signals)
            late = sum(each["seconds"] > END_SECONDS for each in found.ended)
            sys.stdout.write(
                f"| {sender}, {start} | {signals} | {found.returned:,} | {found.lost} | {late} | {found.slowest:.2f} "
                f"| {found.printed.splitlines()[:3] or 'empty'} |\n"
            )
            sys.stdout.flush()


if __name__ == "__main__":
    main(int(sys.argv[1]), next(iter(sys.argv[2:]), ""))
