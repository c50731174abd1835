"""`python -m kpl_integrations.local_kinesis`: run a Kinesis on loopback until SIGINT or SIGTERM.

Prints one line that ends with the URL when it listens.
"""

import argparse
import asyncio
import signal
import sys
from collections.abc import Sequence

from kpl_core.testing import ServiceLimits
from kpl_integrations.local_kinesis.server import LocalKinesis, parse_stream


def _stream(text: str) -> tuple[str, int]:
    try:
        return parse_stream(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m kpl_integrations.local_kinesis", description=__doc__)
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (default: %(default)s)")
    parser.add_argument("--port", type=int, default=0, help="port to listen on (default: a free one)")
    parser.add_argument(
        "--stream",
        type=_stream,
        action="append",
        default=[],
        metavar="NAME[:SHARDS]",
        help="an initial stream; may be repeated (default: demo:4)",
    )
    parser.add_argument("--no-limits", action="store_true", help="do not throttle shards")
    parser.add_argument(
        "--retention",
        type=float,
        default=ServiceLimits().retention_seconds,
        metavar="SECONDS",
        help="retention of records (default: %(default)s)",
    )
    parser.add_argument(
        "--allow-host",
        action="append",
        default=[],
        metavar="NAME",
        help="a Host name to answer to besides loopback names and addresses; may be repeated",
    )
    return parser


async def _serve(server: LocalKinesis) -> None:
    loop = asyncio.get_running_loop()
    stop = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)
    async with server:
        print(f"Local Kinesis listens on {server.endpoint_url}", flush=True)  # noqa: T201 - the caller reads the URL here
        await stop.wait()


def main(arguments: Sequence[str] | None = None) -> int:
    """Serve until a signal; return the exit status."""
    options = _parser().parse_args(arguments)
    server = LocalKinesis(
        dict(options.stream or [("demo", 4)]),
        host=options.host,
        port=options.port,
        enforce_limits=not options.no_limits,
        allow_hosts=options.allow_host,
        limits=ServiceLimits(retention_seconds=options.retention),
    )
    asyncio.run(_serve(server))
    return 0


if __name__ == "__main__":
    sys.exit(main())
