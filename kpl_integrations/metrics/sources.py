"""What is read when somebody looks, rather than told when it happens: counts that the parts keep anyway.

Each function returns a source, to be given to a vendor's `watch`. A source is called for every
scrape, on the scraper's thread, and reads only snapshots.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Final, Protocol

from kpl_core import Producer
from kpl_core.durability.circuit_breaker import BreakerState, CircuitBreaker
from kpl_core.durability.dead_letters import DeadLetterQueue
from kpl_core.durability.spool import Spool
from kpl_integrations.metrics.translation import Sample

__all__ = ["Source", "breaker_source", "dead_letter_source", "producer_source", "spool_source", "token_bucket_source"]

Source = Callable[[], Iterable[Sample]]

_STATE_VALUES: Final = {BreakerState.CLOSED: 0, BreakerState.HALF_OPEN: 1, BreakerState.OPEN: 2}


def producer_source(producer: Producer) -> Source:
    """Return what is accepted, kept and outstanding; with what facts tell of delivered and failed the books close."""

    def read() -> Iterator[Sample]:
        report = producer.report()
        yield Sample("kinesis_producer_accepted_records_total", (), report.accepted)
        yield Sample("kinesis_producer_outstanding_records", (), report.buffered)
        yield Sample("kinesis_producer_kept_records", ("spooled",), report.spooled)
        yield Sample("kinesis_producer_kept_records", ("dead_lettered",), report.dead_lettered)
        yield Sample("kinesis_producer_buffer_bytes", (), producer.buffer_limit.outstanding_bytes)

    return read


def spool_source(spool: Spool) -> Source:
    """Return what the spool holds."""

    def read() -> Iterator[Sample]:
        statistics = spool.statistics()
        yield Sample("kinesis_producer_spool_bytes", (), statistics.record_bytes)
        yield Sample("kinesis_producer_spool_records", (), statistics.records)

    return read


def dead_letter_source(queue: DeadLetterQueue) -> Source:
    """Return how many letters there are, and how many were buried for each reason."""

    def read() -> Iterator[Sample]:
        yield Sample("kinesis_producer_dlq_depth", (), queue.depth)
        for reason, count in queue.buried.copy().items():
            yield Sample("kinesis_producer_dlq_records_total", (reason,), count)

    return read


def breaker_source(breakers: Callable[[], Mapping[tuple[str, str], CircuitBreaker]]) -> Source:
    """Return the state of each breaker, keyed by (stream, shard), as of its latest use."""

    def read() -> Iterator[Sample]:
        for labels, breaker in list(breakers().items()):
            yield Sample("kinesis_producer_breaker_state", labels, _STATE_VALUES[breaker.known_state])

    return read


class _MeteredLimiter(Protocol):
    def get_metrics(self) -> Mapping[str, float]:
        """Return tokens_available, total_rejections and total_refills among others."""


def token_bucket_source(limiter: _MeteredLimiter) -> Source:
    """Return the metrics of a `TokenBucketLimiter`."""

    def read() -> Iterator[Sample]:
        metrics = limiter.get_metrics()
        yield Sample("token_bucket_tokens_available", (), metrics["tokens_available"])
        yield Sample("token_bucket_refill_events_total", (), metrics["total_refills"])
        yield Sample("token_bucket_rejections_total", (), metrics["total_rejections"])

    return read
