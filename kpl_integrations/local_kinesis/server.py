"""A Kinesis on loopback: `FakeKinesis` behind HTTP, spoken to by any AWS SDK.

    async with LocalKinesis({"orders": 4}) as kinesis:
        config = Config(region="us-east-1", endpoint_url=kinesis.endpoint_url, ...)

Credentials are not checked: whoever reaches the port may do everything, so it listens on
127.0.0.1 unless told otherwise.
"""

import asyncio
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Self

from kpl_core.testing import FakeKinesis, Faults, ServiceDurations, ServiceLimits
from kpl_integrations.local_kinesis.listener import Listener

__all__ = ["LocalKinesis"]


class LocalKinesis:
    """The embedded Kinesis as an asyncio HTTP server.

    Args:
        streams: streams to begin with, name -> shards, or names with `shards` each.
        shards: shards of a stream given by name only.
        host, port: where to listen; port 0 takes a free one.
        enforce_limits: meter the shards' write capacity like the service.
        limits, durations: other quotas, and how long changes of a stream last.
        clock: seconds; the running loop's by default.

    While it runs, `fake` is the service's state, `faults` its fault switches and `endpoint_url`
    what to give an SDK. Entered again after it was closed it begins with a fresh state.
    """

    def __init__(
        self,
        streams: Mapping[str, int] | Iterable[str] = ("demo",),
        *,
        shards: int = 4,
        host: str = "127.0.0.1",
        port: int = 0,
        enforce_limits: bool = True,
        limits: ServiceLimits | None = None,
        durations: ServiceDurations | None = None,
        clock: Callable[[], float] | None = None,
    ) -> None:
        if isinstance(streams, str):
            message = f"streams is the text {streams!r}; give a mapping of names to shards, or a list of names"
            raise TypeError(message)
        self._streams = dict(streams) if isinstance(streams, Mapping) else dict.fromkeys(streams, shards)
        self._host = host
        self._port = port
        self._enforce_limits = enforce_limits
        self._limits = limits
        self._durations = durations
        self._clock = clock
        self._running: Listener | None = None

    def __repr__(self) -> str:
        return f"<LocalKinesis {'not running' if self._running is None else self._running.url}>"

    @property
    def fake(self) -> FakeKinesis:
        """Return the service's state; RuntimeError while it does not run."""
        return self._entered().fake

    @property
    def faults(self) -> Faults:
        """Return the fault switches; RuntimeError while it does not run."""
        return self._entered().fake.faults

    @property
    def endpoint_url(self) -> str:
        """Return where it listens, such as `http://127.0.0.1:40123`; RuntimeError while it does not run."""
        return self._entered().url

    @property
    def now(self) -> float:
        """Return the instant its clock shows, to be passed to `fake`."""
        return self._entered().clock()

    @property
    def epoch(self) -> float:
        """Return the seconds since 1970 at which its clock reads 0."""
        return self._entered().fake.epoch

    async def __aenter__(self) -> Self:
        """Start to listen; OSError if the port is taken."""
        if self._running is not None:
            message = f"{self!r} is already running; make another LocalKinesis for a second server"
            raise RuntimeError(message)
        clock = self._clock or asyncio.get_running_loop().time
        fake = FakeKinesis(
            self._streams,
            enforce_limits=self._enforce_limits,
            limits=self._limits,
            durations=self._durations,
            epoch=time.time() - clock(),
            now=clock(),
        )
        listener = Listener(fake, clock, self._host, self._port)
        await listener.listen()
        self._running = listener
        return self

    async def __aexit__(self, *_exc_info: object) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Stop within about half a second, whatever is in progress; hanging requests are reset. Idempotent."""
        running, self._running = self._running, None
        if running is not None:
            await running.stop()

    async def serve_forever(self) -> None:
        """Return when somebody else closes it; cancel to stop waiting."""
        await self._entered().closing.wait()

    def refuse_connections(self) -> None:
        """Stop to listen and drop open connections, as a service that is down; the state stays."""
        self._entered().refuse()

    async def accept_connections(self) -> None:
        """Listen again, on the same port."""
        await self._entered().listen()

    def _entered(self) -> Listener:
        if self._running is None:
            message = "LocalKinesis is not running; use it inside `async with LocalKinesis(...)`"
            raise RuntimeError(message)
        return self._running
