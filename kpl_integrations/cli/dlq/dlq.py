"""`kpl dlq`: the commands and their options. The work is imported when one runs."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from kpl_integrations.cli.exit_code import ExitCode
from kpl_integrations.cli.help_texts import Commands
from kpl_integrations.cli.running import EXIT_CODES, EndpointUrl, Json, Region, run

if TYPE_CHECKING:
    from kpl_core.durability.spool import LetterFilter

__all__ = ["dlq"]

dlq = Commands(
    help="Look at dead letters, send them again, export or delete them.",
    no_args_is_help=True,
    rich_markup_mode="markdown",
)

File = Annotated[Path, typer.Argument(help="The spool's file.", show_default=False)]
Reason = Annotated[str | None, typer.Option(help="Only those with this reason.", show_default=False)]
Tier = Annotated[str | None, typer.Option(help="Only critical, normal or bulk ones.", show_default=False)]
OfStream = Annotated[str | None, typer.Option("--stream", help="Only those of this stream.", show_default=False)]
Tenant = Annotated[str | None, typer.Option(help="Only those of this tenant (flow).", show_default=False)]


def _filter(reason: str | None, tier: str | None, stream: str | None, tenant: str | None) -> "LetterFilter":
    from kpl_core.durability.spool import REASONS, LetterFilter  # noqa: PLC0415
    from kpl_core.records.user_record import TIERS  # noqa: PLC0415

    if reason is not None:
        # As `kpl dlq list` prints it for people.
        reason = reason.replace(" ", "_")
    for name, value, allowed in (("--reason", reason, REASONS), ("--tier", tier, TIERS)):
        if value is not None and value not in allowed:
            message = f"{name} is {value!r}; it must be one of {', '.join(allowed)}"
            raise typer.BadParameter(message)
    return LetterFilter(reason=cast("Any", reason), tier=cast("Any", tier), stream=stream, tenant=tenant)


@dlq.command("list", epilog=EXIT_CODES)
def list_(
    file: File,
    *,
    letters: Annotated[bool, typer.Option("--letters", help="A line for each letter, not only counts.")] = False,
    limit: Annotated[int, typer.Option(min=1, help="With --letters: so many at most.")] = 100,
    reason: Reason = None,
    tier: Tier = None,
    stream: OfStream = None,
    tenant: Tenant = None,
    as_json: Json = False,
) -> None:
    """Count dead letters by reason, or list them, critical first. Works beside a running producer."""
    from kpl_integrations.cli.dlq.dead_letters import count, list_letters  # noqa: PLC0415

    wanted = _filter(reason, tier, stream, tenant)
    if letters:
        run(list_letters, file, wanted, limit, as_json)
    else:
        run(count, file, wanted, as_json)


@dlq.command(epilog=EXIT_CODES)
def show(
    file: File, letter_id: Annotated[str, typer.Argument(metavar="ID", help="The letter.", show_default=False)]
) -> None:
    """Print one letter as JSON, with the service's own message; its data is base64."""
    from kpl_integrations.cli.dlq.dead_letters import show as work  # noqa: PLC0415

    run(work, file, letter_id)


@dlq.command(epilog=EXIT_CODES)
def redrive(  # noqa: PLR0913 - each parameter is an option
    file: File,
    *,
    rate: Annotated[float, typer.Option(min=0.001, help="Letters a second, at most.")] = 1_000.0,
    reason: Reason = None,
    tier: Tier = None,
    stream: OfStream = None,
    tenant: Tenant = None,
    endpoint_url: EndpointUrl = None,
    region: Region = None,
    as_json: Json = False,
) -> None:
    """Put dead letters again, critical first.

    A letter leaves the file when Kinesis has it. Interrupt it as you like and run it again: nothing is
    lost, and at most the 500 that were on their way arrive twice. It needs the file for itself: stop the
    producer that has it, or let that one redrive by itself.
    """
    from kpl_integrations.cli.dlq.dead_letters import redrive as work  # noqa: PLC0415

    run(work, file, _filter(reason, tier, stream, tenant), rate, region, endpoint_url, as_json)


@dlq.command(epilog=EXIT_CODES)
def purge(
    file: File,
    *,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
    reason: Reason = None,
    tier: Tier = None,
    stream: OfStream = None,
    tenant: Tenant = None,
    as_json: Json = False,
) -> None:
    """Delete dead letters for good; `kpl dlq export` with the same filter keeps a copy."""
    from kpl_integrations.cli.dlq.dead_letters import purge_letters  # noqa: PLC0415

    wanted = _filter(reason, tier, stream, tenant)
    # Nobody is asked about a file that is not there.
    if not yes and file.is_file() and not _confirmed(f"Delete the letters in {file} that match, for good?"):
        raise typer.Abort
    run(purge_letters, file, wanted, as_json)


def _confirmed(question: str) -> bool:
    try:
        return typer.confirm(question, err=True)
    except typer.Abort as error:
        if isinstance(error.__context__, KeyboardInterrupt):
            raise typer.Exit(ExitCode.INTERRUPTED) from error
        if sys.stdin is not None and sys.stdin.isatty():
            raise
        typer.echo(err=True)
        message = "nobody is there to answer; pass --yes to delete without being asked"
        raise typer.BadParameter(message) from error


@dlq.command(epilog=EXIT_CODES)
def export(
    file: File,
    destination: Annotated[Path, typer.Argument(help="The file of JSON lines to write.", show_default=False)],
    *,
    reason: Reason = None,
    tier: Tier = None,
    stream: OfStream = None,
    tenant: Tenant = None,
    as_json: Json = False,
) -> None:
    """Write dead letters as JSON lines; the file appears complete or not at all."""
    from kpl_integrations.cli.dlq.dead_letters import export as work  # noqa: PLC0415

    run(work, file, destination, _filter(reason, tier, stream, tenant), as_json)
