"""Describe the machine: the cores for each process, the processor, and the background load."""

import os
import platform
import time
from pathlib import Path

__all__ = ["Cores", "calibration_ms", "cores", "describe_machine", "pin_to"]

#: (core of the producer, core of the sink); None: not pinned.
Cores = tuple[int | None, int | None]


def cores() -> tuple[Cores, str]:
    """Return the cores for producer and sink, and a sentence about it for the table."""
    if not hasattr(os, "sched_getaffinity"):
        return (None, None), "This system cannot pin a process to a core; producer and sink ran on any core."
    available = sorted(os.sched_getaffinity(0))
    if len(available) < 2:
        return (
            None,
            None,
        ), "Only one core is available: producer and sink shared it, so CPU time is noisier than usual."
    return (available[-1], available[0]), "Producer and sink were pinned to one core each."


def pin_to(core: int | None) -> None:
    """Pin this process and its children to `core`. With None do nothing."""
    if core is not None and hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {core})


def calibration_ms() -> float:
    """Return the milliseconds of a fixed loop, which are constant on a quiet machine."""
    started_at = time.perf_counter()
    total = 0
    for number in range(300_000):
        total += number & 7
    return (time.perf_counter() - started_at) * 1000


def describe_machine() -> str:
    """Return processor, cores and Python, without the name of this machine."""
    processor = platform.processor() or platform.machine()
    cpu_information = Path("/proc/cpuinfo")
    if cpu_information.exists():
        for line in cpu_information.read_text().splitlines():
            if line.startswith("model name"):
                processor = line.partition(":")[2].strip()
                break
    return (
        f"{processor}, {os.cpu_count()} cores, {platform.system()} {platform.release().partition('-')[0]}, "
        f"{platform.python_implementation()} {platform.python_version()}"
    )
