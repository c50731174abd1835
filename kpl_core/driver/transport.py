"""What the producer needs of Kinesis: three calls, whose failures are values."""

from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager
from typing import Protocol

from kpl_core.put_records import PutRecordsAnswer, PutRecordsRequest, RequestFailure
from kpl_core.shard_map import Shard

__all__ = ["KinesisTransport"]


class KinesisTransport(Protocol):
    """The door to the service. `stream` is a name or an ARN.

    A call catches exactly what can go wrong on its way and returns it as a `RequestFailure`;
    it never swallows a cancellation. Retries are the retrier's, so a call makes one attempt.
    """

    def open(self) -> AbstractAsyncContextManager[object]:
        """Return the context in which calls may be made; it owns connections."""

    async def put_records(self, request: PutRecordsRequest) -> PutRecordsAnswer:
        """Send one PutRecords request; return an entry for each record, or the failure of them all."""

    async def list_shards(self, stream: str) -> Sequence[Shard] | RequestFailure:
        """Return all open shards of a stream, all pages of them."""

    async def max_record_bytes(self, stream: str) -> int | RequestFailure:
        """Return the most bytes of key and data that the stream takes in one record."""
