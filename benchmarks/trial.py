"""One measurement in the producing process: its task and its timing.

The process gets its task as one JSON argument and answers with one JSON line. Only the standard
library is imported: the peers run this file in their own environments.
"""

import gc
import json
import resource
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib import metadata
from typing import Any, Self

from benchmarks.machine import calibration_ms, pin_to
from benchmarks.workload import Workload

__all__ = ["REGION", "Trial", "call_sink", "peak_rss_bytes"]

REGION = "us-east-1"

WARM_UP_RECORD_COUNT = 2_000


def call_sink(endpoint_url: str, path: str, fields: dict[str, Any] | None = None) -> dict[str, Any]:
    """Call the sink's control endpoint: POST with `fields`, GET without."""
    body = None if fields is None else json.dumps(fields).encode()
    request = urllib.request.Request(endpoint_url + path, data=body)  # noqa: S310 - the sink's own address
    with urllib.request.urlopen(request, timeout=120) as response:  # noqa: S310
        answer: dict[str, Any] = json.load(response)
    return answer


@dataclass(slots=True)
class Trial:
    """The task of a producing process, its stop-watch and its answer.

    Attributes:
        endpoint_url: Where the sink listens; empty for programs that need no network.
        control_url: Where the sink takes its own operations, over plain HTTP.
        workload: The records to produce.
        cpu: The core to be pinned to, or None.
        options: The difference from other rows of the same program.
    """

    endpoint_url: str
    control_url: str
    workload: Workload
    cpu: int | None
    options: dict[str, Any]
    _answer: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def from_command_line(cls) -> Self:
        """Read the task and pin the process to its core."""
        task = json.loads(sys.argv[1])
        pin_to(task["cpu"])
        return cls(workload=Workload.from_fields(task.pop("workload")), **task)

    def warm_up_records(self) -> list[tuple[str, bytes]]:
        """Return records to send before the measurement, which open connections and load the shard map."""
        first = self.workload.record_count
        return self.workload.records(first, first + WARM_UP_RECORD_COUNT)

    def measured_records(self) -> list[tuple[str, bytes]]:
        """Return the records to measure."""
        return self.workload.records(0, self.workload.record_count)

    @contextmanager
    def measured(self) -> Iterator[None]:
        """Time the body: CPU of all threads of this process, and wall."""
        gc.collect()
        self.add(calibration_ms=calibration_ms(), rss_bytes_before=peak_rss_bytes())
        if self.endpoint_url:
            call_sink(self.control_url, "/start", {})
        wall_started_at = time.perf_counter()
        before = resource.getrusage(resource.RUSAGE_SELF)
        yield
        after = resource.getrusage(resource.RUSAGE_SELF)
        user_seconds, system_seconds = after.ru_utime - before.ru_utime, after.ru_stime - before.ru_stime
        self.add(
            cpu_seconds=user_seconds + system_seconds,
            system_seconds=system_seconds,
            wall_seconds=time.perf_counter() - wall_started_at,
            rss_bytes_peak=peak_rss_bytes(),
        )

    def add(self, **figures: Any) -> None:  # noqa: ANN401 - any JSON value
        """Add figures to the answer."""
        self._answer |= figures

    def finish(self, *, acknowledged: int, distributions: tuple[str, ...] = ()) -> None:
        """Print the answer: how many records were acknowledged, and the versions used."""
        versions = {name: metadata.version(name) for name in distributions}
        self.add(acknowledged=acknowledged, versions=self._answer.get("versions", {}) | versions)
        print(json.dumps(self._answer), flush=True)


def peak_rss_bytes() -> int:
    """Return the largest resident set this process ever had."""
    kibibytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return kibibytes if sys.platform == "darwin" else kibibytes * 1024
