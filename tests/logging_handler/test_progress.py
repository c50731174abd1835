"""A handler whose records do not arrive reports that on stderr: within 5 seconds, once a minute, with the cause."""

import logging
import socket
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from kpl_core.testing import ErrorAnswer, Hang
from kpl_integrations.local_kinesis import LocalKinesis, ThreadedLocalKinesis
from kpl_integrations.logging_handler import LogCounts
from kpl_integrations.logging_handler.progress import TimeExtension, TroubleReport
from tests.support.processes import black_hole, refusing
from tests.support.running_program import run
from tests.support.waiting import wait_until

SECRET = "wJalrXUtnFEMI/K7MDENG/bPxRfiCYEXAMPLEKEY"


@contextmanager
def full_backlog() -> Iterator[str]:
    """Yield the URL of a port whose kernel drops every packet that would open a connection."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(0)
        waiting = [socket.socket() for _ in range(4)]
        for each in waiting:
            each.setblocking(False)
            each.connect_ex(listener.getsockname())
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            for each in waiting:
                each.close()


@contextmanager
def answering(streams: dict[str, int], denial: str = "") -> Iterator[str]:
    with ThreadedLocalKinesis(LocalKinesis(streams)) as kinesis:
        if denial:
            fault = ErrorAnswer("AccessDeniedException", status=400, message=denial)
            kinesis.call(lambda fake, _now: fake.faults.add(fault))
        yield kinesis.endpoint_url


@contextmanager
def access_denied() -> Iterator[str]:
    with answering({"logs": 1}, f"not authorized to perform kinesis:PutRecords, token {SECRET}\n{SECRET[:30]}") as url:
        yield url


@contextmanager
def no_stream() -> Iterator[str]:
    with answering({"other": 1}) as url:
        yield url


CAUSES = {
    "access denied": (
        access_denied,
        "(AccessDeniedException: not authorized to perform kinesis:PutRecords, token ***)",
    ),
    "no such stream": (no_stream, "(ResourceNotFoundException: "),
    "no credentials": (no_stream, "(NoCredentials: Unable to locate credentials; configure credentials"),
    "refused": (refusing, "(Internal: "),
    "black hole": (black_hole, "(nothing was delivered for 4 s)"),
    "full backlog": (full_backlog, "(nothing was delivered for 4 s)"),
}


@pytest.mark.long
@pytest.mark.parametrize("cause", CAUSES)
def test_a_handler_whose_records_do_not_arrive_reports_that_on_stderr_within_5_seconds(cause, tmp_path):
    endpoint, words = CAUSES[cause]
    key = "" if cause == "no credentials" else SECRET
    secrets = {"AWS_ACCESS_KEY_ID": key and "key", "AWS_SECRET_ACCESS_KEY": key, "AWS_EC2_METADATA_DISABLED": "true"}
    files = {"AWS_CONFIG_FILE": str(tmp_path / "none"), "AWS_SHARED_CREDENTIALS_FILE": str(tmp_path / "none")}
    with endpoint() as url:
        ended = run("logging_handler/programs/log_into_trouble.py", url, "7", more={**secrets, **files})
    assert ended.returncode == 0
    # One report, although the root logger at DEBUG has this handler.
    assert ended.stderr.count("\n") == ended.stderr.count("log records do not arrive") == 1, ended.stderr
    assert words in ended.stderr
    assert SECRET not in ended.stderr
    assert SECRET[:30] not in ended.stderr
    assert "0 are delivered" in ended.stderr
    (reported_at,) = map(float, ended.stdout.split())
    # The first failure comes a moment after the first line: the client must be made.
    assert reported_at < 5.0 + 1.0


def test_a_lost_record_is_reported_at_once(make, kinesis, logger, capsys):
    kinesis.faults.add(ErrorAnswer("AccessDeniedException", status=400, message="no"))
    logger.addHandler(handler := make())
    logger.info("lost")
    wait_until(lambda: handler.counts().dropped_total == 1, "the record fails")
    said = ""

    def is_reported() -> bool:
        nonlocal said
        said += capsys.readouterr().err
        return "do not arrive" in said

    wait_until(is_reported, "a report", seconds=5.0)
    assert "(AccessDeniedException: no): of 1 records 0 are delivered, 0 wait, 0 are kept on disk, 1 are lost" in said


def counts(*, delivered: int = 0, lost: int = 0, waiting: int = 0) -> LogCounts:
    dropped = Counter({"Expired": lost} if lost else {})
    return LogCounts(emitted=delivered + lost + waiting, delivered=delivered, dropped=dropped, buffered=waiting)


def reports(looks: list[tuple[float, LogCounts]], capsys: pytest.CaptureFixture[str]) -> list[float]:
    """Return the instants of the looks that wrote a report."""
    report, reported = TroubleReport("logs", 0.0), []
    for now, at in looks:
        report.look(lambda at=at: at, at.dropped, None, now)  # type: ignore[misc] # a default of the lambda
        if capsys.readouterr().err:
            reported.append(now)
    return reported


def test_reports_come_once_a_minute_at_most(capsys):
    stalled = counts(waiting=7)
    assert reports([(float(second), stalled) for second in range(150)], capsys) == [4.0, 64.0, 124.0]
    losing = [(float(second), counts(lost=second)) for second in range(150)]
    assert reports(losing, capsys) == [1.0, 61.0, 121.0]


def test_a_stream_that_delivers_or_has_nothing_to_deliver_is_not_reported(capsys):
    assert reports([(float(second), counts(delivered=second, waiting=9)) for second in range(100)], capsys) == []
    assert reports([(float(second), counts(delivered=5)) for second in range(100)], capsys) == []
    # The 4 seconds begin when a record waits.
    late = [(float(second), counts(delivered=5, waiting=int(second > 50))) for second in range(60)]
    assert reports(late, capsys) == [55.0]
    # Also if the handler was idle before.
    idle = [(0.0, counts(delivered=1)), (7.0, counts(delivered=1, waiting=1)), (7.5, counts(delivered=2))]
    assert reports(idle, capsys) == []


def test_the_same_losses_are_not_reported_twice(capsys):
    assert reports([(float(second), counts(lost=3)) for second in range(200)], capsys) == [0.0]


def test_a_close_goes_on_while_records_are_delivered_up_to_its_bound():
    extension = TimeExtension(60.0)
    extension.begin(5.0, 100.0)
    assert extension.until(0, 104.0) < 100.0
    assert extension.until(10, 104.0) == 109.0
    assert extension.until(10, 108.0) == 109.0
    assert extension.until(11, 163.0) == 165.0


def test_a_close_with_a_timeout_of_its_own_is_never_extended():
    extension = TimeExtension(0.0)
    extension.begin(5.0, 100.0)
    assert extension.until(10, 104.0) < 100.0


def test_a_broken_stderr_harms_nothing(make, kinesis, logger, monkeypatch):
    kinesis.faults.add(Hang())

    class Broken:
        def write(self, _text: str) -> None:
            logging.getLogger("orders").info("again")
            raise RuntimeError

    monkeypatch.setattr("sys.stderr", Broken())
    monkeypatch.setattr("kpl_integrations.logging_handler.progress._STALLED_SECONDS", 0.0)
    logger.addHandler(handler := make(close_timeout=0.5))
    logger.info("waits")
    handler.close()
    assert handler.counts().emitted == 1
