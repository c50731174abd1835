"""The calls that the producer makes to Kinesis, and checks of what they return.

Failures are values.
"""

import logging
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager
from importlib.util import find_spec
from typing import Final, Protocol, TypeVar

import anyio

from kpl_core.errors import ConfigError
from kpl_core.options.config import Config
from kpl_core.options.kinesis_limits import MAX_HASH_KEY
from kpl_core.options.validation import without_passwords
from kpl_core.pipeline.shard_map import Shard
from kpl_core.records.put_records import PutRecordsAnswer, PutRecordsEntry, PutRecordsRequest, RequestFailure
from kpl_core.records.record_result import INTERNAL

T = TypeVar("T")

_log: Final = logging.getLogger("kpl_core")
_TEXT: Final[tuple[type, ...]] = (str, type(None))
# How much of an invalid answer an error message quotes.
_SHOWN_CHARACTERS: Final = 100
# How much longer than its own timeouts a call may take until the producer gives it up.
_GRACE_SECONDS: Final = 1.0
# A listing of shards may need a call for each page of 1,000.
LISTING_CALLS: Final = 20


class KinesisTransport(Protocol):
    """The interface to the service. `stream` is a name or an ARN.

    A call returns every network or service error as a `RequestFailure`, and lets a cancellation pass. It makes one
    attempt, because the retrier decides about retries. A call that raises an `Exception`, or does not return in time,
    counts as a failed request (`answer_within`).
    """

    def open(self) -> AbstractAsyncContextManager[object]:
        """Return the context within which calls may be made. It owns the connections."""

    async def put_records(self, request: PutRecordsRequest) -> PutRecordsAnswer:
        """Send one PutRecords request. Return one entry for each record, or the failure of the whole request."""

    async def list_shards(self, stream: str) -> Sequence[Shard] | RequestFailure:
        """Return all open shards of a stream, from all pages."""

    async def max_record_bytes(self, stream: str) -> int | RequestFailure:
        """Return the stream's limit on one record: the bytes of key and data."""


def require_packages(config: Config) -> None:
    """Check that what the configured transport imports later is installed.

    Raises:
        ConfigError: a package is missing.
    """
    for package, extra in {"aiobotocore": "", "cbor2": "[cbor]"}.items():
        if (not extra or config.wire_path == "cbor") and find_spec(package) is None:
            message = f"wire_path is {config.wire_path!r}, which needs {package}; pip install 'kpl-integrations{extra}'"
            raise ConfigError(message)


# A user can write a transport. If it returns an invalid answer, raises or never returns, the request fails as it does
# for an answer that cannot be parsed. So the producer goes on, and every record gets a result.


def call_seconds(config: Config) -> float:
    """Return how many seconds one call of a transport may take: its own timeouts, and a second."""
    return (config.request_timeout_ms + config.connect_timeout_ms) / 1000 + _GRACE_SECONDS


async def answer_within(
    seconds: float, method: str, call: Callable[[], Awaitable[object]], check: Callable[[object], T | RequestFailure]
) -> T | RequestFailure:
    """Return the checked answer of a transport's call; a failure if it raises, or takes more than `seconds`.

    Any exception counts, such as a MemoryError while the body is built. A cancellation passes.
    """
    with anyio.move_on_after(seconds):
        try:
            return check(await call())
        except Exception as error:  # noqa: BLE001 - the code of a user, or a lack of memory
            return RequestFailure(INTERNAL, without_passwords(f"the transport's {method} raised {error!r}"))
    return RequestFailure(INTERNAL, f"the transport's {method} did not return within {seconds:g} s")


def as_answer(answer: object) -> PutRecordsAnswer:
    """Return `answer` if it is a valid answer to PutRecords, else a failure that quotes it."""
    if isinstance(answer, RequestFailure):
        if isinstance(answer.code, str):
            return answer
    elif isinstance(answer, Sequence) and not [
        entry
        for entry in answer
        if not isinstance(entry, PutRecordsEntry)
        or not isinstance(entry.error_code, _TEXT)
        or not isinstance(entry.shard_id, _TEXT)
    ]:
        return answer
    return _invalid_answer("put_records", answer, "a list of PutRecordsEntry or a RequestFailure, with str")


def as_shards(shards: object) -> Sequence[Shard] | RequestFailure:
    """Return `shards` if it is a valid answer to ListShards, else a failure that quotes it."""
    if isinstance(shards, RequestFailure):
        return shards
    if isinstance(shards, Sequence) and all(isinstance(shard, Shard) and _is_range(shard) for shard in shards):
        return shards
    return _invalid_answer(
        "list_shards", shards, "a list of Shard, with str and hash keys of 0 .. 2**128 - 1, or a RequestFailure"
    )


def as_record_limit(limit: object) -> int | RequestFailure:
    """Return `limit` if it is a valid record limit, else a failure that quotes it."""
    if isinstance(limit, RequestFailure) or (isinstance(limit, int) and limit > 0):
        return limit
    return _invalid_answer("max_record_bytes", limit, "a number of bytes above 0, or a RequestFailure")


def _is_range(shard: Shard) -> bool:
    # The annotations prove nothing here: these values come from the transport.
    name: object = shard.shard_id
    first: object = shard.starting_hash_key
    last: object = shard.ending_hash_key
    return (
        isinstance(name, str)
        and isinstance(first, int)
        and isinstance(last, int)
        and 0 <= first <= last <= MAX_HASH_KEY
    )


def _invalid_answer(method: str, answer: object, wanted: str) -> RequestFailure:
    text = repr(answer)
    shown = text if len(text) <= _SHOWN_CHARACTERS else f"{text[:_SHOWN_CHARACTERS]}..."
    return RequestFailure(INTERNAL, f"the transport's {method} returned {shown}; it must return {wanted}")
