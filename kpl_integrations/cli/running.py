"""What all commands share: their common options, and how one runs to its exit status."""

import logging
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Annotated, Any, Final

import anyio
import typer

from kpl_integrations.cli.exit_code import ExitCode
from kpl_integrations.cli.failure import CommandFailure
from kpl_integrations.cli.terminal import complain, noted

__all__ = ["EXIT_CODES", "EndpointUrl", "Json", "Region", "needing_extra", "run"]

EXIT_CODES: Final = (
    "Exit status: 0 done, 1 not every record arrived, 2 wrong usage, 3 Kinesis cannot be used, 4 bad input, "
    "130 or 143 interrupted."
)

Json = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of a table.")]
Region = Annotated[str | None, typer.Option(help="AWS region; by default as for any AWS client.", show_default=False)]
EndpointUrl = Annotated[
    str | None,
    typer.Option(
        envvar=["AWS_ENDPOINT_URL_KINESIS", "AWS_ENDPOINT_URL"],
        help="Where Kinesis is, such as http://127.0.0.1:4567 for `kpl local`.",
        show_default=False,
    ),
]


@contextmanager
def needing_extra(extra: str) -> Iterator[None]:
    """Around the imports of a command: what is not installed becomes one sentence that names the extra."""
    try:
        yield
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package.startswith("kpl_"):
            raise
        complain(CommandFailure(f"{package} is not installed; pip install 'kpl-integrations[cli,{extra}]'"))
        raise typer.Exit(ExitCode.UNUSABLE) from error


def run(command: Callable[..., Coroutine[Any, Any, ExitCode]], *arguments: object, is_server: bool = False) -> None:
    """Run a command to its exit status; a failure becomes one sentence.

    A server runs on uvloop, where that is installed, and tells what its producer logs at INFO too: the end of trouble.
    """
    try:
        options = {"use_uvloop": is_server and find_spec("uvloop") is not None}
        with noted("kpl_core", logging.INFO if is_server else logging.WARNING):
            status = anyio.run(command, *arguments, backend_options=options)
    except CommandFailure as failure:
        complain(failure)
        status = failure.exit_code
    except KeyboardInterrupt:
        status = ExitCode.INTERRUPTED
    except BrokenPipeError:
        status = ExitCode.NOBODY_READS
    except UnicodeEncodeError as error:
        # An argument or a line that is no UTF-8. It may be a key, so it is not shown.
        complain(CommandFailure(f"something given is no UTF-8 ({error.reason}); give it as UTF-8"))
        status = ExitCode.BAD_INPUT
    except OSError as error:
        message = f"this machine cannot go on: {error}; check its disks and the limits of the process"
        complain(CommandFailure(message))
        status = ExitCode.UNUSABLE
    raise typer.Exit(status)
