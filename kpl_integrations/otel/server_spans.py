"""The requests that the HTTP gateway serves, as spans that continue the traces of its clients.

The tracer provider's sampler decides. A parent-based one (the default) follows the client's sampled flag, which the
gateway has cleared unless the client's credentials are verified.
"""

import logging
import time
from collections.abc import Callable, Mapping
from http import HTTPStatus
from typing import Final

from opentelemetry.context import Context
from opentelemetry.trace import (
    Span,
    SpanKind,
    Status,
    StatusCode,
    TracerProvider,
    get_tracer_provider,
    set_span_in_context,
)
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

_log: Final = logging.getLogger(__name__)
_PROPAGATOR: Final = TraceContextTextMapPropagator()
_NO_ANSWER: Final = "no answer"


class ServerSpan:
    """A span of one request. `traceparent` and `tracestate` are its place in the trace, for what it causes."""

    __slots__ = ("_clock", "_span", "traceparent", "tracestate")

    def __init__(self, span: Span, clock: Callable[[], int]) -> None:
        self._span = span
        self._clock = clock
        carrier: dict[str, str] = {}
        _PROPAGATOR.inject(carrier, set_span_in_context(span, Context()))
        self.traceparent = carrier["traceparent"]
        self.tracestate = carrier.get("tracestate", "")

    def end(self, status: int | None, attributes: Mapping[str, str]) -> None:
        """End it with the status of the answer; None: there was no answer.

        A span processor that raises is logged: the records of the request may be put, so its answer must be sent.
        """
        try:
            self._end(status, attributes)
        except Exception:  # noqa: BLE001 - a processor may raise anything
            _log.exception("the span of a request is lost")

    def _end(self, status: int | None, attributes: Mapping[str, str]) -> None:
        span = self._span
        if span.is_recording():
            span.set_attributes(dict(attributes))
            if status is not None:
                span.set_attribute("http.response.status_code", status)
            if status is None or status >= HTTPStatus.INTERNAL_SERVER_ERROR:
                # As the semantic conventions of HTTP have it: a client's mistake is none of the server.
                span.set_attribute("error.type", _NO_ANSWER if status is None else str(status))
                span.set_status(Status(StatusCode.ERROR))
        span.end(self._clock())


class ServerSpans:
    """Starts spans with the global tracer provider, or with this one. `clock` returns nanoseconds since 1970."""

    def __init__(
        self, tracer_provider: TracerProvider | None = None, *, clock: Callable[[], int] = time.time_ns
    ) -> None:
        self._tracer = (tracer_provider or get_tracer_provider()).get_tracer("kpl_integrations.ingest")
        self._clock = clock

    def now(self) -> int:
        """Return the nanoseconds since 1970."""
        return self._clock()

    def start(self, name: str, *, started_at: int, parent: tuple[str, str] | None) -> ServerSpan:
        """Start a span at this instant, below `traceparent` and `tracestate` of `parent`, or a trace of its own."""
        context = Context()
        if parent is not None:
            traceparent, tracestate = parent
            carrier = (
                {"traceparent": traceparent, "tracestate": tracestate} if tracestate else {"traceparent": traceparent}
            )
            context = _PROPAGATOR.extract(carrier, context)
        span = self._tracer.start_span(name, context, kind=SpanKind.SERVER, start_time=started_at)
        return ServerSpan(span, self._clock)
