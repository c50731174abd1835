"""Nothing that an exporter does is itself traced, or logged back into what it exports.

Instrumentations heed the key that suppresses them. Log records know of no such key, and a batch processor takes
their context away; but they keep the trace they were made in. So the exporter works inside a span that is never
recorded, of a trace that is its own.
"""

import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from opentelemetry.context import _SUPPRESS_INSTRUMENTATION_KEY, Context, attach, detach, set_value
from opentelemetry.trace import NonRecordingSpan, SpanContext, set_span_in_context

__all__ = ["be_quiet", "is_ours", "quietly"]

_OURS: Final = SpanContext(
    trace_id=secrets.randbits(128) | 1, span_id=secrets.randbits(64) | 1, is_remote=False
)  # its flags say: not sampled


def be_quiet() -> None:
    """Silence the current thread for good: it is the exporter's own."""
    attach(_silence())


@contextmanager
def quietly() -> Iterator[None]:
    """Silence what is done inside, whichever thread does it."""
    token = attach(_silence())
    try:
        yield
    finally:
        detach(token)


def is_ours(trace_id: int | None) -> bool:
    """Say whether something was made in an exporter's own work; exporting it would never end."""
    return trace_id == _OURS.trace_id


def _silence() -> Context:
    suppressed = set_value(_SUPPRESS_INSTRUMENTATION_KEY, value=True)
    return set_span_in_context(NonRecordingSpan(_OURS), suppressed)
