"""Output of the commands: results on stdout, everything else on stderr, no escape codes in a pipe."""

import logging
import os
import sys
import textwrap
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from datetime import UTC, datetime
from types import MappingProxyType, TracebackType
from typing import Any, Final, NamedTuple, NoReturn, TextIO

import msgspec
from rich.console import Console
from rich.text import Text

from kpl_integrations.cli.exit_code import CommandFailure
from kpl_integrations.gateway_figures import process_name

# The logger's name in lines that the command prints itself.
_COMMAND: Final = "kpl_integrations.cli"
# Columns; a remark is not broken into shorter lines.
_NARROWEST_REMARK: Final = 12
_NO_FIELDS: Final[Mapping[str, object]] = MappingProxyType({})


class Figure(NamedTuple):
    """One row of a table: `name` is the key in JSON, `remark` a dim text; the value is shown as `text`, if given."""

    name: str
    value: Any
    remark: str = ""
    text: str = ""

    def __str__(self) -> str:
        return self.text or f"{self.value:,}"


class _Console(Console):
    """A console that raises BrokenPipeError, where rich's own would exit the process."""

    def on_broken_pipe(self) -> NoReturn:
        """Raise the BrokenPipeError again."""
        raise  # noqa: PLE0704 - rich calls this while it handles the error


def results() -> Console:
    """Return the console on stdout."""
    return _Console(highlight=False, markup=False, emoji=False)


def remarks() -> Console:
    """Return the console on stderr."""
    return _Console(stderr=True, highlight=False, markup=False, emoji=False)


def print_figures(figures: Sequence[Figure], *, as_json: bool) -> None:
    """Print figures as a table, or as one JSON object. A remark has several lines on a narrow terminal."""
    if as_json:
        print_json({figure.name: figure.value for figure in figures})
        return
    label_width = max(len(figure.name) for figure in figures)
    text_width = max(len(str(figure)) for figure in figures)
    console = results()
    indent = label_width + text_width + 4
    remark_width = max(console.width - indent, _NARROWEST_REMARK)
    for figure in figures:
        row = Text(figure.name.replace("_", " ").ljust(label_width + 2))
        row.append(str(figure).ljust(text_width + 2), "bold")
        remark = [figure.remark]
        if console.is_terminal:
            remark = textwrap.wrap(figure.remark, remark_width, break_long_words=False, break_on_hyphens=False)
        row.append(f"\n{' ' * indent}".join(remark), "dim")
        row.rstrip()
        console.print(row, soft_wrap=True)


def print_json(value: object) -> None:
    """Print one line of JSON on stdout."""
    sys.stdout.write(msgspec.json.encode(value).decode() + "\n")
    sys.stdout.flush()


def printable(text: str) -> str:
    """Return one line of text without control characters, so that it cannot send commands to a terminal."""
    if text.isprintable():
        return text
    return "".join(
        character if character.isprintable() else character.encode("unicode_escape").decode() for character in text
    )


def duration_text(seconds: float) -> str:
    """Return a duration with its unit, such as "42 s", "3 min" or "5 h"."""
    for size, unit in ((86_400, "d"), (3_600, "h"), (60, "min")):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} s"


def note(text: str) -> None:
    """Print a remark on stderr that is neither a result nor an error."""
    with suppress(OSError):  # stderr on a full disk or closed must not end the command
        remarks().print(text, style="dim", soft_wrap=True)


def print_failure(failure: CommandFailure) -> None:
    """Print on stderr why the command cannot continue."""
    console = remarks()
    with suppress(OSError):  # the exit status shows the failure too
        console.print("kpl:", style="bold red", end=" ")
        console.print(str(failure), soft_wrap=True)


class LogFormat(NamedTuple):
    """How log lines are printed: with an instant (UTC), as JSON, after the name of the process.

    In JSON, `worker` is a field; `drains` is one in place of it, if the process only drains this file.
    In JSON everything that the command prints is a log line, its results and its errors too.
    """

    has_time: bool = False
    is_json: bool = False
    worker: int | None = None
    drains: str = ""

    def line(self, record: logging.LogRecord) -> str:
        """Return one line."""
        level, message = record.levelname.lower(), record.getMessage()
        if record.exc_info and record.exc_info[0] is not None:
            message += f": {record.exc_info[0].__name__}: {record.exc_info[1]}"
        if self.is_json:
            return self._json_line(record.created, level, record.name, message, getattr(record, "fields", {}))
        prefix = "" if self.worker is None else f"{process_name(self.worker, self.drains)}: "
        return f"{_instant(record.created) + ' ' if self.has_time else ''}{level}: {prefix}{message}"

    def note(
        self, text: str, fields: Mapping[str, object] = _NO_FIELDS, *, level: str = "info", to: TextIO | None = None
    ) -> None:
        """Print a remark on stderr, or `to` a file; `fields` are members of its JSON."""
        if self.is_json:
            line = self._json_line(time.time(), level, _COMMAND, text, fields)
            with suppress(OSError):  # as `note`
                (to or sys.stderr).write(line + "\n")
                (to or sys.stderr).flush()
        else:
            note(text)

    def failure(self, failure: CommandFailure) -> None:
        """Print on stderr why the command cannot continue."""
        if self.is_json:
            self.note(str(failure), level="error")
        else:
            print_failure(failure)

    def _json_line(self, at: float, level: str, logger: str, message: str, fields: Mapping[str, object]) -> str:
        worker = {} if self.worker is None else {"worker": self.worker}
        process = {"drains": self.drains} if self.drains else worker
        first = {"time": _instant(at), "level": level, "logger": logger, **process, "message": message}
        return msgspec.json.encode({**first, **fields}, enc_hook=str).decode()


def _instant(at: float) -> str:
    return f"{datetime.fromtimestamp(at, UTC):%Y-%m-%dT%H:%M:%S.%f}"[:-3] + "Z"


PLAIN: Final = LogFormat()


class _NoteHandler(logging.Handler):
    log_format = LogFormat()

    def emit(self, record: logging.LogRecord) -> None:
        """Print one line on stderr."""
        if self.log_format.is_json:
            with suppress(OSError):  # as `note`
                sys.stderr.write(self.log_format.line(record) + "\n")
        else:
            note(self.log_format.line(record))


def log_format_of_environment(assigned: str | None = None, in_file: object = None) -> LogFormat:
    """Return how a server prints. It is known before the settings are, because errors of the settings are lines too.

    What is `assigned` on the command line precedes the environment, which precedes the file.
    """
    found = [value.strip() for name, value in os.environ.items() if name.upper() == "KPL_INGEST_LOG_FORMAT"]
    return LogFormat(has_time=True, is_json=next(filter(None, [assigned, *found, in_file]), "") == "json")


@contextmanager
def show_all_logs(levels: Mapping[str, int], log_format: LogFormat) -> Iterator[None]:
    """Print the records of all loggers on stderr inside the block: from these levels on, of others warnings.

    In JSON, warnings of Python and exceptions that end the program are lines too.
    """
    with ExitStack() as stack:
        for name, level in levels.items():
            stack.callback(logging.getLogger(name).setLevel, logging.getLogger(name).level)
            logging.getLogger(name).setLevel(level)
        stack.enter_context(show_logs("", logging.NOTSET, log_format))
        if log_format.is_json:
            stack.callback(logging.captureWarnings, capture=False)
            logging.captureWarnings(capture=True)
        yield


def print_exceptions_as(log_format: LogFormat) -> None:
    """Print an exception that ends the process as a line of JSON, with its traceback, if that is the format."""
    if log_format.is_json:

        def print_exception(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
            text = "".join(traceback.format_exception(kind, error, trace))
            log_format.note(f"{kind.__name__}: {error}", {"traceback": text}, level="critical")

        sys.excepthook = print_exception


@contextmanager
def show_logs(logger_name: str, level: int, log_format: LogFormat | None = None) -> Iterator[None]:
    """Print a logger's records on stderr inside the block, such as the producer's warnings."""
    logger, handler = logging.getLogger(logger_name), _NoteHandler(level)
    handler.log_format = log_format or handler.log_format
    before = logger.level
    logger.addHandler(handler)
    if logger.name != "root" and logger.getEffectiveLevel() > level:
        logger.setLevel(level)
    try:
        yield
    finally:
        logger.setLevel(before)
        logger.removeHandler(handler)
