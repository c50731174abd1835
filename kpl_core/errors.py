"""The exceptions a caller can cause.

Everything else that can go wrong with a user record is a value: a
`RecordResult` with its attempts. An exception always means that the call
itself was refused and that nothing was reserved, buffered or sent.
"""

__all__ = [
    "BufferFull",
    "ConfigError",
    "InvalidUserRecord",
    "KplError",
    "MalformedAggregatedRecord",
    "NotSpooled",
    "ProducerClosed",
    "ResultPending",
    "WrongEventLoop",
]


class KplError(Exception):
    """Root of all exceptions raised by this project."""


class ConfigError(KplError, ValueError):
    """A setting is out of range; the message states value, bound and what to do."""


class InvalidUserRecord(KplError, ValueError):  # noqa: N818 - reads as a sentence where it is raised
    """A user record can never be accepted by Kinesis; the message names field, value and bound."""


class MalformedAggregatedRecord(KplError, ValueError):  # noqa: N818
    """Bytes that carry the KPL's magic and the right MD5, but no readable aggregated record."""


class BufferFull(KplError):  # noqa: N818
    """Backpressure: the producer holds as many records or bytes as it is allowed to.

    Nothing was reserved. Wait for room (`await producer.put(...)`), shed the
    record, or raise `max_outstanding_records` / `max_outstanding_bytes`.
    """

    def __init__(self, message: str, *, outstanding_records: int, outstanding_bytes: int) -> None:
        super().__init__(message)
        self.outstanding_records = outstanding_records
        self.outstanding_bytes = outstanding_bytes


class NotSpooled(KplError):  # noqa: N818
    """A put that is acknowledged by the spool was not: the spool is full or its disk fails; nothing was put."""


class ProducerClosed(KplError):  # noqa: N818
    """The producer was closed, or was never entered; it takes no more records."""


class WrongEventLoop(KplError, RuntimeError):  # noqa: N818
    """A producer was used from another event loop than the one that entered it."""


class ResultPending(KplError):  # noqa: N818
    """The result of a delivery was read before it was known; `await` the delivery instead."""
