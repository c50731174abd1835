"""A Kinesis on loopback for any AWS SDK: `FakeKinesis` behind HTTP, in a task, a thread or a process.

    async with LocalKinesis({"orders": 4}) as kinesis:
        config = Config(region="us-east-1", endpoint_url=kinesis.endpoint_url, ...)

Credentials are not checked, so every client that reaches the port has full access. It listens on 127.0.0.1
unless `host` says otherwise. A web page could reach it through your browser (DNS rebinding), so it answers only
requests whose Host is a loopback name, an IP address, `host` or one of `allow_hosts`.
"""

import asyncio
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING, Final, Self, TypeVar

from anyio.from_thread import BlockingPortal, start_blocking_portal

from kpl_core.testing import FakeKinesis, Faults, ServiceDurations, ServiceLimits
from kpl_integrations.host_names import HostNames

if TYPE_CHECKING:
    from kpl_integrations.local_kinesis.listener import Clock, Listener

_PROCESS_STOP_SECONDS: Final = 5.0
# Of a stream given by its name only.
_SHARDS: Final = 4
_STREAM_NAME: Final = re.compile(r"[a-zA-Z0-9_.-]{1,128}")

_Result = TypeVar("_Result")


def parse_stream(text: str) -> tuple[str, int]:
    """Return the name and the number of shards in NAME or NAME:SHARDS.

    Raises:
        ValueError: the text is neither.
    """
    name, _, shards = text.partition(":")
    if not _STREAM_NAME.fullmatch(name) or not (shards or "1").isdecimal() or int(shards or "1") < 1:
        message = (
            f"{text!r} is not a stream; write NAME or NAME:SHARDS with at least one shard, such as orders:4; "
            "a name has 1 to 128 letters, digits, dots, hyphens and underscores"
        )
        raise ValueError(message)
    return name, int(shards or "1")


class LocalKinesis:
    """The local Kinesis as an asyncio HTTP server.

    Args:
        streams: initial streams, name -> shards, or names with 4 shards each.
        host, port: address to listen on; port 0 selects a free port.
        allow_hosts: names of this machine in URLs, such as a container's, besides loopback names and addresses.
        enforce_limits: throttle the shards' writes like the service.
        limits, durations: other quotas, and how long changes of a stream take.
        clock: seconds; the running loop's time by default.

    While it runs, `fake` is the service's state, `faults` its fault switches and `endpoint_url` the URL for
    SDKs. Entering it again after it was closed starts with a fresh state.
    """

    def __init__(
        self,
        streams: Mapping[str, int] | Iterable[str] = ("demo",),
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        allow_hosts: Iterable[str] = (),
        enforce_limits: bool = True,
        limits: ServiceLimits | None = None,
        durations: ServiceDurations | None = None,
        clock: "Clock | None" = None,
    ) -> None:
        # Not in `start`, because aiohttp takes 0.3 s, and not above, because few programs that import this start one.
        import_module("kpl_integrations.local_kinesis.listener")
        if isinstance(streams, str):
            message = f"streams is the text {streams!r}; give a mapping of names to shards, or a list of names"
            raise TypeError(message)
        named = dict(streams) if isinstance(streams, Mapping) else dict.fromkeys(streams, _SHARDS)
        self._new_fake = partial(FakeKinesis, named, enforce_limits=enforce_limits, limits=limits, durations=durations)
        self._host = host
        self._port = port
        self._allow_hosts = (host, *allow_hosts)
        self._clock = clock
        self._running: Listener | None = None

    def __repr__(self) -> str:
        return f"<LocalKinesis {'not running' if self._running is None else self._running.url}>"

    @property
    def fake(self) -> FakeKinesis:
        """The service's state. Raises RuntimeError while it does not run."""
        return self._require_running().fake

    @property
    def faults(self) -> Faults:
        """The fault switches. Raises RuntimeError while it does not run."""
        return self._require_running().fake.faults

    @property
    def endpoint_url(self) -> str:
        """The URL, such as `http://127.0.0.1:40123`. Raises RuntimeError while it does not run."""
        return self._require_running().url

    @property
    def now(self) -> float:
        """The current time of its clock, for calls of `fake`."""
        return self._require_running().clock()

    @property
    def epoch(self) -> float:
        """The instant at which its clock reads 0, in seconds since 1970."""
        return self._require_running().fake.epoch

    async def __aenter__(self) -> Self:
        """Start to listen.

        Raises:
            OSError: the port is in use.
            KinesisError: a stream cannot be created.
        """
        if self._running is not None:
            message = f"{self!r} is already running; make another LocalKinesis for a second server"
            raise RuntimeError(message)
        from kpl_integrations.local_kinesis.listener import Listener  # noqa: PLC0415 - imported by now

        clock = self._clock or asyncio.get_running_loop().time
        fake = self._new_fake(epoch=time.time() - clock(), now=clock())
        listener = Listener(fake, clock, self._host, self._port, HostNames(self._allow_hosts, any_address=True))
        await listener.listen()
        self._running = listener
        return self

    async def __aexit__(self, *_exc_info: object) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Stop within about half a second; requests that take longer are reset. Idempotent."""
        running, self._running = self._running, None
        if running is not None:
            await running.stop()

    async def serve_forever(self) -> None:
        """Wait until it is closed; cancel to stop waiting."""
        await self._require_running().closing.wait()

    def refuse_connections(self) -> None:
        """Stop listening and drop open connections, like a service that is down; the state stays."""
        self._require_running().refuse()

    async def accept_connections(self) -> None:
        """Listen again on the same port."""
        await self._require_running().listen()

    def _require_running(self) -> "Listener":
        if self._running is None:
            message = "LocalKinesis is not running; use it inside `async with LocalKinesis(...)`"
            raise RuntimeError(message)
        return self._running


class ThreadedLocalKinesis:
    """A LocalKinesis for synchronous code, on an event loop and thread of its own.

        with ThreadedLocalKinesis(LocalKinesis({"orders": 2})) as kinesis:
            client = boto3.client("kinesis", endpoint_url=kinesis.endpoint_url, ...)

    The state belongs to the server's thread; `call` runs a function there.
    """

    def __init__(self, server: LocalKinesis | None = None) -> None:
        self._server = server or LocalKinesis()
        self._portal: BlockingPortal | None = None
        self._exits = ExitStack()
        self.endpoint_url = ""

    def __enter__(self) -> Self:
        """Start it and wait until it listens.

        Raises:
            OSError: the port is in use.
            KinesisError: a stream cannot be created.
        """
        with ExitStack() as exits:
            portal = exits.enter_context(start_blocking_portal())
            exits.enter_context(portal.wrap_async_context_manager(self._server))
            self.endpoint_url = self._server.endpoint_url
            self._portal, self._exits = portal, exits.pop_all()
        return self

    def __exit__(self, *_exc_info: object) -> None:
        self._portal = None
        self._exits.close()

    def call(self, function: Callable[[FakeKinesis, float], _Result]) -> _Result:
        """Run `function(fake, now)` between two requests and return its result."""
        if self._portal is None:
            message = "the server is not running; use it inside its `with` block"
            raise RuntimeError(message)
        return self._portal.call(lambda: function(self._server.fake, self._server.now))


class LocalKinesisProcess:
    """A LocalKinesis in a process of its own, so that it takes no CPU time from the loop under test.

    `streams` maps names to shards; `options` are further arguments of `python -m kpl_integrations.local_kinesis`,
    such as `"--no-limits"`.
    """

    def __init__(self, streams: Mapping[str, int], *options: str) -> None:
        named = [argument for name, shards in streams.items() for argument in ("--stream", f"{name}:{shards}")]
        self._command = [sys.executable, "-m", "kpl_integrations.local_kinesis", *named, *options]
        self._process: subprocess.Popen[str] | None = None
        self.endpoint_url = ""

    @property
    def pid(self) -> int:
        """The process id; 0 while it does not run."""
        return 0 if self._process is None else self._process.pid

    def __enter__(self) -> Self:
        """Start it and wait until it listens.

        Raises:
            RuntimeError: the process ended instead; the reason is on its stderr.
        """
        self._process = subprocess.Popen(self._command, stdout=subprocess.PIPE, text=True)  # noqa: S603 - our own module
        line = "" if self._process.stdout is None else self._process.stdout.readline()
        self.endpoint_url = line.rpartition(" ")[2].strip()
        if not self.endpoint_url:
            self.__exit__()
            message = f"{' '.join(self._command)} did not start to listen; see its stderr"
            raise RuntimeError(message)
        return self

    def __exit__(self, *_exc_info: object) -> None:
        """Terminate the process, and kill it after 5 seconds."""
        process, self._process = self._process, None
        if process is None:
            return
        process.terminate()
        try:
            process.wait(_PROCESS_STOP_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        if process.stdout is not None:
            process.stdout.close()
