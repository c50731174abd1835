"""What a gateway has outside this process, by the settings: a place for dead letters, other metrics, and spans."""

import contextlib
import logging
import math
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple

from kpl_core import ConfigError
from kpl_integrations.ingest.settings import IngestSettings

if TYPE_CHECKING:
    from kpl_core.durability.dead_letters import DeadLetterSink, SinkReport
    from kpl_core.durability.spool import DeadLetter
    from kpl_integrations.metrics.opentelemetry import OpenTelemetryMetrics
    from kpl_integrations.otel.server_spans import ServerSpans

# In a bucket without a prefix of the settings.
_PREFIX = "dead-letters/"

_log: Final = logging.getLogger(__name__)


class WatchedSink:
    """A sink, and when it last did not take a letter. `clock` is monotonic seconds."""

    def __init__(self, sink: "DeadLetterSink", clock: Callable[[], float]) -> None:
        self._sink = sink
        self._clock = clock
        # `-math.inf` while it takes all.
        self.failed_at = -math.inf

    async def send(self, letters: "Sequence[DeadLetter]") -> "SinkReport":
        """Send the letters to the sink; raises what it does."""
        try:
            report = await self._sink.send(letters)
        except Exception:
            self.failed_at = self._clock()
            raise
        if not report.refused:
            self.failed_at = -math.inf
            return report
        if self.failed_at == -math.inf:
            _log.warning("dead letters are not taken, so their records have failed: %s", report.refused[0].why)
        self.failed_at = self._clock()
        return report


@contextlib.asynccontextmanager
async def dead_letter_sink(settings: IngestSettings, clock: Callable[[], float]) -> AsyncIterator[WatchedSink | None]:
    """Open the SQS queue or the S3 bucket that gets the dead letters. None if the settings name neither.

    The client's region is the producer's. Its endpoint is that of any AWS client, such as `AWS_ENDPOINT_URL_SQS`.
    """
    async with open_sink(settings) as opened:
        yield None if opened is None else WatchedSink(opened.sink, clock)


class OpenSink(NamedTuple):
    """A queue or a bucket for dead letters, with its open client."""

    service: Literal["sqs", "s3"]
    client: Any
    sink: "DeadLetterSink"


@contextlib.asynccontextmanager
async def open_sink(settings: IngestSettings, **client_options: Any) -> AsyncIterator[OpenSink | None]:  # noqa: ANN401 - botocore's
    """Open what `dead_letter_sink` watches, with further options of the client."""
    queue_url, place = settings.dead_letters_sqs, settings.dead_letters_s3
    if queue_url is None and place is None:
        yield None
        return
    # These import botocore, which takes 0.3 s.
    from aiobotocore.session import AioSession  # noqa: PLC0415

    from kpl_core.durability.dead_letters.aws_sinks import S3Sink, SqsSink  # noqa: PLC0415

    region = settings.producer.region
    if queue_url is not None:
        async with AioSession().create_client("sqs", region_name=region, **client_options) as client:
            yield OpenSink("sqs", client, SqsSink(client, queue_url))
    else:
        bucket, _, prefix = str(place).partition("/")
        async with AioSession().create_client("s3", region_name=region, **client_options) as client:
            yield OpenSink("s3", client, S3Sink(client, bucket, prefix=prefix or _PREFIX))


@contextlib.contextmanager
def _needs_opentelemetry(setting: str) -> Iterator[None]:
    try:
        yield
    except ModuleNotFoundError as error:
        message = f"{setting} needs a package: pip install 'kpl-integrations[otel]'"
        raise ConfigError(message) from error


def opentelemetry_metrics(settings: IngestSettings) -> "OpenTelemetryMetrics | None":
    """Return the hook that records metrics with the global meter provider, if the settings want it.

    Raises:
        ConfigError: its package is not installed.
    """
    if not settings.opentelemetry_metrics:
        return None
    with _needs_opentelemetry("opentelemetry_metrics"):
        from kpl_integrations.metrics.opentelemetry import OpenTelemetryMetrics  # noqa: PLC0415 - an extra
    return OpenTelemetryMetrics()


def opentelemetry_spans(settings: IngestSettings) -> "ServerSpans | None":
    """Return what starts a span for each request for records, with the global tracer provider, if the settings want it.

    Raises:
        ConfigError: its package is not installed.
    """
    if not settings.opentelemetry_traces:
        return None
    with _needs_opentelemetry("opentelemetry_traces"):
        from kpl_integrations.otel.server_spans import ServerSpans  # noqa: PLC0415 - an extra
    return ServerSpans()
