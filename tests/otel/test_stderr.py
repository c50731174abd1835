"""What a program prints whose telemetry does not arrive, however it has set up logging."""

import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from kpl_core.background.stderr_report import StderrReport
from kpl_core.testing import ErrorAnswer, When
from kpl_integrations.local_kinesis import LocalKinesis, ThreadedLocalKinesis
from tests.support.processes import black_hole, refusing
from tests.support.running_program import environment

PROGRAM = Path(__file__).parent / "programs" / "silent_losses.py"
INSTRUMENT = str(Path(sys.executable).parent / "opentelemetry-instrument")
SECONDS = 90


@contextmanager
def local(*, is_denied: bool = False) -> Iterator[str]:
    with ThreadedLocalKinesis(LocalKinesis({"spans": 1}, enforce_limits=False)) as kinesis:
        if is_denied:
            denial = ErrorAnswer("AccessDeniedException", "not authorized to PutRecords")
            kinesis.call(lambda fake, _now: fake.faults.add(denial, When(operation="PutRecords")))
        yield kinesis.endpoint_url


@contextmanager
def denying() -> Iterator[str]:
    with local(is_denied=True) as url:
        yield url


# What is wrong, its endpoint, more environment, the bytes of the first span, and what stderr says.
CASES = {
    "no stream": (local, {"KPL_OTEL_STREAM": ""}, 1, "no stream for traces is given; set KPL_OTEL_STREAM"),
    "no region": (
        local,
        {"KPL_OTEL_REGION": "", "AWS_DEFAULT_REGION": ""},
        1,
        "200 spans lost: 200 x SenderFailed (no region is configured",
    ),
    "refused": (refusing, {}, 1, "requests failed: "),
    # The first request fails after 6 seconds.
    "black hole": (black_hole, {"SILENT_SECONDS": "12"}, 1, "requests failed: "),
    "denied": (denying, {}, 1, "200 spans lost: 200 x AccessDeniedException (not authorized to PutRecords)"),
    "no such stream": (local, {"KPL_OTEL_STREAM": "other"}, 1, "200 spans lost: 200 x ResourceNotFoundException"),
    "a span of 5 MB": (local, {}, 5_000_000, "1 spans lost: 1 x TooLarge"),
}


@pytest.mark.long
@pytest.mark.timeout(2 * SECONDS)
@pytest.mark.parametrize("case", CASES)
def test_stderr_names_the_cause_5_seconds_after_the_first_failure(case):
    """It was empty until the end of the process, or altogether."""
    endpoint, more, size, words = CASES[case]
    with endpoint() as url:
        variables = {
            "OTEL_TRACES_EXPORTER": "kinesis",
            "OTEL_LOGS_EXPORTER": "none",
            "OTEL_METRICS_EXPORTER": "none",
            "OTEL_BSP_SCHEDULE_DELAY": "100",
            "KPL_OTEL_STREAM": "spans",
            "KPL_OTEL_REGION": "us-east-1",
            "KPL_OTEL_ENDPOINT": url,
        }
        ended = subprocess.run(
            [INSTRUMENT, sys.executable, PROGRAM, str(size)],
            env={name: value for name, value in environment(variables | more).items() if value},
            capture_output=True,
            text=True,
            timeout=SECONDS,
            check=False,
        )
    assert words in ended.stderr
    if case != "no stream":
        assert len(ended.stderr.splitlines()) == 1


def test_a_failed_request_is_not_reported_once_another_was_answered(capsys):
    report = StderrReport("spans", "spans")
    report.request_failed("Internal: connection closed")
    report.request_answered()
    report.write()
    assert capsys.readouterr().err == ""
    report.request_failed("Internal: connection closed")
    report.lost("TooLarge", 3)
    report.lost("Expired", 2)
    report.write()
    expected = "spans: 5 spans lost: 3 x TooLarge, 2 x Expired; requests failed: 1 x Internal: connection closed"
    assert capsys.readouterr().err == f"{expected} (reported once a minute at most)\n"


def test_lines_come_3_seconds_after_the_first_failure_then_once_a_minute(monkeypatch, capsys):
    delays: list[float] = []

    class Timer:
        def __init__(self, seconds: float, write: Callable[[], None]) -> None:
            delays.append(round(seconds))
            self.write = write

        def start(self) -> None:
            timers.append(self)

        def cancel(self) -> None: ...

    timers: list[Timer] = []
    monkeypatch.setattr("threading.Timer", Timer)
    report = StderrReport("spans", "spans")
    for count in (2, 3):
        for _ in range(count):
            report.lost("Expired", 1)
        timers.pop().write()
    assert delays == [3, 60]
    lines = [f"spans: {count} spans lost: {count} x Expired (reported once a minute at most)" for count in (2, 3)]
    assert capsys.readouterr().err.splitlines() == lines


def test_a_closed_stderr_is_no_error(monkeypatch):
    report = StderrReport("spans", "spans")
    monkeypatch.setattr("sys.stderr", None)
    report.lost("TooLarge", 1)
    report.write()


def test_causes_are_shown_without_secrets_and_further_lines(capsys: pytest.CaptureFixture[str]) -> None:
    report = StderrReport("spans", "spans")
    token = "FwoGZXIvYXdzEXAMPLE" * 3
    report.request_failed(f"IncompleteSignature: 'Credential={token}'\nAuthorization: secret\n")
    report.lost("http://user:password@proxy failed", 2)
    report.write()
    said = capsys.readouterr().err
    assert "IncompleteSignature: '***'" in said
    assert not [each for each in (token, "secret", "password") if each in said]
