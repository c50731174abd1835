"""What a command says: results on stdout, everything else on stderr, and no escape codes in a pipe."""

import logging
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import NamedTuple, NoReturn

import msgspec
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, TextColumn, TimeElapsedColumn
from rich.text import Text

from kpl_integrations.cli.failure import CommandFailure

__all__ = ["Figure", "complain", "note", "noted", "print_figures", "progress"]


class Figure(NamedTuple):
    """One row of a table: `name` is the key in JSON, `text` what a person reads, a dim `remark` behind it."""

    name: str
    value: object
    text: str
    remark: str = ""


class _Console(Console):
    """A console whose reader may go away: that is for the command to handle, not a reason to exit at once."""

    def on_broken_pipe(self) -> NoReturn:
        """Let the BrokenPipeError go on."""
        raise  # noqa: PLE0704 - rich calls it while it handles the error


def results() -> Console:
    """Return the console on stdout."""
    return _Console(highlight=False, markup=False, emoji=False)


def remarks() -> Console:
    """Return the console on stderr."""
    return _Console(stderr=True, highlight=False, markup=False, emoji=False)


@contextmanager
def progress(*columns: ProgressColumn, hidden: bool = False) -> Iterator[Progress]:
    """Show progress bars on stderr; nothing where that is no terminal."""
    bars = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        *(columns or (MofNCompleteColumn(),)),
        TimeElapsedColumn(),
        console=remarks(),
        transient=True,
    )
    if hidden or not sys.stderr.isatty():
        yield bars
    else:
        with bars:
            yield bars


def print_figures(figures: Sequence[Figure], *, as_json: bool) -> None:
    """Print figures as a table, or as one JSON object."""
    if as_json:
        sys.stdout.write(msgspec.json.encode({figure.name: figure.value for figure in figures}).decode() + "\n")
        sys.stdout.flush()
        return
    label_width = max(len(figure.name) for figure in figures)
    text_width = max(len(figure.text) for figure in figures)
    console = results()
    for figure in figures:
        row = Text(figure.name.replace("_", " ").ljust(label_width + 2))
        row.append(figure.text.ljust(text_width + 2), "bold")
        row.append(figure.remark, "dim")
        row.rstrip()
        console.print(row, soft_wrap=True)


def note(text: str) -> None:
    """Say something on stderr that is neither a result nor an error."""
    with suppress(OSError):  # a log on a full disk, or that nobody reads, must not end who only remarks something
        remarks().print(text, style="dim", soft_wrap=True)


def complain(failure: CommandFailure) -> None:
    """Say on stderr why the command cannot go on."""
    console = remarks()
    with suppress(OSError):  # the exit status says it too
        console.print("kpl:", style="bold red", end=" ")
        console.print(str(failure), soft_wrap=True)


class _NoteHandler(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        """Print one line on stderr."""
        note(f"{record.levelname.lower()}: {record.getMessage()}")


@contextmanager
def noted(logger_name: str, level: int) -> Iterator[None]:
    """Say what a logger logs while the block lasts, such as the producer's warning of shards that cannot be listed."""
    logger, handler = logging.getLogger(logger_name), _NoteHandler(level)
    before = logger.level
    logger.addHandler(handler)
    if logger.getEffectiveLevel() > level:
        logger.setLevel(level)
    try:
        yield
    finally:
        logger.setLevel(before)
        logger.removeHandler(handler)
