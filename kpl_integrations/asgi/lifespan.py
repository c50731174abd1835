"""The producer's lifespan: opened before the application's first request, drained after its last.

    app = Starlette(lifespan=KinesisLifespan(config))                       as the lifespan
    app = FastAPI(lifespan=KinesisLifespan(config, lifespan=my_lifespan))   around your own
    app.include_router(KinesisRouter(config))                               as a FastAPI router
    app = KinesisASGI(any_app, KinesisLifespan(config))                     around any ASGI application

A `KinesisLifespan` stores options only. The producer is created when the lifespan is entered, in the serving
process: after gunicorn's fork, in each of uvicorn's workers.

`startup` can check streams with one ListShards each: it needs the stream, credentials, permission and a connection,
and the producer calls it later anyway (1,000 a second per stream, where DescribeStream has 10 per account;
API_ListShards, API_DescribeStream).
"""

import logging
import math
import signal
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager
from types import FrameType
from typing import Any, Final, Literal, TypedDict, Unpack, get_args

import anyio
import msgspec

from kpl_core import Config, ConfigError, Hook, KplError, Producer, ProducerReport
from kpl_core.background.process_end import begin_last_flushes
from kpl_core.backoff_formula import ExponentialBackoff
from kpl_core.options.config import config_or_default
from kpl_core.options.validation import Bound, require_bounds, require_choice
from kpl_core.transport import KinesisTransport
from kpl_core.transport.default_transport import default_transport
from kpl_integrations.asgi.health import ProducerHealth, ReadinessCheck
from kpl_integrations.asgi.protocol import (
    HEALTH_KEY,
    STATE_KEY,
    ASGIApp,
    Message,
    MissingProducer,
    Receive,
    Scope,
    Send,
)

_logger = logging.getLogger("kpl_integrations.asgi")

TransportFactory = Callable[[Config], KinesisTransport]
Startup = Literal["lazy", "verify", "wait"]
UserLifespan = Callable[[Any], AbstractAsyncContextManager[Mapping[str, Any] | None]]

# Below the usual 30 seconds of uvicorn and Kubernetes, so that the report is still logged.
LIFESPAN_CLOSE_SECONDS: Final = 25.0
_BACKOFF: Final = ExponentialBackoff(base_seconds=0.2, cap_seconds=3.0)
_SECONDS: Final = Bound(0.0, math.inf, "seconds")
_LIFESPAN_ENDS: Final = frozenset({"lifespan.shutdown.complete", "lifespan.shutdown.failed", "lifespan.startup.failed"})
_FIX: Final = "correct the endpoint, the region or the credentials, which `kpl doctor` checks"
_TWO_PRODUCERS: Final = (
    f"the inner lifespan yields {STATE_KEY!r} too, so requests would get one of two producers; one producer serves "
    f"all streams of its region; for another region, yield the producer of its open_producer() under another name"
)


class StartupFailed(KplError, RuntimeError):  # noqa: N818
    """A stream could not be used at startup; the message has the stream and Kinesis' answer."""


class LifespanOptions(TypedDict, total=False):
    """The options of `KinesisLifespan`."""

    lifespan: UserLifespan | None
    streams: Sequence[str]
    startup: Startup
    startup_seconds: float
    close_seconds: float
    checks: Mapping[str, ReadinessCheck] | None
    hooks: Sequence[Hook]
    transport: TransportFactory | None


class LifespanSettings(msgspec.Struct, frozen=True, kw_only=True):
    """`LifespanOptions` with defaults, validated; `KinesisLifespan` describes each.

    Raises:
        ConfigError: `startup` is unknown, or needs streams and there are none; a time is negative or not finite.
    """

    lifespan: UserLifespan | None = None
    streams: Sequence[str] = ()
    startup: Startup = "lazy"
    startup_seconds: float = 30.0
    close_seconds: float = LIFESPAN_CLOSE_SECONDS
    checks: Mapping[str, ReadinessCheck] | None = None
    hooks: Sequence[Hook] = ()
    transport: TransportFactory | None = None

    def __post_init__(self) -> None:
        """Validate the options."""
        require_choice("startup", self.startup, get_args(Startup))
        if isinstance(self.streams, str) or (self.startup != "lazy" and not self.streams):
            message = (
                f"startup is {self.startup!r} and streams is {self.streams!r}; "
                f"name the streams, as in streams=('orders',)"
            )
            raise ConfigError(message)
        require_bounds(self, {"startup_seconds": _SECONDS, "close_seconds": _SECONDS})

    @property
    def patience_seconds(self) -> float | None:
        """How long the startup retries the streams, in seconds; None if it does not check them."""
        return {"verify": 0.0, "wait": self.startup_seconds}.get(self.startup)


class KinesisLifespan:
    """Opens a producer for the lifetime of an application and puts it into the lifespan state as `kinesis`.

    Args:
        config: the producer's options.
        options: options of the lifespan, each with a default:

            lifespan: your own lifespan; it runs inside this one, and its state is merged into this one's.
            streams: the streams that `startup` checks.
            startup: "lazy" checks nothing; "verify" checks each stream once; "wait" retries for
                `startup_seconds`, 30.
            close_seconds: how long the shutdown waits for outstanding records, 25.
            checks: more checks of `/readyz`, by name.
            hooks: hooks of the producer.
            transport: creates the transport that replaces the network.

    `report` is the final report of the last producer, None before there is one. `producer` is the open one.

    Raises:
        ConfigError: an option is out of its bounds.
        TypeError: an option does not exist.
    """

    # Set by `KinesisDouble` in tests: the transport of every lifespan that is entered meanwhile.
    transport_override: TransportFactory | None = None

    def __init__(self, config: Config | None = None, **options: Unpack[LifespanOptions]) -> None:
        self.config = config_or_default(config)
        self.report: ProducerReport | None = None
        self._producer: Producer | None = None
        self._settings = LifespanSettings(**options)

    @property
    def producer(self) -> Producer:
        """The open producer: for the inner lifespan, start-up jobs and tasks that serve no request.

        Raises:
            MissingProducer: the lifespan has not started, or has ended.
        """
        if self._producer is None:
            message = "the lifespan's producer is not open; use it inside the lifespan, after its start"
            raise MissingProducer(message)
        return self._producer

    @asynccontextmanager
    async def __call__(self, app: object) -> AsyncIterator[dict[str, Any]]:
        """Yield the state: the producer, its health, and the state of the inner lifespan.

        Raises:
            ConfigError: the inner lifespan yields a producer under the same name.
        """
        async with self.open_producer() as state:
            if self._settings.lifespan is None:
                yield state
            else:
                async with self._settings.lifespan(app) as own_state:
                    if own_state and STATE_KEY in own_state:
                        raise ConfigError(_TWO_PRODUCERS)
                    yield {**state, **(own_state or {})}

    @asynccontextmanager
    async def open_producer(self) -> AsyncIterator[dict[str, Any]]:
        """Yield the state of an open producer; at the end drain the producer and log its report.

        It also flushes the log handlers and telemetry exporters of this package.

        Raises:
            StartupFailed: a stream that `startup` checks cannot be used.
        """
        transport, settings = await self._make_transport(), self._settings
        async with Producer(self.config, transport=transport, hooks=settings.hooks) as producer:
            if settings.patience_seconds is not None:
                await _check_streams(transport, settings.streams, patience_seconds=settings.patience_seconds)
            health = ProducerHealth(producer, checks=settings.checks)
            self._producer = producer
            try:
                yield {STATE_KEY: producer, HEALTH_KEY: health}
            finally:
                self._producer = None
                health.is_draining = True
                with _sigterm_deferred():
                    self.report = await producer.close(timeout=settings.close_seconds)
                    if self.report.all_delivered:  # else the producer has logged its report, as a warning
                        _logger.info("the Kinesis producer is closed: %s", self.report)
                    for wait in begin_last_flushes():
                        await anyio.to_thread.run_sync(wait, abandon_on_cancel=True)

    async def _make_transport(self) -> KinesisTransport:
        make = KinesisLifespan.transport_override or self._settings.transport
        return await default_transport(self.config) if make is None else make(self.config)


@contextmanager
def _sigterm_deferred() -> Iterator[None]:
    """Let SIGTERM take effect at the end of the block, if it would end the process at once.

    hypercorn sends SIGTERM to its other workers as soon as one has ended, in the middle of their shutdown.
    """
    before = signal.getsignal(signal.SIGTERM)
    ends_process = before is signal.SIG_DFL or getattr(before, "flushes_senders", False)
    if not ends_process or threading.current_thread() is not threading.main_thread():
        yield
        return
    received: list[int] = []

    def note(number: int, _frame: FrameType | None) -> None:
        received.append(number)

    signal.signal(signal.SIGTERM, note)
    try:
        yield
    finally:
        if signal.getsignal(signal.SIGTERM) is note:
            signal.signal(signal.SIGTERM, before)
        if received:
            signal.raise_signal(signal.SIGTERM)


class KinesisASGI:
    """Wraps any ASGI application: puts a producer into every scope's state, even if the server shares no state.

    The producer opens before the application starts and closes after it has shut down, in the task that the server
    runs the lifespan in. An application that does not support lifespans (Django) works too. A server that runs none
    (daphne) does not: every connection then raises `MissingProducer`.
    """

    def __init__(self, app: ASGIApp, lifespan: KinesisLifespan) -> None:
        self._app = app
        self._lifespan = lifespan
        self._state: dict[str, object] = {}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Open and close the producer in the lifespan scope; add it to the state of all other scopes."""
        if scope["type"] == "lifespan":
            await self._run_lifespan(scope, receive, send)
            return
        if self._state:
            scope = {**scope, "state": {**self._state, **(scope.get("state") or {})}}
        await self._app(scope, receive, send)

    async def _run_lifespan(self, scope: Scope, receive: Receive, send: Send) -> None:
        startup = await receive()
        inner = _InnerLifespan(self._app, startup, receive, send)
        try:
            async with self._lifespan.open_producer() as state:
                self._state = state
                try:
                    await inner.run({**scope, "state": scope.setdefault("state", {})}, state)
                finally:
                    self._state = {}
        except Exception as error:
            # Without this message the server would serve without a producer.
            phase = "shutdown" if inner.has_started else "startup"
            await send({"type": f"lifespan.{phase}.failed", "message": str(error)})
            raise
        await send(inner.last_message)


class _InnerLifespan:
    """The application's own lifespan; its last message is withheld until the producer is closed."""

    def __init__(self, app: ASGIApp, startup: Message, receive: Receive, send: Send) -> None:
        self._app = app
        self._startup: Message | None = startup
        self._receive_from_server = receive
        self._send_to_server = send
        self._has_shutdown = False
        self.has_started = False
        self.last_message: Message = {"type": "lifespan.shutdown.complete"}

    async def run(self, scope: Scope, state: dict[str, object]) -> None:
        """Run it to its end; if it does not support lifespans, wait for the shutdown instead."""
        scope["state"].update(state)
        try:
            await self._app(scope, self._receive, self._send)
        except Exception:
            if self.has_started or self.last_message["type"] == "lifespan.startup.failed":
                raise
            # ASGI: an application that raises on the lifespan scope does not support lifespans.
        if self.last_message["type"] == "lifespan.startup.failed":
            return
        if not self.has_started:
            await self._send({"type": "lifespan.startup.complete"})
        # An application that did not take the server's first message must not pass for one that was told to end.
        self._startup = None
        if not self._has_shutdown:
            await self._receive()

    async def _receive(self) -> Message:
        if self._startup is not None:
            startup, self._startup = self._startup, None
            return startup
        message = await self._receive_from_server()
        self._has_shutdown = True
        return message

    async def _send(self, message: Message) -> None:
        if message["type"] in _LIFESPAN_ENDS:
            self.last_message = message
            return
        self.has_started = True
        await self._send_to_server(message)


async def _check_streams(transport: KinesisTransport, streams: Sequence[str], *, patience_seconds: float) -> None:
    """List the shards of every stream, with retries for `patience_seconds` in total; 0 means one attempt.

    Raises:
        StartupFailed: a stream cannot be used.
    """
    deadline = time.monotonic() + patience_seconds
    for stream in streams:
        failures = 0
        # Without patience the one attempt has the transport's own timeouts.
        bound = deadline if patience_seconds else math.inf
        while (problem := await _problem_with(transport, stream, bound - time.monotonic())) is not None:
            left = deadline - time.monotonic()
            if left <= 0:
                waited = f" after {patience_seconds:g} s" if patience_seconds else ""
                is_absent = problem.startswith("ResourceNotFoundException")
                fix = "create it, or correct its name or the region" if is_absent else _FIX
                said = f"stream {stream!r} cannot be used{waited}: {problem.rstrip('.')}"
                message = f"{said}; {fix} (startup='lazy' skips this check)"
                raise StartupFailed(message)
            failures += 1
            await anyio.sleep(min(_BACKOFF.longest_seconds(failures), left))


async def _problem_with(transport: KinesisTransport, stream: str, seconds: float) -> str | None:
    with anyio.move_on_after(seconds):
        answer = await transport.list_shards(stream)
        return None if isinstance(answer, Sequence) else f"{answer.code}: {answer.message}"
    return "no answer"
