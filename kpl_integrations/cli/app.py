"""The commands and their options. Each imports its work when it runs, so that `kpl --help` answers at once."""

from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Annotated

import typer

from kpl_integrations.cli.dlq.dlq import dlq
from kpl_integrations.cli.help_texts import Commands
from kpl_integrations.cli.keys.keys import keys
from kpl_integrations.cli.put.input_format import InputFormat
from kpl_integrations.cli.running import EXIT_CODES, EndpointUrl, Json, Region, needing_extra, run

__all__ = ["app"]

app = Commands(
    help="Put records into Amazon Kinesis, read them back, or try it all without an account.",
    epilog=EXIT_CODES,
    no_args_is_help=True,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.add_typer(dlq, name="dlq")
app.add_typer(keys, name="keys")

Stream = Annotated[str, typer.Argument(help="Name or ARN of the stream.", show_default=False)]
Workers = Annotated[
    int | None,
    typer.Option(min=1, max=64, help="Processes, one for each core to use.  \\[default: 1]", show_default=False),
]
DrainDelay = Annotated[
    float | None,
    typer.Option(
        min=0, help="After SIGTERM: not ready, but still serving, for so long.  \\[default: 5]", show_default=False
    ),
]


def _print_version(wanted: bool) -> None:
    if wanted:
        try:
            typer.echo(f"kpl {version('kpl-integrations')}")
        except PackageNotFoundError:
            typer.echo("kpl (from a folder, not installed)")
        raise typer.Exit


@app.callback()
def _kpl(
    show_version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Take the options that stand before a command."""


@app.command(epilog=EXIT_CODES)
def demo(
    records: Annotated[int, typer.Option(min=1, max=10_000_000, help="User records to put.")] = 200_000,
    shards: Annotated[int, typer.Option(min=1, max=500, help="Shards of the stream.")] = 4,
    seed: Annotated[int, typer.Option(help="Makes keys and data; the same seed, the same records.")] = 1,
    split: Annotated[bool, typer.Option("--split/--no-split", help="Split a shard half-way.")] = True,
    direct: Annotated[bool, typer.Option("--direct", help="Put into a producer, without the gateway.")] = False,
    as_json: Json = False,
) -> None:
    """Send records through a gateway and a local Kinesis and back, and prove that none is lost.

    Records of 20 B to 2 KiB with 10,000 partition keys are POSTed to the ingest gateway, a hundred to a
    request. It ships them to an embedded Kinesis that throttles like the real one: 1 MiB and 1,000
    Kinesis records a second for each shard. That is what limits the demo: it sends at 90 % of what the
    shards take, so 200,000 records on 4 shards last about 25 seconds.

    Half-way a shard is split. Then everything is read back with GetRecords, de-aggregated as a Kinesis
    Client Library does (which drops an aggregated record found on the wrong shard), and compared.

    Put-to-ack is the time from a request to its answer, which says that Kinesis has each of its records
    (--direct: of one record in 20, of 200,000). It includes up to 100 ms in which a record may wait for company.
    """
    from kpl_integrations.cli.demo.demo import Demo  # noqa: PLC0415

    open_gateway = None
    if not direct:
        with needing_extra("ingest"):
            from kpl_integrations.cli.demo.demo_gateway import DemoGateway  # noqa: PLC0415
        open_gateway = DemoGateway.opened
    run(Demo(count=records, shards=shards, seed=seed, split=split, open_gateway=open_gateway, as_json=as_json).run)


@app.command(epilog=EXIT_CODES)
def local(
    port: Annotated[int, typer.Option(min=0, max=65_535, help="Port to listen on; 0 takes a free one.")] = 4567,
    stream: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME[:SHARDS]", help="A stream to begin with; may be repeated.  \\[default: demo:4]"),
    ] = None,
) -> None:
    """Run a Kinesis on this machine until Ctrl-C: no account, real limits, nothing kept.

    Any AWS SDK or tool can speak to it. It prints its address, and lines to try it with.
    """
    from kpl_integrations.cli.local import serve  # noqa: PLC0415

    run(serve, port, stream or ["demo:4"])


@app.command(epilog=EXIT_CODES)
def serve(  # noqa: PLR0913 - each parameter is an option
    *,
    local: Annotated[
        bool, typer.Option("--local", help="Ship to a Kinesis inside this process, and ask nobody for credentials.")
    ] = False,
    stream: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME[:SHARDS]", help="--local: a stream to begin with.  \\[default: demo:4]"),
    ] = None,
    host: Annotated[
        str | None, typer.Option(help="Address to listen on.  \\[default: 127.0.0.1]", show_default=False)
    ] = None,
    port: Annotated[
        int | None,
        typer.Option(min=0, max=65_535, help="Port; 0 takes a free one.  \\[default: 8080]", show_default=False),
    ] = None,
    workers: Workers = None,
    tenants: Annotated[
        Path | None, typer.Option(help="TOML file of tenants and their keys; read anew when it changes.")
    ] = None,
    spool: Annotated[
        Path | None, typer.Option(help="File every record is written to before it is acknowledged; for ack=spooled.")
    ] = None,
    dead_letters: Annotated[Path | None, typer.Option(help="File for what could not be delivered.")] = None,
    tls_certificate: Annotated[Path | None, typer.Option(help="Certificate chain in PEM.")] = None,
    tls_key: Annotated[Path | None, typer.Option(help="Its private key in PEM.")] = None,
    drain_delay_seconds: DrainDelay = None,
    endpoint_url: EndpointUrl = None,
    region: Region = None,
) -> None:
    """Take records over HTTP and ship them to Kinesis: aggregated, fair between tenants, acknowledged truthfully.

    Without tenants it starts only with --local. Every setting, these and those that are no option here, is
    also read from the environment: KPL_INGEST_PORT, KPL_INGEST_MAX_BODY_BYTES ...

    SIGTERM ends it in order: not ready, no new requests, deliver what is there, keep the rest, report.

    With --workers several processes share the port: tenants' rates hold for all together, metrics and stats are
    sums, and one that dies is replaced. Each has files of its own: --spool spool.db makes spool-0.db, spool-1.db ...
    """
    with needing_extra("ingest"):
        from kpl_integrations.cli.serve.serve import Serve  # noqa: PLC0415

    given = {
        "host": host,
        "port": port,
        "workers": workers,
        "tenants": tenants,
        "spool": spool,
        "dead_letters": dead_letters,
        "tls_certificate": tls_certificate,
        "tls_key": tls_key,
        "drain_delay_seconds": drain_delay_seconds,
        "endpoint_url": endpoint_url,
        "region": region,
    }
    run(Serve(local=local, streams=stream or ["demo:4"], given=given).run, is_server=True)


@app.command(epilog=EXIT_CODES)
def put(  # noqa: PLR0913 - each parameter is an option
    stream: Stream,
    file: Annotated[Path, typer.Argument(help="File to read; - is standard input.")] = Path("-"),
    *,
    input_format: Annotated[
        InputFormat, typer.Option("--format", help="lines: each line is a record. ndjson: each line is a JSON object.")
    ] = InputFormat.LINES,
    key: Annotated[
        str | None, typer.Option(help="One partition key for all; else the number of the line.", show_default=False)
    ] = None,
    key_field: Annotated[
        str | None,
        typer.Option(help="ndjson: the field that is the partition key; the record is the line.", show_default=False),
    ] = None,
    skip: Annotated[int, typer.Option(min=0, help="Lines to skip: those an earlier run confirmed.")] = 0,
    endpoint_url: EndpointUrl = None,
    region: Region = None,
    as_json: Json = False,
) -> None:
    """Put lines of text or JSON into a stream, one record each.

    With --format ndjson and neither --key nor --key-field, a line says it all:
    {"partition_key": "42", "data": "text"} or {"partition_key": "42", "data_base64": "..."}, and an
    "explicit_hash_key" if wanted; this is what `kpl tail --json` prints.

    It stops at the first line it cannot use, and at the first record that Kinesis does not take. The
    summary says how many lines from the beginning are confirmed: go on with --skip and that number.
    Blank lines are passed over.
    """
    from kpl_integrations.cli.put.put import Put  # noqa: PLC0415
    from kpl_integrations.cli.put.record_line import reader_of  # noqa: PLC0415

    if key is not None and key_field is not None:
        message = "give --key or --key-field, not both"
        raise typer.BadParameter(message)
    if key_field is not None and input_format is not InputFormat.NDJSON:
        message = "--key-field needs --format ndjson; text lines have no fields"
        raise typer.BadParameter(message)
    read_line = reader_of(input_format, key=key, key_field=key_field)
    run(Put(stream, file, read_line, skip=skip, endpoint_url=endpoint_url, region=region, as_json=as_json).run)


@app.command(epilog=EXIT_CODES)
def tail(
    stream: Stream,
    *,
    from_start: Annotated[bool, typer.Option("--from-start", help="Begin with the oldest record kept.")] = False,
    follow: Annotated[bool, typer.Option("--follow/--no-follow", help="Wait for more at the end.")] = True,
    limit: Annotated[
        int | None, typer.Option(min=1, help="Stop after so many user records.", show_default=False)
    ] = None,
    endpoint_url: EndpointUrl = None,
    region: Region = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object for each record.")] = False,
) -> None:
    """Show the user records of a stream as they arrive, from all shards, aggregated or not.

    Shards that are split or merged are followed into their children. Ctrl-C ends it, with status 0.
    An aggregated record found on the wrong shard is dropped, as the Kinesis Client Library drops it,
    and counted on stderr.
    """
    from kpl_integrations.cli.tail.tail import Tail  # noqa: PLC0415

    run(
        Tail(
            stream,
            endpoint_url=endpoint_url,
            region=region,
            from_start=from_start,
            follow=follow,
            limit=limit,
            as_json=as_json,
        ).run
    )


@app.command(epilog=EXIT_CODES)
def top(
    url: Annotated[str, typer.Argument(help="Address of the gateway.")] = "http://127.0.0.1:8080",
    *,
    interval: Annotated[float, typer.Option(min=0.05, help="Seconds between two looks.")] = 1.0,
    count: Annotated[
        int | None,
        typer.Option(min=1, help="Look so often.  \\[default: until Ctrl-C; in a pipe once]", show_default=False),
    ] = None,
    key: Annotated[
        str | None,
        typer.Option(
            envvar="KPL_GATEWAY_KEY", hidden=True, help="Better in the environment: others can read a command line."
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object for each look.")] = False,
) -> None:
    """Watch a gateway: what it takes and delivers, its buffer, its streams, and which tenants wait.

    Rates are those since the look before. A gateway with tenants wants its admin key in KPL_GATEWAY_KEY; with
    a tenant's own key it shows that tenant. Ctrl-C ends it, with status 0.
    """
    from kpl_integrations.cli.top.top import Top  # noqa: PLC0415

    run(Top(url, key=key or None, interval=interval, count=count, as_json=as_json).run)


@app.command(epilog=EXIT_CODES)
def doctor(stream: Stream, *, endpoint_url: EndpointUrl = None, region: Region = None, as_json: Json = False) -> None:
    """Check what a producer needs to put into a stream, and say what to mend.

    Configuration, credentials, connection, the stream and its shards, permissions to look at them, this
    machine's clock and its limit of open files. Nothing is written. Status 3 if something is in the way.
    """
    from kpl_integrations.cli.doctor.doctor import Doctor  # noqa: PLC0415

    run(Doctor(stream, endpoint_url=endpoint_url, region=region, as_json=as_json).run)


@app.command(epilog=EXIT_CODES)
def coordinate(
    store: Annotated[
        str,
        typer.Argument(
            help="Where the producers meet: file:///folder, s3://bucket/prefix/, dynamodb://table/group, redis://host.",
            show_default=False,
        ),
    ],
    *,
    policy: Annotated[str, typer.Option(help="leases or proportional, as the producers have it.")] = "leases",
    interval: Annotated[float, typer.Option(help="Seconds, as the producers have it.")] = 5.0,
    staleness: Annotated[
        float,
        typer.Option(help="proportional: seconds after which a worker does not count."),
    ] = 15.0,
    max_workers: Annotated[int, typer.Option(help="The least to plan for; producers report their own.")] = 1,
    once: Annotated[bool, typer.Option("--once", help="Compute one summary and stop.")] = False,
    as_json: Json = False,
) -> None:
    """Compute how a fleet of producers divides the limits of its shards, until Ctrl-C.

    Producers with Config(coordination=...) do this by themselves, in turn. A process of its own spares
    them reading each other's reports: for hundreds of them, or where they may not. When it stops, they
    go on by themselves.
    """
    from kpl_integrations.cli.coordinate import Coordinate  # noqa: PLC0415

    run(
        Coordinate(
            store,
            policy=policy,
            interval_seconds=interval,
            staleness_seconds=staleness,
            max_workers=max_workers,
            once=once,
            as_json=as_json,
        ).run
    )
