"""The exceptions a caller can cause.

Every other failure of a user record is a value: a `RecordResult` with its attempts. An exception means that
the call itself was rejected, and that nothing was reserved, buffered or sent.
"""


class KplError(Exception):
    """The base class of all exceptions that this project raises."""


class ConfigError(KplError, ValueError):
    """An option is out of its bounds. The message states the value, the bound and what to do."""


class InvalidUserRecord(KplError, ValueError):  # noqa: N818 - reads as a sentence at the raise
    """Kinesis can never accept this user record. The message names the field, its value and the bound."""


class MalformedAggregatedRecord(KplError, ValueError):  # noqa: N818
    """Bytes with the KPL's magic and the right MD5 that do not contain a readable aggregated record."""


class BufferFull(KplError):  # noqa: N818
    """Backpressure: the producer buffers as many records or bytes as it is allowed to.

    Nothing was reserved. Wait for room (`await producer.put(...)`), drop the record, or raise
    `max_outstanding_records` or `max_outstanding_bytes`.
    """

    def __init__(self, message: str, *, outstanding_records: int, outstanding_bytes: int) -> None:
        super().__init__(message)
        self.outstanding_records = outstanding_records
        self.outstanding_bytes = outstanding_bytes


class NotSpooled(KplError):  # noqa: N818
    """The spool could not acknowledge the put, because it is full or its disk fails. Nothing was put."""


class ProducerClosed(KplError):  # noqa: N818
    """The producer was closed, or was never entered. It accepts no records."""


class WrongEventLoop(KplError, RuntimeError):  # noqa: N818
    """A producer was used from an event loop other than the one that entered it."""


class ResultPending(KplError):  # noqa: N818
    """The result of a delivery was read before it is known. `await` the delivery instead."""
