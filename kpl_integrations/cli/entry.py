"""Where the `kpl` command begins: it says in one sentence if its extra is not installed."""

import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from io import TextIOWrapper
from pathlib import Path
from typing import Final

from kpl_integrations.cli.exit_code import ExitCode

__all__ = ["main"]

# What `pip install kpl-integrations` alone does not bring.
_OF_THE_EXTRA: Final = frozenset({"typer", "rich"})


def main(arguments: Sequence[str] | None = None) -> int:
    """Run `kpl` with `arguments` (the process' own by default); return the exit status."""
    if sys.stdout is None:
        # Whoever started this closed it, and wants no output.
        sys.stdout = Path(os.devnull).open("w")  # noqa: SIM115 - for the rest of the process
    for stream in (sys.stdout, sys.stderr):
        # A locale that lacks a character must not end the program.
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    try:
        from kpl_integrations.cli.app import app  # noqa: PLC0415 - its extra may be missing
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package not in _OF_THE_EXTRA:
            raise
        print(  # noqa: T201 - rich may be what is missing
            f"kpl: {package} is not installed; pip install 'kpl-integrations[cli,local]'", file=sys.stderr
        )
        return ExitCode.UNUSABLE
    try:
        app(args=None if arguments is None else list(arguments), prog_name="kpl")
    except SystemExit as end:
        # Of a help text that nobody reads typer makes the status 1.
        if isinstance(end.__context__, BrokenPipeError):
            return ExitCode.NOBODY_READS
        return _flushed(end.code if isinstance(end.code, int) else 0)
    except OSError as error:
        return _unwritten(error)  # a help text
    return _flushed(ExitCode.DONE)


def _flushed(status: int) -> int:
    """Write what is still buffered; whoever read our output may be gone."""
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        _discard_output()
        return ExitCode.NOBODY_READS
    except OSError as error:
        _discard_output()
        return _unwritten(error)
    return status


def _discard_output() -> None:
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _unwritten(error: OSError) -> ExitCode:
    with suppress(OSError):
        print(f"kpl: the output cannot be written ({error.strerror}); make room for it", file=sys.stderr)  # noqa: T201 - as above
    return ExitCode.UNUSABLE
