"""A producer's PutRecords requests as spans, linked to the spans that put what they carry.

    producer = Producer(config, hooks=[PutRecordsSpans()])

One span for each request. Its links are the spans that were current when its Kinesis records opened: one put
opens an aggregated record and hundreds join it, so what a put costs stays what it was, and no context is copied.
A record opened outside of any span, or by a retry, or for a flow that waited its turn, has no link of its own.
"""

import time
from collections.abc import Callable
from typing import Final

from opentelemetry.context import Context
from opentelemetry.trace import (
    INVALID_SPAN_CONTEXT,
    Link,
    SpanContext,
    SpanKind,
    Status,
    StatusCode,
    TracerProvider,
    get_current_span,
    get_tracer_provider,
)

from kpl_core.hooks import Fact, RequestCompleted

__all__ = ["PutRecordsSpans"]

# As many as the SDK keeps by default.
_MAX_LINKS: Final = 128
_NANOSECONDS: Final = 1_000_000_000


class PutRecordsSpans:
    """A hook. `clock` is seconds since 1970, the end of a request at the moment its fact is told."""

    def __init__(
        self, tracer_provider: TracerProvider | None = None, *, clock: Callable[[], float] = time.time
    ) -> None:
        self._tracer = (tracer_provider or get_tracer_provider()).get_tracer("kpl_integrations.otel")
        self._clock = clock

    def opening_context(self) -> SpanContext | None:
        """Return the current span's context; a Kinesis record opens."""
        context = get_current_span().get_span_context()
        return None if context is INVALID_SPAN_CONTEXT or not context.is_valid else context

    def __call__(self, fact: Fact) -> None:
        """Make a span of each answered or failed request."""
        if not isinstance(fact, RequestCompleted):
            return
        ended_at = self._clock()
        # A root: whose context happens to be current here has nothing to do with it.
        span = self._tracer.start_span(
            "Kinesis.PutRecords",
            Context(),
            kind=SpanKind.CLIENT,
            attributes={
                "rpc.system": "aws-api",
                "rpc.service": "Kinesis",
                "rpc.method": "PutRecords",
                "aws.kinesis.stream_name": fact.stream,
                "messaging.batch.message_count": fact.kinesis_records,
                "kpl.user_records": fact.user_records,
                "kpl.size_bytes": fact.size_bytes,
                "kpl.queue_wait_seconds": fact.queue_wait,
                "kpl.failed_kinesis_records": sum(fact.record_errors.values()),
            },
            links=_links(fact.opened_in),
            start_time=int((ended_at - (fact.ended_at - fact.started_at)) * _NANOSECONDS),
        )
        code = fact.error_code or next(iter(fact.record_errors), None)
        if code is not None:
            span.set_attribute("error.type", code)
            span.set_status(Status(StatusCode.ERROR, code if fact.error_code else f"some records: {code}"))
        span.end(int(ended_at * _NANOSECONDS))


def _links(opened_in: tuple[object, ...]) -> list[Link]:
    """Return a link for each span, in the order in which their records opened."""
    contexts = {(each.trace_id, each.span_id): each for each in opened_in if isinstance(each, SpanContext)}
    return [Link(context) for context in list(contexts.values())[:_MAX_LINKS]]
