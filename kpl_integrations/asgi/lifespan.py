"""The producer's life inside an application's: opened before its first request, drained after its last.

    app = Starlette(lifespan=KinesisLifespan(config))                       as the lifespan
    app = FastAPI(lifespan=KinesisLifespan(config, lifespan=my_lifespan))   around your own
    app.include_router(KinesisRouter(config))                               as a FastAPI router
    app = KinesisASGI(any_app, KinesisLifespan(config))                     around any ASGI application

It holds options only. The producer is made when the lifespan is entered, in the process that serves: after
gunicorn's fork, in each of uvicorn's workers.
"""

import logging
import math
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any, Final, TypedDict, Unpack, get_args

import anyio
import msgspec

from kpl_core import Config, ConfigError, Hook, Producer, ProducerReport
from kpl_core.background.process_end import begin_last_flushes
from kpl_core.transport.transport import KinesisTransport
from kpl_integrations.asgi.connection_state import HEALTH_KEY, STATE_KEY
from kpl_integrations.asgi.health import ProducerHealth, ReadinessCheck
from kpl_integrations.asgi.startup import Startup, check_streams

__all__ = ["KinesisLifespan", "LifespanOptions", "TransportFactory"]

_logger = logging.getLogger("kpl_integrations.asgi")

TransportFactory = Callable[[Config], KinesisTransport]
UserLifespan = Callable[[Any], AbstractAsyncContextManager[Mapping[str, Any] | None]]

# Below uvicorn's and Kubernetes' usual 30 seconds, so that the report is still written.
DEFAULT_CLOSE_SECONDS: Final = 25.0
_TWO_PRODUCERS: Final = (
    f"the lifespan inside yields {STATE_KEY!r}, too, and requests would find one of two producers; one carries all "
    f"streams of its region, and for another region yield what open_producer() gives under a name of your own"
)


class LifespanOptions(TypedDict, total=False):
    """The options of `KinesisLifespan` by name."""

    lifespan: UserLifespan | None
    streams: Sequence[str]
    startup: Startup
    startup_seconds: float
    close_seconds: float
    checks: Mapping[str, ReadinessCheck] | None
    hooks: Sequence[Hook]
    transport: TransportFactory | None


class LifespanSettings(msgspec.Struct, frozen=True, kw_only=True):
    """The same with their defaults, checked; what each means is told by `KinesisLifespan`.

    Raises:
        ConfigError: `startup` is an unknown word, or asks for streams that were not named; a time is none.
    """

    lifespan: UserLifespan | None = None
    streams: Sequence[str] = ()
    startup: Startup = "lazy"
    startup_seconds: float = 30.0
    close_seconds: float = DEFAULT_CLOSE_SECONDS
    checks: Mapping[str, ReadinessCheck] | None = None
    hooks: Sequence[Hook] = ()
    transport: TransportFactory | None = None

    def __post_init__(self) -> None:
        """Check what nothing else checks."""
        if self.startup not in get_args(Startup):
            message = f"startup is {self.startup!r}; it must be one of {', '.join(map(repr, get_args(Startup)))}"
            raise ConfigError(message)
        if isinstance(self.streams, str) or (self.startup != "lazy" and not self.streams):
            message = (
                f"startup is {self.startup!r} and streams is {self.streams!r}; "
                f"name the streams, as in streams=('orders',)"
            )
            raise ConfigError(message)
        for name in ("startup_seconds", "close_seconds"):
            seconds = getattr(self, name)
            if not (math.isfinite(seconds) and seconds >= 0):
                message = f"{name} is {seconds!r}; it must be a number of seconds, 0 or more"
                raise ConfigError(message)

    @property
    def patience_seconds(self) -> float | None:
        """Return how long the startup asks for the streams, None if it does not."""
        return {"verify": 0.0, "wait": self.startup_seconds}.get(self.startup)


class KinesisLifespan:
    """Opens a producer for the length of an application's life and puts it in the state, as `kinesis`.

    Args:
        config: the producer's options.
        options: what the lifespan adds, each with a default:

            lifespan: your own lifespan; it runs inside, and what it yields is yielded again.
            streams: what `startup` asks for.
            startup: "lazy" asks Kinesis nothing; "verify" asks once for each stream and fails; "wait" asks
                again for `startup_seconds`, 30.
            close_seconds: how long the end of the application waits for what is outstanding, 25.
            checks: further questions of `/readyz`, by name.
            hooks: told the producer's facts.
            transport: makes what replaces the network.

    `report` is the last producer's final count, None before there is one.

    Raises:
        ConfigError: an option is out of its bounds.
        TypeError: there is no such option.
    """

    # A test's double, while it is installed: every lifespan entered then speaks to it.
    transport_override: TransportFactory | None = None

    def __init__(self, config: Config | None = None, **options: Unpack[LifespanOptions]) -> None:
        self.config = Config() if config is None else config
        self.report: ProducerReport | None = None
        self._settings = LifespanSettings(**options)

    @asynccontextmanager
    async def __call__(self, app: object) -> AsyncIterator[dict[str, Any]]:
        """Yield the state: the producer, its health, and what the lifespan inside yields.

        Raises:
            ConfigError: the lifespan inside yields a producer under the same name.
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
        """Yield the state of an open producer; drain it at the end, and say what became of all records.

        What log handlers and telemetry of this package have on their way is waited for, too (`last_flush`).

        Raises:
            StartupFailed: `startup` asked for a stream in vain.
        """
        transport, settings = self._make_transport(), self._settings
        async with Producer(self.config, transport=transport, hooks=settings.hooks) as producer:
            if settings.patience_seconds is not None:
                await check_streams(transport, settings.streams, patience_seconds=settings.patience_seconds)
            health = ProducerHealth(producer, checks=settings.checks)
            try:
                yield {STATE_KEY: producer, HEALTH_KEY: health}
            finally:
                health.is_draining = True
                self.report = await producer.close(timeout=settings.close_seconds)
                # What expired or was refused for good is complete, and lost all the same.
                is_well = self.report.complete and not self.report.failed_total
                level = logging.INFO if is_well else logging.WARNING
                _logger.log(level, "the Kinesis producer is closed: %s", self.report)
                for wait in begin_last_flushes():
                    await anyio.to_thread.run_sync(wait, abandon_on_cancel=True)

    def _make_transport(self) -> KinesisTransport:
        make = KinesisLifespan.transport_override or self._settings.transport
        if make is not None:
            return make(self.config)
        from kpl_core.transport.aiobotocore_transport import AiobotocoreTransport  # noqa: PLC0415 - 0.3 s, asyncio only

        return AiobotocoreTransport(self.config)
