"""The embedded Kinesis as the commands start it: what may be in its way is said in one sentence."""

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager

from kpl_core.testing import KinesisError
from kpl_integrations.cli.failure import CommandFailure
from kpl_integrations.local_kinesis import LocalKinesis

__all__ = ["local_kinesis"]


@asynccontextmanager
async def local_kinesis(streams: Mapping[str, int], *, port: int = 0) -> AsyncIterator[LocalKinesis]:
    """Run a Kinesis on loopback.

    Raises:
        CommandFailure: the port is taken, or a stream cannot be.
    """
    server = LocalKinesis(streams, port=port)
    try:
        await server.__aenter__()
    except OSError as error:
        message = (
            f"port {port} of 127.0.0.1 cannot be used ({error.strerror}); name another with --port, or 0 for a free one"
        )
        raise CommandFailure(message) from error
    except KinesisError as error:
        message = f"a stream cannot be made: {error.message}; name it like orders:4"
        raise CommandFailure(message) from error
    try:
        yield server
    finally:
        await server.aclose()
