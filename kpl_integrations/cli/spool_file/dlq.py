"""`kpl dlq`: the commands and their options; `dead_letters` implements them and is imported when one runs."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from kpl_integrations.cli.exit_code import ExitCode
from kpl_integrations.cli.options import Commands, EndpointUrl, Json, Quiet, Region, run

if TYPE_CHECKING:
    from kpl_core.durability.spool import LetterFilter

dlq = Commands(help="List dead letters, send them again, export or delete them.")

File = Annotated[Path, typer.Argument(help="The spool file.", show_default=False)]
Reason = Annotated[str | None, typer.Option(help="Only letters with this reason.", show_default=False)]
Tier = Annotated[str | None, typer.Option(help="Only critical, normal or bulk letters.", show_default=False)]
OfStream = Annotated[str | None, typer.Option("--stream", help="Only letters of this stream.", show_default=False)]
Tenant = Annotated[str | None, typer.Option(help="Only letters of this tenant (flow).", show_default=False)]


def _filter(reason: str | None, tier: str | None, stream: str | None, tenant: str | None) -> "LetterFilter":
    from kpl_core.durability.spool import LetterFilter  # noqa: PLC0415
    from kpl_core.records.record_result import REASONS  # noqa: PLC0415
    from kpl_core.records.user_record import TIERS  # noqa: PLC0415

    if reason is not None:
        # As `kpl dlq list` prints it in a table.
        reason = reason.replace(" ", "_")
    for name, value, allowed in (("--reason", reason, REASONS), ("--tier", tier, TIERS)):
        if value is not None and value not in allowed:
            message = f"{name} is {value!r}; it must be one of {', '.join(allowed)}"
            raise typer.BadParameter(message)
    return LetterFilter(reason=cast("Any", reason), tier=cast("Any", tier), stream=stream, tenant=tenant)


@dlq.command("list")
def list_(
    file: File,
    *,
    letters: Annotated[bool, typer.Option("--letters", help="Print a line for each letter instead of counts.")] = False,
    limit: Annotated[int, typer.Option(min=1, help="With --letters: the maximum number of lines.")] = 100,
    reason: Reason = None,
    tier: Tier = None,
    stream: OfStream = None,
    tenant: Tenant = None,
    as_json: Json = False,
) -> None:
    """Count dead letters by reason, or list them, critical ones first. Works while a producer runs."""
    from kpl_integrations.cli.spool_file.dead_letters import count, list_letters  # noqa: PLC0415

    wanted = _filter(reason, tier, stream, tenant)
    if letters:
        run(list_letters, file, wanted, limit, as_json)
    else:
        run(count, file, wanted, as_json)


@dlq.command()
def show(
    file: File, letter_id: Annotated[str, typer.Argument(metavar="ID", help="Id of the letter.", show_default=False)]
) -> None:
    """Print one letter as JSON, with the service's error message and the data in base64."""
    from kpl_integrations.cli.spool_file.dead_letters import show as work  # noqa: PLC0415

    run(work, file, letter_id)


@dlq.command()
def redrive(  # noqa: PLR0913 - each parameter is an option
    file: File,
    *,
    rate: Annotated[float, typer.Option(min=0.001, help="Maximum letters per second.")] = 1_000.0,
    reason: Reason = None,
    tier: Tier = None,
    stream: OfStream = None,
    tenant: Tenant = None,
    endpoint_url: EndpointUrl = None,
    region: Region = None,
    as_json: Json = False,
    _quiet: Quiet = False,
) -> None:
    """Put dead letters again, critical ones first.

    A letter leaves the file when Kinesis has stored it. You can interrupt this command and run it again:
    no letter is lost, and at most the 500 in flight arrive twice. It needs exclusive access to the file:
    stop the producer that uses it, or let that producer redrive.
    """
    from kpl_integrations.cli.spool_file.dead_letters import redrive as work  # noqa: PLC0415

    run(work, file, _filter(reason, tier, stream, tenant), rate, region, endpoint_url, as_json)


@dlq.command()
def purge(
    file: File,
    *,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask for confirmation.")] = False,
    reason: Reason = None,
    tier: Tier = None,
    stream: OfStream = None,
    tenant: Tenant = None,
    as_json: Json = False,
    _quiet: Quiet = False,
) -> None:
    """Delete dead letters permanently; `kpl dlq export` with the same filter keeps a copy."""
    from kpl_integrations.cli.spool_file.dead_letters import purge_letters  # noqa: PLC0415

    wanted = _filter(reason, tier, stream, tenant)
    # Do not ask if the file does not exist.
    if not yes and file.is_file() and not _confirmed(f"Delete the matching letters in {file} permanently?"):
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
        message = "cannot ask for confirmation without a terminal; pass --yes to delete without confirmation"
        raise typer.BadParameter(message) from error


@dlq.command()
def export(
    file: File,
    destination: Annotated[Path, typer.Argument(help="The JSON lines file to write.", show_default=False)],
    *,
    reason: Reason = None,
    tier: Tier = None,
    stream: OfStream = None,
    tenant: Tenant = None,
    as_json: Json = False,
    _quiet: Quiet = False,
) -> None:
    """Write dead letters as JSON lines; the destination is replaced at the end or not at all."""
    from kpl_integrations.cli.spool_file.dead_letters import export as work  # noqa: PLC0415

    run(work, file, destination, _filter(reason, tier, stream, tenant), as_json)
