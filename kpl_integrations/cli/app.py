"""The commands and their options. Each imports its implementation when it runs, so that `kpl --help` is fast."""

from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Annotated

import typer

from kpl_integrations.cli.exit_code import ExitCode
from kpl_integrations.cli.options import (
    EXIT_CODES,
    Commands,
    EndpointUrl,
    InputFormat,
    Json,
    Quiet,
    Region,
    assignments,
    requires_extra,
    run,
)
from kpl_integrations.cli.spool_file.dlq import dlq
from kpl_integrations.cli.spool_file.spool import spool as spool_commands

app = Commands(
    help="Put records into Amazon Kinesis, read them back, or try it all without an account.",
    epilog=EXIT_CODES,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
keys = Commands(help="Create and check the credentials of the ingest gateway's tenants.")
app.add_typer(dlq, name="dlq")
app.add_typer(spool_commands, name="spool")
app.add_typer(keys, name="keys")

Stream = Annotated[str, typer.Argument(help="Name or ARN of the stream.", show_default=False)]
Workers = Annotated[
    int | None,
    typer.Option(help="Processes; use one per core.  \\[default: 1]", show_default=False),
]
AllowedHosts = Annotated[
    list[str] | None,
    typer.Option(metavar="NAME", help="A Host name to answer to besides loopback names; may be repeated."),
]
# Without its environment variables, which --local ignores.
ServedEndpoint = Annotated[
    str | None,
    typer.Option(
        help="URL of Kinesis.  \\[default: AWS_ENDPOINT_URL_KINESIS, but with --local a Kinesis inside this process]",
        show_default=False,
    ),
]
DrainDelay = Annotated[
    float | None,
    typer.Option(
        help="Seconds after SIGTERM of serving while not ready.  \\[default: 5]",
        show_default=False,
    ),
]


# The options of `kpl serve`.
Local = Annotated[
    bool, typer.Option("--local", help="Use a Kinesis inside this process. Without --tenants, check no credentials.")
]
LocalStreams = Annotated[
    list[str] | None,
    typer.Option(metavar="NAME[:SHARDS]", help="--local: an initial stream.  \\[default: demo:4]"),
]
Certificate = Annotated[Path | None, typer.Option(help="Certificate chain in PEM.")]
CertificateKey = Annotated[Path | None, typer.Option(help="Its private key in PEM.")]
Host = Annotated[str | None, typer.Option(help="Address to listen on.  \\[default: 127.0.0.1]", show_default=False)]
Port = Annotated[int | None, typer.Option(help="Port; 0 selects a free one.  \\[default: 8080]", show_default=False)]
TenantsFile = Annotated[
    Path | None, typer.Option(help="TOML file of tenants and their keys; reloaded when it changes.")
]
SpoolFile = Annotated[
    Path | None, typer.Option(help="File for every record before it is acknowledged; for ack=spooled.")
]
LettersFile = Annotated[Path | None, typer.Option(help="File for records that could not be delivered.")]
SettingsFile = Annotated[Path | None, typer.Option(help="TOML file of settings, with the names of `--print-config`.")]
Assignments = Annotated[
    list[str] | None, typer.Option("--set", metavar="NAME=VALUE", help="Any other setting; may be repeated.")
]
PrintConfig = Annotated[
    bool, typer.Option("--print-config", help="Print every setting and where it comes from, and stop.")
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
    """Handle the options before a command."""


@app.command()
def demo(
    records: Annotated[int, typer.Option(min=1, max=10_000_000, help="User records to put.")] = 200_000,
    shards: Annotated[int, typer.Option(min=1, max=500, help="Shards of the stream at the start.")] = 4,
    seed: Annotated[int, typer.Option(help="Seed of the generated keys and data.")] = 1,
    split: Annotated[bool, typer.Option("--split/--no-split", help="Split a shard in the middle.")] = True,
    direct: Annotated[bool, typer.Option("--direct", help="Put into a producer, without the gateway.")] = False,
    as_json: Json = False,
    _quiet: Quiet = False,
) -> None:
    """Send records through a gateway and a local Kinesis and back, and verify that none is lost.

    The demo POSTs records of 20 B to 2 KiB with 10,000 partition keys to the ingest gateway, 100 per request.
    The gateway sends them to a local Kinesis that throttles like the real one: 1 MiB and 1,000 Kinesis records
    a second per shard. The demo uses 90 % of that capacity, so 200,000 records on 4 shards take about 25 seconds.

    In the middle a shard is split. At the end all records are read back with GetRecords, de-aggregated like the
    Kinesis Client Library does (it drops an aggregated record found on the wrong shard), and compared.

    Put-to-ack is the time from a request to its answer, which confirms that Kinesis has stored the records
    (with --direct: of one record in 20, if there are 200,000). It includes up to 100 ms of aggregation delay.
    """
    from kpl_integrations.cli.demo import DemoCommand, open_direct_load  # noqa: PLC0415

    open_load = open_direct_load
    if not direct:
        with requires_extra("ingest"):
            from kpl_integrations.cli.demo_gateway import open_gateway_load as open_load  # noqa: PLC0415
    run(DemoCommand(count=records, shards=shards, seed=seed, split=split, open_load=open_load, as_json=as_json).run)


@app.command()
def local(
    port: Annotated[int, typer.Option(min=0, max=65_535, help="Port to listen on; 0 selects a free one.")] = 4567,
    stream: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME[:SHARDS]", help="An initial stream; may be repeated.  \\[default: demo:4]"),
    ] = None,
    allow_host: AllowedHosts = None,
) -> None:
    """Run a Kinesis on this machine until Ctrl-C: no account, the real limits, data in memory only.

    Any AWS SDK or tool can use it over HTTP/1.1. It prints its URL and example commands.
    """
    from kpl_integrations.cli.local import serve  # noqa: PLC0415

    run(serve, port, stream or ["demo:4"], allow_host or ())


@app.command()
def serve(  # noqa: PLR0913 - each parameter is an option
    *,
    local: Local = False,
    stream: LocalStreams = None,
    host: Host = None,
    port: Port = None,
    allow_host: AllowedHosts = None,
    workers: Workers = None,
    tenants: TenantsFile = None,
    spool: SpoolFile = None,
    dead_letters: LettersFile = None,
    tls_certificate: Certificate = None,
    tls_key: CertificateKey = None,
    drain_delay_seconds: DrainDelay = None,
    endpoint_url: ServedEndpoint = None,
    region: Region = None,
    config: SettingsFile = None,
    assign: Assignments = None,
    print_config: PrintConfig = False,
) -> None:
    """Accept records over HTTP and send them to Kinesis: aggregated, fair between tenants, acknowledged.

    Without tenants it starts only with --local. A setting comes from its option or --set, else from the environment
    (KPL_INGEST_PORT, KPL_INGEST_SPOOL_MAX_BYTES ...), else from the file of --config, else it has its default.

    SIGTERM stops it gracefully: it becomes not ready, rejects new requests, delivers the buffered records,
    keeps the rest on disk, and reports.

    With --workers several processes share the port. Tenants' rates apply to all together, metrics and stats are
    sums, and a dead process is replaced. Each has its own files: --spool spool.db makes spool-0.db, spool-1.db ...
    """
    with requires_extra("ingest"):
        from kpl_integrations.cli.serve.serve import Serve  # noqa: PLC0415
        from kpl_integrations.cli.serve.worker import Given  # noqa: PLC0415

    options = {
        "host": host,
        "port": port,
        "allowed_hosts": ",".join(allow_host or ()) or None,
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
    given = Given(
        options=options,
        assigned=assignments(assign or ()),
        file=None if config is None else str(config),
        local=local,
    )
    serving = Serve(streams=stream or ["demo:4"], given=given)
    run(serving.print_config if print_config else serving.run, log_format=lambda: serving.log_format)


@app.command()
def put(  # noqa: PLR0913 - each parameter is an option
    stream: Stream,
    file: Annotated[Path, typer.Argument(help="File to read; - is standard input.")] = Path("-"),
    *,
    input_format: Annotated[
        InputFormat, typer.Option("--format", help="lines: each line is a record. ndjson: each line is a JSON object.")
    ] = InputFormat.LINES,
    key: Annotated[
        str | None,
        typer.Option(help="Partition key of all records; default: the line number.", show_default=False),
    ] = None,
    key_field: Annotated[
        str | None,
        typer.Option(help="ndjson: the field with the partition key; the record is the line.", show_default=False),
    ] = None,
    skip: Annotated[int, typer.Option(min=0, help="Lines to skip, which an earlier run confirmed.")] = 0,
    endpoint_url: EndpointUrl = None,
    region: Region = None,
    as_json: Json = False,
    _quiet: Quiet = False,
) -> None:
    """Put lines of text or JSON into a stream, one record each.

    With --format ndjson and neither --key nor --key-field, a line contains the whole record:
    {"partition_key": "42", "data": "text"} or {"partition_key": "42", "data_base64": "..."}, and optionally
    an "explicit_hash_key"; `kpl tail --json` prints this format.

    It stops at the first invalid line, and at the first record that Kinesis does not accept. The summary
    shows how many lines from the beginning are confirmed: continue with --skip and that number. Blank lines
    are skipped.
    """
    from kpl_integrations.cli.put import PutCommand  # noqa: PLC0415
    from kpl_integrations.cli.put_input import reader_of  # noqa: PLC0415

    if key is not None and key_field is not None:
        message = "give --key or --key-field, not both"
        raise typer.BadParameter(message)
    if key_field is not None and input_format is not InputFormat.NDJSON:
        message = "--key-field needs --format ndjson; text lines have no fields"
        raise typer.BadParameter(message)
    read_line = reader_of(input_format, key=key, key_field=key_field)
    command = PutCommand(stream, file, read_line, skip=skip, endpoint_url=endpoint_url, region=region, as_json=as_json)
    run(command.run)


@app.command()
def tail(
    stream: Stream,
    *,
    from_start: Annotated[bool, typer.Option("--from-start", help="Begin with the oldest stored record.")] = False,
    after: Annotated[
        Path | None,
        typer.Option(help="Begin behind the records in this file, which `kpl tail --json` wrote.", show_default=False),
    ] = None,
    follow: Annotated[bool, typer.Option("--follow/--no-follow", help="Wait for more records at the end.")] = True,
    limit: Annotated[
        int | None, typer.Option(min=1, help="Stop after this number of user records.", show_default=False)
    ] = None,
    endpoint_url: EndpointUrl = None,
    region: Region = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object for each record.")] = False,
    _quiet: Quiet = False,
) -> None:
    """Show the user records of a stream as they arrive, from all shards, aggregated or not.

    It follows split and merged shards to their children. Ctrl-C stops it with status 0. An aggregated record
    found on the wrong shard is dropped, as the Kinesis Client Library drops it, and counted on stderr.
    """
    from kpl_integrations.cli.tail import TailCommand  # noqa: PLC0415

    command = TailCommand(
        stream,
        endpoint_url=endpoint_url,
        region=region,
        from_start=from_start,
        after=after,
        follow=follow,
        limit=limit,
        as_json=as_json,
    )
    run(command.run)


@app.command()
def top(
    url: Annotated[str, typer.Argument(help="URL of the gateway.")] = "http://127.0.0.1:8080",
    *,
    interval: Annotated[float, typer.Option(min=0.05, help="Seconds between two updates.")] = 1.0,
    count: Annotated[
        int | None,
        typer.Option(min=1, help="Number of updates.  \\[default: until Ctrl-C; in a pipe 1]", show_default=False),
    ] = None,
    key: Annotated[
        str | None,
        typer.Option(
            envvar="KPL_GATEWAY_KEY",
            hidden=True,
            help="Prefer the environment: others can read a command line.",
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object for each update.")] = False,
) -> None:
    """Watch a gateway: accepted and delivered records, buffer, streams, and the tenants that wait.

    Rates are per second since the last update. A gateway with tenants requires its admin key in KPL_GATEWAY_KEY;
    with a tenant's own key it shows that tenant. Ctrl-C stops it with status 0.
    """
    from kpl_integrations.cli.top import Top  # noqa: PLC0415

    run(Top(url, key=key or None, interval=interval, count=count, as_json=as_json).run)


@app.command()
def doctor(
    stream: Stream,
    *,
    config: Annotated[Path | None, typer.Option(help="TOML file of a gateway's settings, as for `kpl serve`.")] = None,
    put: Annotated[
        bool,
        typer.Option("--put", help="Write a record, and a dead letter to a queue or bucket."),
    ] = False,
    endpoint_url: EndpointUrl = None,
    region: Region = None,
    as_json: Json = False,
) -> None:
    """Check what a producer or a gateway needs to put into a stream, and say what to fix.

    It reads the same configuration as a gateway, from --config and KPL_INGEST_ variables, or else as a producer, from
    KPL_ variables. It checks credentials, connection, the stream and its shards, permissions, this machine's clock and
    its limit of open files; the disks of the spool and the dead letters, the coordination store, the tenants file and
    the certificate; and it says which transport is used and why. It writes nothing without --put. The status is 3 if a
    check fails.
    """
    from kpl_integrations.cli.doctor import DoctorCommand  # noqa: PLC0415

    command = DoctorCommand(
        stream, endpoint_url=endpoint_url, region=region, as_json=as_json, config_file=config, puts=put
    )
    run(command.run)


@app.command()
def coordinate(
    store: Annotated[
        str,
        typer.Argument(
            help="Shared store: file:///folder, s3://bucket/prefix/, dynamodb://table/group, redis://host.",
            show_default=False,
        ),
    ],
    *,
    interval: Annotated[float, typer.Option(help="Seconds, as configured in the producers.")] = 5.0,
    max_workers: Annotated[int, typer.Option(help="Minimum workers to plan for; producers report theirs.")] = 1,
    once: Annotated[bool, typer.Option("--once", help="Compute one summary and stop.")] = False,
    as_json: Json = False,
) -> None:
    """Compute how a fleet of producers divides the limits of its shards, until Ctrl-C.

    Producers with Config(coordination=...) compute this in turn. A separate process saves them reading each
    other's reports: use it for hundreds of producers, or if they may not read them. When it stops, the producers
    compute again.
    """
    from kpl_integrations.cli.coordinate import CoordinateCommand  # noqa: PLC0415

    command = CoordinateCommand(
        store,
        interval_seconds=interval,
        max_workers=max_workers,
        once=once,
        as_json=as_json,
    )
    run(command.run)


@keys.command()
def new(as_json: Json = False) -> None:
    """Create an API key of 256 random bits. It is printed once and not stored.

    The second line belongs into the tenants file: it is the key's SHA-256, from which the key cannot be computed.
    """
    run(_run_keys_command, "new_key", as_json)


@keys.command("hash")
def hash_(as_json: Json = False) -> None:
    """Read an API key from standard input and print its line for the tenants file."""
    run(_run_keys_command, "hash_key", as_json)


@keys.command()
def sigv4(
    secret_file: Annotated[
        Path, typer.Argument(help="File to write the secret to; it must not exist yet.", show_default=False)
    ],
    as_json: Json = False,
) -> None:
    """Create a key pair for clients that use AWS' own protocol: an access key id and a secret.

    The secret is written to a new file of mode 0600, because the gateway needs it to verify signatures; the
    tenants file names that file.
    """
    run(_run_keys_command, "new_key_pair", secret_file, as_json)


@keys.command()
def check(
    file: Annotated[Path, typer.Argument(help="The tenants file.", show_default=False)], as_json: Json = False
) -> None:
    """Read a tenants file like the gateway, including its secret files, and report the first problem."""
    run(_run_keys_command, "check_tenants", file, as_json)


async def _run_keys_command(name: str, *arguments: object) -> ExitCode:
    """Run a function of `tenant_keys`, which needs the gateway's extra."""
    with requires_extra("ingest"):
        from kpl_integrations.cli import tenant_keys  # noqa: PLC0415 - its extra may be missing
    status: ExitCode = await getattr(tenant_keys, name)(*arguments)
    return status
