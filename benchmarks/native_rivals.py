"""The alternatives that are not Python programs, built from `benchmarks/native` where their tools are installed.

python -m benchmarks.native_rivals        builds all of them and prints the failures
"""

import hashlib
import os
import shutil
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.peers import ENVIRONMENTS
from benchmarks.reason import reason_in

__all__ = ["EXPERT", "GO", "KPL", "RIVALS", "Rival", "build_all"]

_SOURCES = Path(__file__).parent / "native"
_STAMP = "built-from"
_BUILD_TIMEOUT_SECONDS = 600


@dataclass(frozen=True, slots=True)
class Rival:
    """An alternative in another language.

    Attributes:
        name: Its name in the table.
        environment: Directory of its build.
        sources: The folder of its sources in `benchmarks/native`.
        tools: The programs that build and run it.
        build: The command that builds it, run in a copy of its sources.
        run: The command that runs it, from the folder of its build.
        most_records: The maximum number of records, so that a trial takes a few seconds.
        options: The options of `benchmarks.peer_programs.native_rival`.
        note: A remark for the reader of its figures.
    """

    name: str
    environment: str
    sources: str
    tools: tuple[str, ...]
    build: tuple[str, ...]
    run: tuple[str, ...]
    most_records: int = sys.maxsize
    options: dict[str, Any] = field(default_factory=dict)
    note: str = ""

    @property
    def directory(self) -> Path:
        """Return the folder of its build."""
        return ENVIRONMENTS / self.environment


GO = Rival(
    "bare Go producer",
    environment="go-producer",
    sources="go_producer",
    tools=("go",),
    build=("go", "build", "-buildvcs=false", "-o", "producer", "./bare"),
    run=("./producer",),
    options={"warm_up_rounds": 10},
    note="aggregates per shard, a callback a record; no retry, limit, deadline or wrong-shard check",
)
EXPERT = Rival(
    "expert Go producer",
    environment="go-expert",
    sources="go_producer",
    tools=("go",),
    build=("go", "build", "-buildvcs=false", "-o", "producer", "./expert"),
    run=("./producer",),
    options={"warm_up_rounds": 10},
    note="standard library, own request, signature and connection, a result a record; no retry, limit, deadline",
)
KPL = Rival(
    "Amazon KPL (Java)",
    environment="amazon-kpl",
    sources="kpl",
    tools=("java", "mvn"),
    build=("mvn", "-q", "-B", "compile", "dependency:copy-dependencies", "-DoutputDirectory=lib"),
    run=("java", "-cp", "target/classes:lib/*", "benchmark.KplProducer"),
    most_records=150_000,
    options={"warm_up_rounds": 100},  # the JVM needs about 200,000 records
    note="CPU and memory of the JVM and its child together; RateLimit raised, 100 ms buffered, 40,000 outstanding",
)
RIVALS = {rival.environment: rival for rival in (GO, EXPERT, KPL)}


def build_all(environments: Iterable[str]) -> dict[str, str]:
    """Build the rivals of these environments if their sources changed; return the reason of each failure."""
    reasons = {name: _build(RIVALS[name]) for name in RIVALS.keys() & set(environments)}
    return {name: reason for name, reason in reasons.items() if reason}


def _build(rival: Rival) -> str:
    """Return an empty string, or why the rival cannot be run."""
    missing = next((tool for tool in rival.tools if shutil.which(tool) is None), None)
    if missing is not None:
        return f"no {missing} here"
    sources = _SOURCES / rival.sources
    texts = [path.read_bytes() for path in sorted(sources.rglob("*")) if path.is_file()]
    wanted = hashlib.sha256(b"".join([*texts, " ".join(rival.build).encode()])).hexdigest()
    stamp = rival.directory / _STAMP
    if stamp.exists() and stamp.read_text() == wanted:
        return ""
    print(f"building the {rival.name} in {ENVIRONMENTS.name}/{rival.environment}", file=sys.stderr)
    shutil.rmtree(rival.directory, ignore_errors=True)
    shutil.copytree(sources, rival.directory)
    environment = {**os.environ, "GOTOOLCHAIN": "local"}  # without it go may download another version of itself
    try:
        subprocess.run(
            rival.build,
            cwd=rival.directory,
            env=environment,
            capture_output=True,
            text=True,
            timeout=_BUILD_TIMEOUT_SECONDS,
            check=True,
        )
    except subprocess.CalledProcessError as error:
        output = f"{error.stdout}\n{error.stderr}"
        return reason_in(output) or f"{rival.build[0]} ended with exit code {error.returncode}"
    except (subprocess.TimeoutExpired, OSError) as error:
        return reason_in(f"{type(error).__name__}: {error}")
    stamp.write_text(wanted)
    return ""


if __name__ == "__main__":
    failures = build_all(RIVALS)
    for rival in RIVALS.values():
        print(f"{rival.name:20} {failures.get(rival.environment, 'built')}")
    sys.exit(1 if failures else 0)
