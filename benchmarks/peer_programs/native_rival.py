"""Run a rival in another language, which measures itself.

Options: `rival`, its environment; `warm_up_rounds`, how often it sends the records of the warm-up.
The program reads pieces from its standard input, each after its length in four bytes, big-endian: the task as JSON,
then key and data of each record, first those of the warm-up. It sends the warm-up, posts /start to
`control_url`, sends the measured records, and prints its figures as one line of JSON.
"""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress

from benchmarks.machine import calibration_ms
from benchmarks.native_rivals import RIVALS
from benchmarks.trial import REGION, Trial
from benchmarks.workload import STREAM_NAME

_TIMEOUT_SECONDS = 150  # less than that of a trial, so that this program can stop the rival


def pieces(trial: Trial, directory: str) -> Iterator[bytes]:
    """Yield the task and the records."""
    warm_up, measured = trial.warm_up_records(), trial.measured_records()
    task = {
        "endpoint_url": trial.endpoint_url,
        "control_url": trial.control_url,
        "certificate": os.environ.get("AWS_CA_BUNDLE", ""),
        "region": REGION,
        "stream": STREAM_NAME,
        "directory": directory,
        "warm_up_rounds": trial.options["warm_up_rounds"],
        "warm_up_count": len(warm_up),
        "measured_count": len(measured),
    }
    yield json.dumps(task).encode()
    for key, data in (*warm_up, *measured):
        yield key.encode()
        yield data


def main() -> None:
    trial = Trial.from_command_line()
    rival = RIVALS[trial.options["rival"]]
    given = b"".join(len(piece).to_bytes(4) + piece for piece in pieces(trial, str(rival.directory)))
    trial.add(calibration_ms=calibration_ms())
    # A group of its own, because a rival that fails can leave its child process behind.
    with subprocess.Popen(
        rival.run, cwd=rival.directory, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True
    ) as process:
        try:
            output, _ = process.communicate(given, timeout=_TIMEOUT_SECONDS)
        except subprocess.TimeoutExpired:
            sys.exit(f"Error: the rival took more than {_TIMEOUT_SECONDS} seconds")
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
    if process.returncode:
        sys.exit(process.returncode)  # the rival has printed its error
    figures = json.loads(output.splitlines()[-1])
    trial.add(**figures)
    trial.finish(acknowledged=figures["acknowledged"])


if __name__ == "__main__":
    main()
