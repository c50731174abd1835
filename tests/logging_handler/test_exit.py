"""Whole programs that log and end: what they lose, what they print, how long they take."""

import re
import time
from collections import Counter
from collections.abc import Iterator

import pytest

from kpl_integrations.local_kinesis import LocalKinesis, ThreadedLocalKinesis
from tests.support.consumers import log_records
from tests.support.processes import black_hole, refusing
from tests.support.running_program import run

pytestmark = pytest.mark.long
MIB = 1024 * 1024
LOSS = re.compile(r"([\d,]+) of ([\d,]+) log records were lost \((.*?)\)")


@pytest.fixture
def kinesis() -> Iterator[ThreadedLocalKinesis]:
    with ThreadedLocalKinesis(LocalKinesis({"logs": 2}, enforce_limits=False)) as local:
        yield local


def number_of(text: str) -> int:
    return int(text.replace(",", ""))


@pytest.mark.parametrize("endpoint", [black_hole, refusing])
def test_with_a_dead_endpoint_memory_and_exit_are_bounded_and_the_loss_is_exact(endpoint):
    with endpoint() as url:
        ended = run("logging_handler/programs/log_and_exit.py", url, "250000", "2")
    assert ended.returncode == 0, ended.stderr
    said = dict(pair.split("=") for pair in ended.stdout.split())
    # The queue of 64 MiB is full, as the loss of records behind its bound shows.
    assert "Evicted" in ended.stderr
    assert int(said["growth_bytes"]) < 128 * MIB
    # The handler's own part, 1.6 s, and what a machine with eight times as much to do as it can adds to its steps.
    # `benchmarks/logging_exit.py` measures it, and the interpreter's part, to the hundredth.
    assert float(said["handlers_ended_at"]) - float(said["ends_at"]) < 2 + 2
    ((lost, emitted, reasons),) = LOSS.findall(ended.stderr)
    assert (lost, emitted) == ("250,000", "250,000")
    assert sum(number_of(reason.split()[0]) for reason in reasons.split(", ")) == 250_000


@pytest.mark.parametrize("means", ["fork", "spawn", "os.fork"])
def test_children_lose_nothing_and_send_nothing_twice(kinesis, means):
    ended = run("logging_handler/programs/log_in_children.py", means, more={"KPL_ENDPOINT_URL": kinesis.endpoint_url})
    assert (ended.returncode, ended.stderr) == (0, "")
    logged = Counter(record["message"] for record in kinesis.call(lambda fake, now: log_records(fake)))
    senders = ["parent", "parent-again", "child-0", "child-1", "child-2"]
    assert logged == Counter(f"{sender} {number}" for sender in senders for number in range(200))


def test_children_whose_parent_has_the_spool_send_without_it_and_print_why(kinesis, tmp_path):
    more = {"KPL_ENDPOINT_URL": kinesis.endpoint_url, "SPOOL": str(tmp_path / "logs.spool")}
    ended = run("logging_handler/programs/log_in_children.py", "fork", more=more)
    assert ended.returncode == 0
    logged = Counter(record["message"] for record in kinesis.call(lambda fake, now: log_records(fake)))
    assert set(logged.values()) == {1}
    assert len(logged) == 5 * 200
    assert ended.stderr.count("what cannot be delivered is lost, not kept: spool lock") == 3


def test_a_root_logger_at_debug_neither_recurses_nor_hangs(kinesis):
    started = time.monotonic()
    ended = run("logging_handler/programs/log_at_debug.py", more={"KPL_ENDPOINT_URL": kinesis.endpoint_url})
    assert (ended.returncode, ended.stderr) == (0, "")
    assert time.monotonic() - started < 20
    logged = kinesis.call(lambda fake, now: log_records(fake))
    assert sum(record["logger"] == "program" for record in logged) == 100
    assert len(logged) < 120
