"""How far a command is: a bar on a terminal, else a line now and then, on stderr.

The first line comes after two seconds. With `--json` each is an object, on a terminal too. `--quiet` shows nothing.
"""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, Final

import msgspec
from rich.progress import BarColumn, Progress, ProgressColumn, Task, TaskID, TextColumn, TimeRemainingColumn
from rich.table import Column
from rich.text import Text

from kpl_core.options.kinesis_limits import MIB
from kpl_integrations.cli.options import ProgressWanted
from kpl_integrations.cli.terminal import duration_text, note, remarks

# The first line comes after this, and each further one after the other.
FIRST_SECONDS: Final = 2.0
LINE_SECONDS: Final = 10.0
# From this width on a task fits on one line, with a short bar. On a narrower terminal the numbers get the bar's place.
_ONE_LINE_COLUMNS: Final = 80


class _Pace(ProgressColumn):
    """What was done, of how much, and how fast."""

    def render(self, task: Task) -> Text:
        return Text(_done(task))


def _done(task: Task) -> str:
    """Return such as "1,200 of 5,000 records, 310 records/s"; bytes are in MiB, with the lines or records they have.

    A task of records may have a field `bytes`, those of what is done, and `limited_by`, what limits it now.
    """
    unit, speed = task.fields["unit"], task.finished_speed or task.speed
    if unit == "bytes":
        done, unit, numbers = task.completed / MIB, "MiB", ",.1f"
        total, speed = (None if each is None else each / MIB for each in (task.total, speed))
    else:
        done, total, numbers = task.completed, task.total, ",.0f"
    of = "" if total is None else f" of {total:{numbers}}"
    pace = "" if speed is None else f", {speed:{numbers}} {unit}/s"
    counted = "".join(f"{task.fields[word]:,} {word}, " for word in ("lines", "records") if word in task.fields)
    limited = f", limited by {task.fields['limited_by']}" if task.fields.get("limited_by") else ""
    return f"{counted}{done:{numbers}}{of} {unit}{pace}{_size(task)}{limited}"


def _size(task: Task) -> str:
    """Return how many MiB the records have that are done, and how many a second if that is known."""
    if not task.fields.get("bytes") or not task.completed:
        return ""
    size, per_second = task.fields["bytes"] / MIB, _bytes_per_second(task)
    return f", {size:,.1f} MiB" + ("" if per_second is None else f", {per_second / MIB:,.1f} MiB/s")


def _bytes_per_second(task: Task) -> float | None:
    speed = task.finished_speed or task.speed
    return None if speed is None or not task.completed else speed * task.fields["bytes"] / task.completed


class ProgressLines(Progress):
    """Prints lines where there is no terminal for a bar."""

    def __init__(self, *, as_json: bool, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__(disable=True)
        self._as_json = as_json
        self._clock = clock
        self._next_at = clock() + FIRST_SECONDS

    def update(self, task_id: TaskID, **changed: Any) -> None:  # noqa: ANN401 - passed on
        """Note what is done, and print a line if it is time for one."""
        super().update(task_id, **changed)
        now = self._clock()
        if now < self._next_at:
            return
        self._next_at = now + LINE_SECONDS
        task = next(task for task in self.tasks if task.id == task_id)
        if self._as_json:
            with suppress(OSError):  # as `note`
                sys.stderr.write(msgspec.json.encode(_fields(task)).decode() + "\n")
                sys.stderr.flush()
        else:
            left = task.time_remaining
            note(f"{task.description}: {_done(task)}" + ("" if left is None else f", {duration_text(left)} left"))


def _fields(task: Task) -> dict[str, object]:
    speed = task.finished_speed or task.speed
    return {
        "progress": task.description,
        **{name: value for name, value in task.fields.items() if name != "unit"},
        task.fields["unit"]: task.completed,
        "total": task.total,
        "per_second": _rounded(speed),
        **({"bytes_per_second": _rounded(_bytes_per_second(task))} if "bytes" in task.fields else {}),
        "seconds_left": task.time_remaining,
    }


def _rounded(per_second: float | None) -> float | None:
    return None if per_second is None else round(per_second, 1)


@contextmanager
def progress(*, as_json: bool, hidden: bool = False) -> Iterator[Progress]:
    """Show the progress of tasks, each with a `unit`: "bytes", or a word for what it counts. `hidden`: show nothing."""
    if hidden or ProgressWanted.is_quiet:
        yield Progress(disable=True)
    elif sys.stderr.isatty() and not as_json:
        console = remarks()
        is_wide = console.width >= _ONE_LINE_COLUMNS
        pace = _Pace(table_column=Column(no_wrap=is_wide))
        numbers = (BarColumn(), pace) if is_wide else (pace,)
        columns = TextColumn("{task.description}"), *numbers, TimeRemainingColumn()
        with Progress(*columns, console=console, transient=True) as bars:
            yield bars
    else:
        yield ProgressLines(as_json=as_json)
