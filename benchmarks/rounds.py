"""Run a plan in interleaved rounds: A B C, A B C, ... each trial in a fresh process.

A slow moment of the machine then affects every row of a round alike. The ratio of two rows is computed
within a round.
"""

import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from benchmarks.ledger import Verdict
from benchmarks.machine import Cores
from benchmarks.plan import Row
from benchmarks.reason import reason_in
from benchmarks.sink_process import RunningSink, running_sink
from benchmarks.trial import call_sink

__all__ = ["NOT_RUN", "Answer", "Results", "run_rounds"]

#: The failure of a row without its tools or packages begins with this.
NOT_RUN = "not run: "

_TRIAL_TIMEOUT_SECONDS = 180
_VERDICT_FIELDS = tuple(Verdict().fields())


@dataclass(slots=True)
class Answer:
    """The result of one trial: its figures, or the reason of its failure.

    Attributes:
        figures: Those of the producing process and of the sink.
        verdict: The result of the sink's ledger; None for programs without network.
        failure: Empty, or the reason in one line.
    """

    figures: dict[str, Any] = field(default_factory=dict)
    verdict: Verdict | None = None
    failure: str = ""


@dataclass(slots=True)
class Results:
    """All answers of a run, by row, in the order of the rounds."""

    rows: Sequence[Row]
    answers: dict[str, list[Answer]]
    wall_seconds: float = 0.0

    def of(self, row: Row) -> list[Answer]:
        """Return the row's answers that have figures."""
        return [answer for answer in self.answers[row.key] if not answer.failure]

    def failure_of(self, row: Row) -> str:
        """Return why a row has no figures or fewer than rounds, an empty string if it has all."""
        return next((answer.failure for answer in self.answers[row.key] if answer.failure), "")


def run_rounds(rows: Sequence[Row], round_count: int, placed_on: Cores, not_installed: dict[str, str]) -> Results:
    """Measure every row once a round. Rows whose environment is in `not_installed` are not run, for its reason."""
    producer_cpu, sink_cpu = placed_on
    results = Results(rows, {row.key: [] for row in rows})
    started_at = time.perf_counter()
    with running_sink(sink_cpu, over_tls=any(row.is_over_tls for row in rows)) as sink:
        for number in range(round_count):
            for position, row in enumerate(rows, 1):
                _progress(f"round {number + 1}/{round_count}, {position}/{len(rows)}: {row.name}")
                reason = not_installed.get(row.environment) or (sink.no_tls if row.is_over_tls else "")
                answer = Answer(failure=NOT_RUN + reason) if reason else run_trial(row, sink, producer_cpu)
                results.answers[row.key].append(answer)
    _progress("")
    results.wall_seconds = time.perf_counter() - started_at
    return results


def run_trial(row: Row, sink: RunningSink, cpu: int | None) -> Answer:
    """Run one row once and let the sink check the records."""
    call_sink(sink.url, "/open", {"workload": row.workload.fields()})
    task = {
        "endpoint_url": sink.tls_url if row.is_over_tls else sink.url,
        "control_url": sink.url,
        "workload": row.workload.fields(),
        "cpu": cpu,
        "options": row.options,
    }
    command = [str(row.python), "-m", row.program, json.dumps(task)]
    try:
        process = subprocess.run(
            command,
            cwd=row.directory,
            env=_environment_variables() | ({"AWS_CA_BUNDLE": sink.certificate} if row.is_over_tls else {}),
            capture_output=True,
            text=True,
            timeout=_TRIAL_TIMEOUT_SECONDS,
            check=True,
        )
    except subprocess.TimeoutExpired:
        return Answer(failure=f"took more than {_TRIAL_TIMEOUT_SECONDS} seconds")
    except subprocess.CalledProcessError as error:
        return Answer(failure=reason_in(error.stderr) or f"exit code {error.returncode}")
    answer = Answer(figures=json.loads(process.stdout.splitlines()[-1]))
    report = call_sink(sink.url, "/report")
    if report["requests"]:
        answer.verdict = Verdict(**{name: report.pop(name) for name in _VERDICT_FIELDS})
        answer.figures |= report
    return answer


def _environment_variables() -> dict[str, str]:
    """Return an environment with dummy credentials, in which no client looks for a profile or a role."""
    return {
        **os.environ,
        "AWS_ACCESS_KEY_ID": "benchmark",
        "AWS_SECRET_ACCESS_KEY": "benchmark",  # the sink does not check signatures
        "AWS_CONFIG_FILE": os.devnull,
        "AWS_SHARED_CREDENTIALS_FILE": os.devnull,
        "AWS_EC2_METADATA_DISABLED": "true",
    }


def _progress(line: str) -> None:
    if sys.stderr.isatty():
        print(f"\r\x1b[2K{line[:118]}", end="", file=sys.stderr, flush=True)
