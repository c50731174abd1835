"""The calls that the producer makes to Kinesis, checks of what they return, and the choice of a transport.

Failures are values.
"""

import contextlib
import logging
from asyncio import _get_running_loop
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Final, Protocol, TypeVar

import anyio

from kpl_core.errors import ConfigError
from kpl_core.event_loop import run_in_daemon_thread
from kpl_core.options.config import Config
from kpl_core.options.kinesis_limits import MAX_HASH_KEY
from kpl_core.options.validation import without_passwords
from kpl_core.pipeline.shard_map import Shard
from kpl_core.records.put_records import PutRecordsAnswer, PutRecordsEntry, PutRecordsRequest, RequestFailure
from kpl_core.records.record_result import INTERNAL

if TYPE_CHECKING:
    from aiobotocore.session import AioSession

    from kpl_core.transport.service_calls import SessionVars

T = TypeVar("T")

_log: Final = logging.getLogger("kpl_core")
_OTHER_BOTOCORE: Final = "this botocore has other internals"
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


async def default_transport(
    config: Config, session: "AioSession | None" = None, *, session_vars: "SessionVars" = None
) -> KinesisTransport:
    """Return the transport of a configuration; on asyncio it is imported and prepared in a thread.

    Importing botocore and asking for credentials takes a tenth of a second and more, which would stall the loop.
    Without `session`, one is made with `session_vars`.
    """
    if _get_running_loop() is None:  # trio, where the transport then says that it needs asyncio
        return _prepared(config, session, session_vars)
    return await run_in_daemon_thread(partial(_prepared, config, session, session_vars))


def reason_for_botocore(config: Config) -> str | None:
    """Return why a producer of this configuration uses botocore's client; None if it uses connections of its own.

    It reads files, and may ask for credentials.
    """
    try:
        from kpl_core.transport.direct_transport import resolved  # noqa: PLC0415 - 0.1 s
    except ImportError:
        return _OTHER_BOTOCORE
    found = resolved(config)
    return found if isinstance(found, str) else None


def import_transport(config: Config) -> None:
    """Import the modules of the configured transport."""
    # A botocore with other internals has a name less: then its client is used.
    with contextlib.suppress(ImportError):
        import_module("kpl_core.transport.direct_transport")
        if config.wire_path != "stock" and not config.botocore:
            return
    import_module("kpl_core.transport.aiobotocore_transport")


def _prepared(config: Config, session: "AioSession | None", session_vars: "SessionVars") -> KinesisTransport:
    reason = "the caller gave a session"
    if session is None:
        reason = _OTHER_BOTOCORE
        with contextlib.suppress(ImportError):  # as above
            from kpl_core.transport.direct_transport import DirectTransport, resolved  # noqa: PLC0415 - 0.1 s

            found = resolved(config, session_vars)
            if not isinstance(found, str):
                _log.debug("requests use the producer's own connections")
                return DirectTransport(config, found)
            reason = found
    _log.info("requests use botocore's client, because %s", reason)
    from kpl_core.transport.aiobotocore_transport import AiobotocoreTransport, new_session  # noqa: PLC0415 - 0.3 s

    return AiobotocoreTransport(config, session=session or new_session(session_vars))


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
