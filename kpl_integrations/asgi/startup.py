"""What is asked of Kinesis before an application takes requests, and never again.

One ListShards for each stream: it needs the stream, credentials, permission and a way to the
endpoint, and the producer asks the same question itself later (1,000 a second for each stream,
where DescribeStream has 10 for each account; API_ListShards, API_DescribeStream).
"""

import time
from collections.abc import Callable, Sequence
from typing import Final, Literal

import anyio

from kpl_core import KplError
from kpl_core.backoff import ExponentialBackoff
from kpl_core.transport.transport import KinesisTransport

__all__ = ["Startup", "StartupFailed", "check_streams"]

Startup = Literal["lazy", "verify", "wait"]

_BACKOFF: Final = ExponentialBackoff(base_seconds=0.2, cap_seconds=3.0)


class StartupFailed(KplError, RuntimeError):  # noqa: N818
    """A stream could not be reached before the application began; the message names it and Kinesis' answer."""


async def check_streams(
    transport: KinesisTransport,
    streams: Sequence[str],
    *,
    patience_seconds: float,
    clock: Callable[[], float] = time.monotonic,
) -> None:
    """Ask for every stream until it answers, for `patience_seconds` in all; 0 asks once.

    Raises:
        StartupFailed: one did not.
    """
    deadline = clock() + patience_seconds
    for stream in streams:
        failures = 0
        while (problem := await _problem_with(transport, stream)) is not None:
            left = deadline - clock()
            if left <= 0:
                waited = f" after {patience_seconds:g} s" if patience_seconds else ""
                message = (
                    f"stream {stream!r} cannot be used{waited}: {problem}; create it, or correct region, endpoint "
                    f"and credentials (startup='lazy' begins without asking)"
                )
                raise StartupFailed(message)
            failures += 1
            await anyio.sleep(min(_BACKOFF.longest_seconds(failures), left))


async def _problem_with(transport: KinesisTransport, stream: str) -> str | None:
    answer = await transport.list_shards(stream)
    return None if isinstance(answer, Sequence) else f"{answer.code}: {answer.message}"
