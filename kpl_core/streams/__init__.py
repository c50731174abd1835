from kpl_core.streams.description import AnyStream, ScopedStream, Stream
from kpl_core.streams.fair_merge import fair_merge
from kpl_core.streams.rate_limited import rate_limited

__all__ = ["AnyStream", "ScopedStream", "Stream", "fair_merge", "rate_limited"]
