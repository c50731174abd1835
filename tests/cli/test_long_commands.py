"""Each long command in a process of its own: it says how far it is, ends at Ctrl-C in order, and can be continued."""

import json
import re
import signal
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from kpl_core import decode
from kpl_core.durability.dead_letters import DeadLetterQueue
from kpl_core.durability.spool import Spool, SpooledRecord, SpoolOptions
from kpl_core.testing import ErrorAnswer, When
from kpl_integrations.cli.progress import FIRST_SECONDS
from tests.cli.conftest import Stream
from tests.support.kpl_process import in_a_terminal, run, started, without_escape_codes

pytestmark = [pytest.mark.long, pytest.mark.timeout(120)]

# At this rate the commands take ten seconds.
RECORDS, RATE = 200, 20
BAR = "\u2501"


def spooled(stream: Stream) -> list[SpooledRecord]:
    return [SpooledRecord(stream.name, f"key-{n}", b"record %d" % n, time.time()) for n in range(RECORDS)]


class Command(ABC):
    """A command with more to do than it has time for in a test, unless it is to `finish`."""

    progress: str
    status = 130

    def __init__(self, stream: Stream, folder: Path) -> None:
        self.stream = stream
        self.file = folder / "file"

    @abstractmethod
    def first(self) -> tuple[str, ...]:
        """Return the arguments of the run that is interrupted."""

    @abstractmethod
    def finish(self, said: str) -> tuple[str, ...]:
        """Return the arguments of the run that does the rest; `said` is what the first one printed."""

    @contextmanager
    def slow(self) -> Iterator[None]:
        """Keep the command busy for the block."""
        yield

    def arrived(self) -> set[bytes]:
        """Return the data of all user records that are in the stream."""
        found = set()
        for _, data in self.stream.stored():
            records = decode(data)
            found |= {data} if records is None else {each.data for each in records}
        return found


class Put(Command):
    progress = "put"

    def first(self) -> tuple[str, ...]:
        self.file.write_bytes(b"".join(each.data + b"\n" for each in spooled(self.stream)))
        return ("put", *self.stream.address, str(self.file))

    def finish(self, said: str) -> tuple[str, ...]:
        (skip,) = re.findall(r"continue with --skip (\d+)", said)
        return (*self.first(), "--skip", skip)

    @contextmanager
    def slow(self) -> Iterator[None]:
        with self.stream.fault(ErrorAnswer("InternalFailure"), When(operation="PutRecords")):
            yield


class Redrive(Command):
    progress = "redrive"

    def first(self) -> tuple[str, ...]:
        with Spool(SpoolOptions(path=self.file)) as spool:
            queue = DeadLetterQueue(spool)
            queue.add_nowait([queue.letter(each, "ttl") for each in spooled(self.stream)]).result()
        return ("dlq", "redrive", str(self.file), "--rate", str(RATE), *self.stream.address[1:])

    def finish(self, said: str) -> tuple[str, ...]:
        assert "interrupted; run it again for the rest" in said
        return ("dlq", "redrive", str(self.file), *self.stream.address[1:])


class Drain(Command):
    progress = "drain"

    def first(self) -> tuple[str, ...]:
        with Spool(SpoolOptions(path=self.file)) as spool:
            spool.append_nowait(spooled(self.stream), claim=False).result()
        return ("spool", "drain", str(self.file), "--rate", str(RATE), *self.stream.address[1:])

    def finish(self, said: str) -> tuple[str, ...]:
        assert "interrupted; run it again for the rest" in said
        return ("spool", "drain", str(self.file), *self.stream.address[1:])


COMMANDS: dict[str, type[Any]] = {"put": Put, "dlq redrive": Redrive, "spool drain": Drain}


@pytest.fixture(params=COMMANDS)
def command(request: pytest.FixtureRequest, stream: Stream, tmp_path: Path) -> Command:
    made: Command = COMMANDS[request.param](stream, tmp_path)
    return made


def assert_it_can_be_continued(command: Command, said: str) -> None:
    assert "Traceback" not in said
    rest = run(*command.finish(said))
    assert rest.status == 0, rest.err
    assert command.arrived() == {each.data for each in spooled(command.stream)}


@pytest.mark.parametrize("form", [(), ("--json",)], ids=["lines", "json"])
def test_into_pipes_it_prints_lines_and_ctrl_c_ends_it_in_order(command: Command, form: tuple[str, ...]) -> None:
    with command.slow(), started(*command.first(), *form) as running:
        line = next(line for line in running.stderr if not line.startswith("warning: "))
        assert running.end(signal.SIGINT) == command.status
        said = line + running.stderr.read()
    if form:
        found = json.loads(line)
        assert (found["progress"], "seconds_left" in found) == (command.progress, True)
    else:
        assert re.match(rf"{command.progress}: .*\d (of [\d.,]+ )?(MiB|records|letters)", line), said
    assert_it_can_be_continued(command, said)


def test_on_a_terminal_it_shows_a_bar_and_ctrl_c_ends_it_in_order(command: Command) -> None:
    with command.slow():
        outcome = in_a_terminal(*command.first(), after=BAR, typed="\x03")
    said = without_escape_codes(outcome.out)
    assert outcome.status == command.status, said
    assert re.search(rf"{command.progress} .*{BAR}", said)
    assert_it_can_be_continued(command, said)


def test_with_quiet_it_prints_no_progress(command: Command) -> None:
    with command.slow(), started(*command.first(), "--quiet") as running:
        # Longer than the first line of progress would take.
        time.sleep(FIRST_SECONDS + 2)
        assert running.end(signal.SIGINT) == command.status
        said = running.stderr.read()
    assert f"{command.progress}: " not in said
    assert_it_can_be_continued(command, said)
