"""The current trace, from opentelemetry-api where it is installed, else none."""

from collections.abc import Callable

__all__ = ["current_trace"]


def _no_trace() -> tuple[str, str] | None:
    return None


def _from_opentelemetry() -> Callable[[], tuple[str, str] | None]:
    try:
        from opentelemetry.context import get_current  # noqa: PLC0415 - an application's choice
        from opentelemetry.trace import format_span_id, format_trace_id, get_current_span  # noqa: PLC0415
    except ImportError:
        return _no_trace

    def current() -> tuple[str, str] | None:
        context = get_current()
        # Outside of all spans, which is where most log lines are when nobody traces.
        if not context:
            return None
        span = get_current_span(context).get_span_context()
        return (format_trace_id(span.trace_id), format_span_id(span.span_id)) if span.is_valid else None

    return current


# Trace id and span id in lower-case hex, or None outside of a span.
current_trace = _from_opentelemetry()
