"""RateLimit-Policy and RateLimit: a tenant's quotas as structured fields (RFC 9651).

    RateLimit-Policy: "records";q=1000;w=1, "bytes";q=1048576;w=1;qu="content-bytes"
    RateLimit: "records";r=0;t=3, "bytes";r=524288

draft-ietf-httpapi-ratelimit-headers (2025): q quota, w window in seconds, qu its unit, r what remains, t after
how many seconds more of it is there.

A share of the queue is as large as the others leave it, so it has no policy: "Situations where throttling constraints
are highly dynamic are better served using the RateLimit field" (section 3).

    RateLimit: "queue-share";r=0;t=3
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import Final

from kpl_integrations.ingest.tenants import QuotaState

__all__ = ["QUEUE_SHARE", "queue_share_headers", "rate_limit_headers"]

QUEUE_SHARE: Final = "queue-share"


def rate_limit_headers(
    states: Sequence[QuotaState], *, retry_after_seconds: int | None = None
) -> tuple[tuple[bytes, bytes], ...]:
    """Return the two fields; `retry_after_seconds` raises `t`, so that nobody is told two different times."""
    if not states:
        return ()
    policies = tuple([(state.name, state.limit, state.window_seconds) for state in states])
    limits = []
    for state in states:
        reset = state.reset_seconds if retry_after_seconds is None else max(state.reset_seconds, retry_after_seconds)
        limits.append(f'"{state.name}";r={state.remaining}' + (f";t={reset}" if reset else ""))
    return ((b"ratelimit-policy", _policy(policies)), (b"ratelimit", ", ".join(limits).encode()))


def queue_share_headers(retry_after_seconds: int) -> tuple[tuple[bytes, bytes], ...]:
    """Return the one field for a tenant whose share of the queue is used up."""
    return ((b"ratelimit", f'"{QUEUE_SHARE}";r=0;t={retry_after_seconds}'.encode()),)


@lru_cache(maxsize=1_024)
def _policy(policies: tuple[tuple[str, int, int], ...]) -> bytes:
    """Return what stays the same as long as the tenant's settings do."""
    units = {"bytes": ';qu="content-bytes"'}
    return ", ".join(f'"{name}";q={limit};w={window}{units.get(name, "")}' for name, limit, window in policies).encode()
