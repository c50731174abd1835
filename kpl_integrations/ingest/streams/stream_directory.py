"""Look up stream names once and cache the answers; a missing stream is looked up again after 30 s.

A pipeline stays for the life of the producer, so none is created for a name without a stream. A stream has one
pipeline for its name and its ARN. With two pipelines, each would use the full limits of the shards.
"""

from collections import OrderedDict
from collections.abc import Awaitable, Callable
from typing import Any, Final

import anyio
from botocore.exceptions import ClientError, ParamValidationError

from kpl_core import KinesisTransport, RequestFailure
from kpl_integrations.ingest.admission.refusals import Refusal, Refused

ABSENT_SECONDS: Final = 30.0
MOST_ABSENT: Final = 10_000
MOST_STREAMS: Final = 1_000
# Concurrent lookups. A flood of invented names must not use up the account's ListShards calls.
MOST_LOOKUPS: Final = 4
# Another gateway has to serve further streams, so a retry helps only after a change of the deployment.
_FULL_RETRY_SECONDS: Final = 60.0

# The codes of Kinesis for a name that has no stream or is invalid.
_ABSENT_CODES: Final = frozenset({"ResourceNotFoundException", "ValidationException", "InvalidArgumentException"})


class StreamDirectory:
    """The streams of one account that clients asked for."""

    def __init__(
        self,
        transport: KinesisTransport,
        *,
        clock: Callable[[], float],
        arn_of: Callable[[str], Awaitable[str | None]] | None = None,
    ) -> None:
        self._transport = transport
        self._clock = clock
        self._arn_of = arn_of or (lambda name: ask_arn(getattr(transport, "client", None), name))
        # ARNs by name, and names without an ARN with the end of their cache entry.
        self._arns: dict[str, str] = {}
        self._no_arn: OrderedDict[str, float] = OrderedDict()
        # Read directly by the records route.
        self.known: set[str] = set()
        self._absent: OrderedDict[str, float] = OrderedDict()
        self._lookups = anyio.CapacityLimiter(MOST_LOOKUPS)

    async def admit(self, stream: str, allows: Callable[[str], bool]) -> str | None:
        """Return the canonical name of a stream, or None if the tenant may not use it.

        `allows` decides for a name or an ARN. It is called before any lookup, so a tenant without permission learns
        nothing about the stream. An ARN of another account, or one that Kinesis cannot resolve, is returned unchanged.

        Raises:
            Refused: as `require`, or Kinesis could not be asked for an ARN; this failure is not cached.
        """
        name = stream.rpartition("/")[2] if stream.startswith("arn:") else stream
        if not (allows(stream) or allows(name)):
            return None
        if name != stream and await self._own_arn(name) == stream:
            stream = name
        elif not allows(stream):
            return None
        await self.require(stream)
        return stream

    async def _own_arn(self, name: str) -> str | None:
        if name in self._arns:
            return self._arns[name]
        if self._no_arn.get(name, 0.0) > self._clock():
            return None
        async with self._lookups:
            found = self._arns.get(name) or await self._arn_of(name)
        if found is None:
            self._no_arn[name] = self._clock() + ABSENT_SECONDS
            if len(self._no_arn) > MOST_ABSENT:
                self._no_arn.popitem(last=False)
        elif len(self._arns) < MOST_STREAMS:
            self._arns[name] = found
        return found

    async def require(self, stream: str) -> None:
        """Return if the stream exists, or if the gateway may not list its shards.

        Raises:
            Refused: the stream does not exist, or Kinesis could not be asked.
        """
        if self._is_known(stream):
            return
        async with self._lookups:
            # Another task may have looked it up meanwhile.
            if self._is_known(stream):
                return
            if len(self.known) >= MOST_STREAMS:
                detail = f"this gateway already serves {MOST_STREAMS:,} streams; run another gateway for more"
                raise Refused(Refusal.NO_ROOM, detail, retry_after=_FULL_RETRY_SECONDS)
            answer = await self._transport.list_shards(stream)
        if isinstance(answer, RequestFailure):
            self._failed(stream, answer.code)
        else:
            self.known.add(stream)

    def _failed(self, stream: str, code: str) -> None:
        if code in _ABSENT_CODES:
            self._absent[stream] = self._clock() + ABSENT_SECONDS
            if len(self._absent) > MOST_ABSENT:
                self._absent.popitem(last=False)
            raise self._unknown(stream)
        if code.startswith("AccessDenied"):
            # The gateway may be allowed to put without being allowed to list. If the stream does not exist, each
            # record fails.
            self.known.add(stream)
            return
        detail = f"stream {stream} could not be looked up ({code}); the gateway tries again with the next request"
        raise Refused(Refusal.STREAM_UNCERTAIN, detail)

    def _is_known(self, stream: str) -> bool:
        """Return True for a known stream; raise Refused if it was absent a moment ago."""
        if self._absent.get(stream, 0.0) > self._clock():
            raise self._unknown(stream)
        self._absent.pop(stream, None)
        return stream in self.known

    @staticmethod
    def _unknown(stream: str) -> Refused:
        detail = (
            f"there is no stream {stream} in this account and region; a new one is found within {ABSENT_SECONDS:g} s"
        )
        return Refused(Refusal.UNKNOWN_STREAM, detail)


async def ask_arn(client: Any, name: str) -> str | None:  # noqa: ANN401 - botocore has no types
    """Return the ARN of this account's stream with this name; None if there is none, or without a client.

    Only the ARN distinguishes this account's stream from another account's stream with the same name. `client` is an
    aiobotocore client, or None.

    Raises:
        Refused: Kinesis could not be asked. Returning None here would create a second pipeline for the stream.
    """
    if client is None:
        return None
    try:
        answer = await client.describe_stream_summary(StreamName=name)
        arn: str = answer["StreamDescriptionSummary"]["StreamARN"]
    except ParamValidationError:
        return None
    except ClientError as error:
        code = str(error.response.get("Error", {}).get("Code", ""))
        if code in _ABSENT_CODES or code.startswith("AccessDenied"):
            return None
        raise _uncertain(name, code or type(error).__name__) from error
    except Exception as error:
        # Not reachable, an invalid answer, or an exception of the session's credentials and event handlers.
        raise _uncertain(name, type(error).__name__) from error
    return arn


def _uncertain(name: str, why: str) -> Refused:
    detail = f"the ARN of stream {name} could not be looked up ({why}); the gateway tries again with the next request"
    return Refused(Refusal.STREAM_UNCERTAIN, detail)
