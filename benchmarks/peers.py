"""The alternatives, each in its own virtual environment, so that each producer has its own versions.

python -m benchmarks.peers        installs all of them and prints the failures
"""

import json
import subprocess
import sys
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.reason import reason_in

__all__ = ["ENVIRONMENTS", "PEERS", "Peer", "install_all", "python_of"]

ENVIRONMENTS = Path(__file__).parent.parent / ".venv-bench"
_STAMP = "installed-requirements.json"
_INSTALL_TIMEOUT_SECONDS = 240


@dataclass(frozen=True, slots=True)
class Peer:
    """An alternative to measure beside kpl_core.

    Attributes:
        name: Its name in the table.
        program: Its module in `benchmarks.peer_programs`.
        environment: Directory of its virtual environment.
        requirements: The packages that pip installs there.
        options: The program's options.
        most_records: The maximum number of records in the short version, so that a trial takes about a second.
        note: A remark for the reader of its figures.
    """

    name: str
    program: str
    environment: str
    requirements: tuple[str, ...]
    most_records: int
    options: dict[str, Any] = field(default_factory=dict)
    note: str = ""


PEERS = (
    Peer(
        "raw boto3",
        "raw_boto3",
        "raw-boto3",
        ("boto3",),
        most_records=30_000,
        note="no aggregation, retry, limit or deadline",
    ),
    Peer(
        "raw aiobotocore",
        "raw_aiobotocore",
        "raw-aiobotocore",
        ("aiobotocore",),
        most_records=30_000,
        note="no aggregation, retry, limit or deadline",
    ),
    Peer(
        "aws-kinesis-agg, per shard",
        "aws_kinesis_agg",
        "aws-kinesis-agg",
        ("aws-kinesis-agg==1.2.3", "boto3", "six"),
        most_records=60_000,
        options={"aggregators": "per_shard"},
        note="with routing written for this benchmark; no retry, limit or deadline",
    ),
    Peer(
        "aws-kinesis-agg, as its README",
        "aws_kinesis_agg",
        "aws-kinesis-agg",
        ("aws-kinesis-agg==1.2.3", "boto3", "six"),
        most_records=60_000,
        options={"aggregators": "one"},
        note="one aggregator for the stream; no retry, limit or deadline",
    ),
    Peer("aiokpl", "aiokpl_put_record", "aiokpl", ("aiokpl==0.2.0",), most_records=4_000),
    Peer(
        "async-kinesis",
        "async_kinesis",
        "async-kinesis",
        ("async-kinesis[kpl]==3.0.1",),
        most_records=9_000,  # its throttle slows down with the records of the last second
        options={"processor": "string"},
        note="no result per record; its limits raised (its defaults stop near 1,000 records/s)",
    ),
    Peer(
        "async-kinesis, aggregating",
        "async_kinesis",
        "async-kinesis",
        ("async-kinesis[kpl]==3.0.1",),
        most_records=60_000,
        options={"processor": "kpl"},
        note="takes no partition keys; no result per record",
    ),
)


def python_of(environment: str) -> Path:
    """Return the interpreter of an environment."""
    directory = ENVIRONMENTS / environment
    return directory / ("Scripts/python.exe" if sys.platform == "win32" else "bin/python")


def install_all(peers: Iterable[Peer]) -> dict[str, str]:
    """Install every missing environment; return the reason of each failure."""
    requirements = {peer.environment: peer.requirements for peer in peers}
    with ThreadPoolExecutor(max_workers=2) as threads:
        reasons = threads.map(_install, requirements, requirements.values())
        return {environment: reason for environment, reason in zip(requirements, reasons, strict=True) if reason}


def _install(environment: str, requirements: tuple[str, ...]) -> str:
    """Return an empty string, or why the environment cannot be used."""
    directory = ENVIRONMENTS / environment
    stamp = directory / _STAMP
    wanted = json.dumps([sys.version_info[:3], requirements])
    if stamp.exists() and stamp.read_text() == wanted:
        return ""
    print(f"installing {' '.join(requirements)} into {directory.parent.name}/{environment}", file=sys.stderr)
    pip = [str(python_of(environment)), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    try:
        _run([sys.executable, "-m", "venv", "--clear", str(directory)])
        _run([*pip, *requirements])
    except subprocess.CalledProcessError as error:
        return reason_in(error.stderr) or f"pip ended with exit code {error.returncode}"
    except (subprocess.TimeoutExpired, OSError) as error:
        return reason_in(f"{type(error).__name__}: {error}")
    stamp.write_text(wanted)
    return ""


def _run(command: list[str]) -> None:
    subprocess.run(command, check=True, capture_output=True, text=True, timeout=_INSTALL_TIMEOUT_SECONDS)


if __name__ == "__main__":
    failures = install_all(PEERS)
    for name in dict.fromkeys(peer.environment for peer in PEERS):
        print(f"{name:20} {'could not be installed: ' + failures[name] if name in failures else 'installed'}")
    sys.exit(1 if failures else 0)
