"""`kpl local`: a Kinesis on this machine, and the lines to try it with. `demo` and `serve` start theirs here too."""

import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Final

import anyio

from kpl_core.testing import KinesisError
from kpl_integrations.cli.exit_code import CommandFailure, ExitCode, until_signal
from kpl_integrations.cli.terminal import note
from kpl_integrations.local_kinesis import LocalKinesis
from kpl_integrations.local_kinesis.server import parse_stream

_INTRODUCTION: Final = """\
Local Kinesis listens on {url}
  {streams}
  Limits as in AWS; credentials are not checked; Ctrl-C stops it and discards all data.

In another terminal:
  export AWS_ENDPOINT_URL_KINESIS={url} AWS_DEFAULT_REGION=us-east-1 \\
         AWS_ACCESS_KEY_ID=local AWS_SECRET_ACCESS_KEY=local

  seq 1000 | kpl put {stream}
  kpl tail {stream} --from-start

  aws kinesis list-streams --endpoint-url {url}
  printf hello | aws kinesis put-record --endpoint-url {url} --stream-name {stream} \\
         --partition-key 42 --data fileb:///dev/stdin

In Python:
  import asyncio
  from kpl_core import Config, Producer

  async def main():
      config = Config(
          region="us-east-1", endpoint_url="{url}", aws_access_key_id="local", aws_secret_access_key="local"
      )
      async with Producer(config) as producer:
          delivery = await producer.put("{stream}", partition_key="42", data=b"hello")
          print(await delivery)

  asyncio.run(main())
"""


async def serve(port: int, wanted: Sequence[str], allow_hosts: Sequence[str] = ()) -> ExitCode:
    """Serve until SIGINT or SIGTERM, which is its normal end: status 0."""
    streams = streams_of(wanted)

    async def listening() -> None:
        async with local_kinesis(streams, port=port, allow_hosts=allow_hosts) as server:
            url = server.endpoint_url
            described = ", ".join(
                f"stream {name} ({count} {'shard' if count == 1 else 'shards'})" for name, count in streams.items()
            )
            sys.stdout.write(_INTRODUCTION.format(url=url, streams=described, stream=next(iter(streams))))
            sys.stdout.flush()
            await anyio.sleep_forever()

    await until_signal(listening)
    note("stopped")
    return ExitCode.DONE


@asynccontextmanager
async def local_kinesis(
    streams: Mapping[str, int], *, port: int = 0, allow_hosts: Sequence[str] = ()
) -> AsyncIterator[LocalKinesis]:
    """Run a Kinesis on loopback.

    Raises:
        CommandFailure: the port is in use, or a stream cannot be created.
    """
    async with AsyncExitStack() as stack:
        try:
            server = await stack.enter_async_context(LocalKinesis(streams, port=port, allow_hosts=allow_hosts))
        except OSError as error:
            raise port_failure(error, "127.0.0.1", port) from error
        except KinesisError as error:
            message = f"a stream cannot be created: {error.message}; name it like orders:4"
            raise CommandFailure(message) from error
        yield server


def streams_of(texts: Sequence[str]) -> dict[str, int]:
    """Return the shards of each stream from arguments NAME or NAME:SHARDS.

    Raises:
        CommandFailure: an argument is neither.
    """
    try:
        return dict(map(parse_stream, texts))
    except ValueError as error:
        message = f"--stream {error}"
        raise CommandFailure(message, exit_code=ExitCode.WRONG_USAGE) from error


def port_failure(error: OSError, host: str, port: int) -> CommandFailure:
    """Return the failure of a command that cannot listen on a port."""
    return CommandFailure(
        f"port {port} of {host} cannot be used ({error.strerror}); choose another with --port, or 0 for a free one"
    )
