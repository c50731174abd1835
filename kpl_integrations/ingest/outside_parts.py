"""What a gateway's producer has outside this process, by the settings: a place for dead letters, and other metrics."""

import contextlib
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING

from kpl_core import ConfigError
from kpl_integrations.ingest.settings import IngestSettings

if TYPE_CHECKING:
    from kpl_core.durability.dead_letters import DeadLetterSink
    from kpl_integrations.metrics.opentelemetry import OpenTelemetryMetrics

# In a bucket without a prefix of the settings.
_PREFIX = "dead-letters/"


@contextlib.asynccontextmanager
async def dead_letter_sink(settings: IngestSettings) -> AsyncIterator["DeadLetterSink | None"]:
    """Open the queue or the bucket that gets the dead letters; None if the settings name neither.

    The client's region is the producer's. Its endpoint is that of any AWS client, such as `AWS_ENDPOINT_URL_SQS`.
    """
    queue_url, place = settings.dead_letters_sqs, settings.dead_letters_s3
    if queue_url is None and place is None:
        yield None
        return
    # These import botocore, which takes 0.3 s.
    from aiobotocore.session import AioSession  # noqa: PLC0415

    from kpl_core.durability.dead_letters.aws_sinks import S3Sink, SqsSink  # noqa: PLC0415

    service = "sqs" if queue_url is not None else "s3"
    async with AioSession().create_client(service, region_name=settings.producer.region) as client:
        if queue_url is not None:
            yield SqsSink(client, queue_url)
        else:
            bucket, _, prefix = str(place).partition("/")
            yield S3Sink(client, bucket, prefix=prefix or _PREFIX)


def opentelemetry_metrics(settings: IngestSettings) -> "OpenTelemetryMetrics | None":
    """Return the hook that records metrics with the global meter provider, if the settings want it.

    Raises:
        ConfigError: its package is not installed.
    """
    if not settings.opentelemetry_metrics:
        return None
    try:
        from kpl_integrations.metrics.opentelemetry import OpenTelemetryMetrics  # noqa: PLC0415 - an extra
    except ModuleNotFoundError as error:
        message = "opentelemetry_metrics needs a package: pip install 'kpl-integrations[otel]'"
        raise ConfigError(message) from error
    return OpenTelemetryMetrics()
