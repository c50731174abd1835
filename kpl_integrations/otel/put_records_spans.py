"""A producer's PutRecords requests as spans, linked to the spans that put what they carry.

    producer = Producer(config, hooks=[PutRecordsSpans()])

One span for each request, linked to the spans that were current when its Kinesis records opened. One put opens an
aggregated record and hundreds join it, so a put costs no more than without this hook, and no context is copied. A
record that opened outside of any span, by a retry, or for a flow that waited in the fair queue has no link.
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
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from kpl_core.hooks import Fact, RequestCompleted

# As many as the SDK keeps by default.
_MAX_LINKS: Final = 128
_NANOSECONDS: Final = 1_000_000_000
_PROPAGATOR: Final = TraceContextTextMapPropagator()


def current_trace_context() -> dict[str, str]:
    """Return the W3C trace context of the current span, for `Topic(trace_context=...)`; empty outside of any span."""
    carrier: dict[str, str] = {}
    _PROPAGATOR.inject(carrier)
    return carrier


class PutRecordsSpans:
    """A hook. `clock` returns seconds since 1970; it is read when a request has completed."""

    def __init__(
        self, tracer_provider: TracerProvider | None = None, *, clock: Callable[[], float] = time.time
    ) -> None:
        self._tracer = (tracer_provider or get_tracer_provider()).get_tracer("kpl_integrations.otel")
        self._clock = clock

    def opening_context(self) -> SpanContext | None:
        """Return the current span's context, for a Kinesis record that opens now."""
        context = get_current_span().get_span_context()
        return None if context is INVALID_SPAN_CONTEXT or not context.is_valid else context

    def __call__(self, fact: Fact) -> None:
        """Make a span of each request that was answered or failed."""
        if not isinstance(fact, RequestCompleted):
            return
        ended_at = self._clock()
        # A root span: the context that is current here belongs to something else.
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
