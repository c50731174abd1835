"""`kpl spool`: the commands and their options; `spooled_records` implements them and is imported when one runs."""

from pathlib import Path
from typing import Annotated

import typer

from kpl_integrations.cli.options import Commands, EndpointUrl, Json, Quiet, Region, run
from kpl_integrations.cli.spool_file.dlq import File

spool = Commands(help="List, count, send or export the records in the spool of a process that has ended.")

OfStream = Annotated[str | None, typer.Option("--stream", help="Only records of this stream.", show_default=False)]


@spool.command("list")
def list_(
    file: File,
    *,
    limit: Annotated[int, typer.Option(min=1, help="The maximum number of lines.")] = 100,
    stream: OfStream = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object for each record.")] = False,
) -> None:
    """List spooled records, oldest first: number, age, size, stream and partition key.

    It works while a producer runs. Then records in flight are listed too.
    """
    from kpl_integrations.cli.spool_file.spooled_records import list_records  # noqa: PLC0415

    run(list_records, file, stream, limit, as_json)


@spool.command()
def count(file: File, as_json: Json = False) -> None:
    """Count spooled records and their bytes by stream. Works while a producer runs."""
    from kpl_integrations.cli.spool_file.spooled_records import count as work  # noqa: PLC0415

    run(work, file, as_json)


@spool.command()
def drain(
    file: File,
    *,
    rate: Annotated[float, typer.Option(min=0.001, help="Maximum records per second.")] = 5_000.0,
    timeout: Annotated[
        float | None,
        typer.Option(min=0, help="Stop after this number of seconds.", show_default=False),
    ] = None,
    aggregation: Annotated[
        bool | None,
        typer.Option(
            "--aggregation/--no-aggregation",
            help="On by default. Records of a gateway's tenants need one of the two.",
            show_default=False,
        ),
    ] = None,
    endpoint_url: EndpointUrl = None,
    region: Region = None,
    as_json: Json = False,
    _quiet: Quiet = False,
) -> None:
    """Send all spooled records to Kinesis as a producer does, in order for each key.

    A record leaves the file when Kinesis has stored it. A record that Kinesis can never accept becomes a dead
    letter in the same file. You can interrupt this command and run it again: no record is lost, and at most the
    1,000 in flight arrive twice. It needs exclusive access to the file, and names the process that has it.
    """
    from kpl_integrations.cli.spool_file.spooled_records import drain as work  # noqa: PLC0415

    run(work, file, rate, timeout, aggregation, region, endpoint_url, as_json)


@spool.command()
def export(
    file: File,
    destination: Annotated[Path, typer.Argument(help="The JSON lines file to write.", show_default=False)],
    *,
    stream: OfStream = None,
    as_json: Json = False,
    _quiet: Quiet = False,
) -> None:
    """Write spooled records as JSON lines, which `kpl put STREAM FILE --format ndjson` reads. They stay in the spool.

    The destination is replaced at the end or not at all.
    """
    from kpl_integrations.cli.spool_file.spooled_records import export as work  # noqa: PLC0415

    run(work, file, destination, stream, as_json)
