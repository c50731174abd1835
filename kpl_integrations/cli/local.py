"""`kpl local`: the embedded Kinesis alone, and the lines to try it with."""

import sys
from collections.abc import Sequence
from typing import Final

import anyio

from kpl_integrations.cli.exit_code import ExitCode
from kpl_integrations.cli.failure import CommandFailure
from kpl_integrations.cli.local_server import local_kinesis
from kpl_integrations.cli.signals import until_signal
from kpl_integrations.cli.terminal import note

__all__ = ["serve"]

_INTRODUCTION: Final = """\
Local Kinesis listens on {url}
  {streams}
  Limits as in AWS; credentials are not checked; nothing is kept when it stops (Ctrl-C).

In another terminal:
  export AWS_ENDPOINT_URL_KINESIS={url} AWS_DEFAULT_REGION=us-east-1 \\
         AWS_ACCESS_KEY_ID=local AWS_SECRET_ACCESS_KEY=local

  seq 1000 | kpl put {stream}
  kpl tail {stream} --from-start

  aws kinesis list-streams --endpoint-url {url}
  aws kinesis put-record --endpoint-url {url} --stream-name {stream} --partition-key 42 --data aGVsbG8=

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


async def serve(port: int, wanted: Sequence[str]) -> ExitCode:
    """Serve until SIGINT or SIGTERM, which is how it is meant to end: status 0."""
    streams = dict(map(_stream, wanted))

    async def listening() -> ExitCode:
        async with local_kinesis(streams, port=port) as server:
            url = server.endpoint_url
            described = ", ".join(
                f"stream {name} ({count} {'shard' if count == 1 else 'shards'})" for name, count in streams.items()
            )
            sys.stdout.write(_INTRODUCTION.format(url=url, streams=described, stream=next(iter(streams))))
            sys.stdout.flush()
            await anyio.sleep_forever()
        return ExitCode.DONE  # pragma: no cover - only a signal ends it

    await until_signal(listening)
    note("stopped")
    return ExitCode.DONE


def _stream(text: str) -> tuple[str, int]:
    name, _, shards = text.partition(":")
    if not name or not (shards or "1").isdecimal() or int(shards or "1") < 1:
        message = f"--stream is {text!r}; write NAME or NAME:SHARDS with at least one shard, such as orders:4"
        raise CommandFailure(message, exit_code=ExitCode.WRONG_USAGE)
    return name, int(shards or "1")
