"""Sources of what a gateway and a coordinator know; the number of their series is bounded whoever asks."""

import heapq
from collections.abc import Callable, Iterator, Mapping
from typing import Final

from kpl_integrations.metrics.bounded_label import OTHER, BoundedLabel
from kpl_integrations.metrics.sources import Source
from kpl_integrations.metrics.translation import Sample

__all__ = ["coordinator_source", "request_source", "tenant_wait_source"]

_MOST_TENANTS: Final = 20
_MOST_RESOURCES: Final = 1_000


def request_source(answers: Callable[[], Mapping[int, int]], refusals: Callable[[], Mapping[str, int]]) -> Source:
    """Return how many requests were answered with each status, and refused for each reason."""

    def read() -> Iterator[Sample]:
        for status, count in sorted(answers().items()):
            yield Sample("kinesis_ingest_requests_total", (str(status),), count)
        for reason, count in sorted(refusals().items()):
            yield Sample("kinesis_ingest_rejected_total", (reason,), count)

    return read


def tenant_wait_source(waits: Callable[[], Mapping[str, float]], *, most: int = _MOST_TENANTS) -> Source:
    """Return the `most` longest waits, seconds by tenant, and as "other" the longest of the others.

    Ten thousand tenants are twenty-one series at each scrape. Who waits for nothing is not told.
    """

    def read() -> Iterator[Sample]:
        found = [(wait, tenant) for tenant, wait in waits().items() if wait > 0]
        longest = heapq.nlargest(most + 1, found)
        for wait, tenant in longest[:most]:
            yield Sample("kinesis_ingest_tenant_wait_seconds", (tenant,), wait)
        for wait, _ in longest[most:]:
            yield Sample("kinesis_ingest_tenant_wait_seconds", (OTHER,), wait)

    return read


def coordinator_source(lease_age: Callable[[], float], shares: Callable[[], Mapping[str, float]]) -> Source:
    """Return the age of the lease in seconds, and this process' share, 0 to 1, of each resource."""
    bounded = BoundedLabel(_MOST_RESOURCES)

    def read() -> Iterator[Sample]:
        yield Sample("kinesis_coordinator_lease_age_seconds", (), lease_age())
        others: list[float] = []
        for resource, share in shares().items():
            label = bounded(resource)
            if label == OTHER:
                others.append(share)
            else:
                yield Sample("kinesis_coordinator_share", (label,), share)
        if others:
            yield Sample("kinesis_coordinator_share", (OTHER,), min(others))

    return read
