"""From the start of `kpl` to its exit status: missing packages, a closed output, a full disk."""

import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from io import TextIOWrapper
from pathlib import Path
from typing import Final

# Packages of the extra `cli`, which `pip install kpl-integrations` alone does not install.
_PACKAGES_OF_EXTRA: Final = frozenset({"typer", "rich"})
# Members of `ExitCode`, which is not imported here: the import of the command must be interruptible.
_UNUSABLE: Final = 3
_OUTPUT_CLOSED: Final = 141


def start(arguments: Sequence[str] | None) -> int:
    """Run `kpl`; return the exit status."""
    if sys.stdout is None:
        # The parent process closed it, so discard the output.
        sys.stdout = Path(os.devnull).open("w")  # noqa: SIM115 - for the rest of the process
    for stream in (sys.stdout, sys.stderr):
        # Escape a character that the locale cannot encode instead of failing.
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    try:
        from kpl_integrations.cli.app import app  # noqa: PLC0415 - its extra may be missing; takes a third of a second
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package not in _PACKAGES_OF_EXTRA:
            raise
        print(  # noqa: T201 - rich may be the missing package
            f"kpl: {package} is not installed; pip install 'kpl-integrations[cli,local]'", file=sys.stderr
        )
        return _UNUSABLE
    try:
        app(args=None if arguments is None else list(arguments), prog_name="kpl")
    except SystemExit as end:
        # Typer turns a broken pipe into status 1 when it prints a help text.
        if isinstance(end.__context__, BrokenPipeError):
            return _OUTPUT_CLOSED
        return _flushed(end.code if isinstance(end.code, int) else 0)
    except OSError as error:
        return _output_failed(error)  # while printing a help text
    return _flushed(0)


def _flushed(status: int) -> int:
    """Write the buffered output and return `status`, or another status if the output is closed or full."""
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        _discard_output()
        return _OUTPUT_CLOSED
    except OSError as error:
        _discard_output()
        return _output_failed(error)
    return status


def _discard_output() -> None:
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _output_failed(error: OSError) -> int:
    with suppress(OSError):
        print(f"kpl: cannot write the output ({error.strerror}); free some disk space", file=sys.stderr)  # noqa: T201 - as above
    return _UNUSABLE
