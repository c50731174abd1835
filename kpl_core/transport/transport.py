"""What the producer needs of Kinesis: three calls, whose failures are values."""

from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager
from typing import Final, Protocol

from kpl_core.options.kinesis_limits import MAX_HASH_KEY
from kpl_core.pipeline.shard_map import Shard
from kpl_core.records.put_records import PutRecordsAnswer, PutRecordsEntry, PutRecordsRequest, RequestFailure
from kpl_core.records.record_result import INTERNAL

__all__ = ["KinesisTransport", "as_answer", "as_record_limit", "as_shards"]

# Of an answer that is none.
_SHOWN_CHARACTERS: Final = 100


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


# A transport may be anybody's. What it answers that is no answer must not end the producer, nor leave records that
# nobody knows the end of: it is a failure, as an endpoint's answer that cannot be read is.


def as_answer(answer: object) -> PutRecordsAnswer:
    """Return an answer to PutRecords that is one, else a failure that says what it was."""
    if isinstance(answer, RequestFailure):
        if isinstance(answer.code, str):
            return answer
    elif isinstance(answer, Sequence) and not [
        entry
        for entry in answer
        if not isinstance(entry, PutRecordsEntry)
        or (entry.error_code is not None and not isinstance(entry.error_code, str))
    ]:
        return answer
    return _nonsense("put_records", answer, "a list of PutRecordsEntry or a RequestFailure, whose codes are str")


def as_shards(shards: object) -> Sequence[Shard] | RequestFailure:
    """Return an answer to ListShards that is one, else a failure that says what it was."""
    if isinstance(shards, RequestFailure):
        return shards
    if isinstance(shards, Sequence) and all(isinstance(shard, Shard) and _is_range(shard) for shard in shards):
        return shards
    return _nonsense("list_shards", shards, "a list of Shard, whose hash keys are 0 .. 2**128 - 1, or a RequestFailure")


def as_record_limit(limit: object) -> int | RequestFailure:
    """Return an answer to what one record may hold that is one, else a failure that says what it was."""
    if isinstance(limit, RequestFailure) or (isinstance(limit, int) and limit > 0):
        return limit
    return _nonsense("max_record_bytes", limit, "a number of bytes above 0, or a RequestFailure")


def _is_range(shard: Shard) -> bool:
    # What a transport gave; nothing has checked it.
    first: object = shard.starting_hash_key
    last: object = shard.ending_hash_key
    return isinstance(first, int) and isinstance(last, int) and 0 <= first <= last <= MAX_HASH_KEY


def _nonsense(method: str, answer: object, wanted: str) -> RequestFailure:
    said = repr(answer)
    shown = said if len(said) <= _SHOWN_CHARACTERS else f"{said[:_SHOWN_CHARACTERS]}..."
    return RequestFailure(INTERNAL, f"the transport's {method} answered {shown}; it must return {wanted}")
