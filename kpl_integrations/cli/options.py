"""Common to all commands: options, help texts, and running a command to its exit status."""

import contextlib
import logging
import os
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from enum import StrEnum
from importlib.util import find_spec
from typing import Annotated, Any, Final

import anyio
import typer
from typer.core import TyperCommand, TyperGroup, TyperOption

from kpl_integrations.cli.exit_code import CommandFailure, ExitCode
from kpl_integrations.cli.terminal import (
    PLAIN,
    LogFormat,
    print_exceptions_as,
    print_failure,
    show_logs,
)

EXIT_CODES: Final = (
    "Exit status: 0 done, 1 not every record arrived, 2 wrong usage, 3 Kinesis cannot be used, 4 bad input, "
    "130 or 143 interrupted."
)

Json = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of a table.")]


class ProgressWanted:
    """What the options of this process's command ask for, wherever it matters."""

    is_quiet = False


def _be_quiet(is_quiet: bool) -> None:
    ProgressWanted.is_quiet = is_quiet


# A command need not pass it on.
Quiet = Annotated[
    bool, typer.Option("--quiet", help="Show no progress.", callback=_be_quiet, expose_value=False, is_eager=True)
]
Region = Annotated[
    str | None, typer.Option(help="AWS region; the default is that of any AWS client.", show_default=False)
]
_ENDPOINT_VARIABLES: Final = ("AWS_ENDPOINT_URL_KINESIS", "AWS_ENDPOINT_URL")
EndpointUrl = Annotated[
    str | None,
    typer.Option(
        envvar=list(_ENDPOINT_VARIABLES),
        help="URL of Kinesis, such as http://127.0.0.1:4567 for `kpl local`.",
        show_default=False,
    ),
]


def endpoint_of_environment() -> str | None:
    """Return the URL of Kinesis that the environment names, as for `EndpointUrl`."""
    return next((url for name in _ENDPOINT_VARIABLES if (url := os.environ.get(name))), None)


def assignments(texts: Sequence[str]) -> dict[str, str]:
    """Return the names and values of `--set NAME=VALUE`.

    Raises:
        typer.BadParameter: a text has no "=", or a name is repeated.
    """
    found: dict[str, str] = {}
    for text in texts:
        name, separator, value = text.partition("=")
        if not separator or name in found:
            # The value may be a secret.
            message = f"--set {name}: write each name once, as NAME=VALUE"
            raise typer.BadParameter(message)
        found[name] = value
    return found


class InputFormat(StrEnum):
    """The format of a line in the input of `kpl put`."""

    LINES = "lines"
    NDJSON = "ndjson"


class _WithoutFlagTypes:
    """Shows a flag in the help as `--json`, where typer would write `--json <bool>`."""

    def get_params(self, ctx: Any) -> list[Any]:  # noqa: ANN401 - click is inside typer
        parameters: list[Any] = super().get_params(ctx)  # type: ignore[misc] # a method of the other base class
        for parameter in parameters:
            if isinstance(parameter, TyperOption) and parameter.is_flag:
                parameter.metavar = ""
        return parameters


class _Command(_WithoutFlagTypes, TyperCommand):
    pass


class _Group(_WithoutFlagTypes, TyperGroup):
    pass


class Commands(typer.Typer):
    """A group of commands."""

    def __init__(self, **options: Any) -> None:  # noqa: ANN401 - typer's own
        super().__init__(cls=_Group, no_args_is_help=True, rich_markup_mode="markdown", **options)

    def command(self, name: str | None = None, **options: Any) -> Callable[[Any], Any]:  # noqa: ANN401 - typer's own
        """Return the decorator that turns a function into a command."""
        return super().command(name, cls=_Command, epilog=EXIT_CODES, **options)


@contextmanager
def requires_extra(extra: str) -> Iterator[None]:
    """Turn a failed import inside the block into one sentence that names the extra to install."""
    try:
        yield
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package.startswith("kpl_"):
            raise
        print_failure(CommandFailure(f"{package} is not installed; pip install 'kpl-integrations[cli,{extra}]'"))
        raise typer.Exit(ExitCode.UNUSABLE) from error


def run(
    command: Callable[..., Coroutine[Any, Any, ExitCode]],
    *arguments: object,
    log_format: Callable[[], LogFormat] | None = None,
) -> None:
    """Run a command to its exit status and print a failure as one sentence.

    A server has a `log_format`, which its settings may change while it starts. It uses uvloop if that is installed, and
    shows its logs itself.
    """
    is_server = log_format is not None
    # What these log with a traceback is in the sentence of the failure.
    for name in ("aiobotocore", "botocore"):
        logging.getLogger(name).addHandler(logging.NullHandler())
    shown = log_format or (lambda: PLAIN)
    print_exceptions_as(shown())
    try:
        options = {"use_uvloop": is_server and find_spec("uvloop") is not None}
        with contextlib.nullcontext() if is_server else show_logs("kpl_core", logging.WARNING):
            status = anyio.run(command, *arguments, backend_options=options)
    except CommandFailure as failure:
        shown().failure(failure)
        status = failure.exit_code
    except KeyboardInterrupt:
        status = ExitCode.INTERRUPTED
    except BrokenPipeError:
        status = ExitCode.OUTPUT_CLOSED
    except UnicodeEncodeError as error:
        # The argument or line may be a secret key, so it is not shown.
        shown().failure(CommandFailure(f"an argument or a line is not UTF-8 ({error.reason}); encode it as UTF-8"))
        status = ExitCode.BAD_INPUT
    except OSError as error:
        message = f"the system reports: {error}; check the disks and the limits of the process"
        shown().failure(CommandFailure(message))
        status = ExitCode.UNUSABLE
    raise typer.Exit(status)
