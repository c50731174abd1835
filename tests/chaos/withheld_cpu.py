"""CPU time that other processes took: a busy machine adds it to every wait, and it is not the producer's fault."""

from pathlib import Path

__all__ = ["withheld_seconds"]


def withheld_seconds(*process_ids: int) -> dict[str, float]:
    """Return how long each thread of these processes was runnable but not running, since it started.

    The second number of `/proc/PID/task/TID/schedstat`, in nanoseconds; nothing where there is no such file. A
    thread that waits for a lock, a disk or a socket is not counted: those waits are the producer's own.
    """
    return {
        table.parent.name: int(table.read_text(encoding="ascii").split()[1]) / 1e9
        for process_id in process_ids
        for table in Path(f"/proc/{process_id}/task").glob("*/schedstat")
    }
