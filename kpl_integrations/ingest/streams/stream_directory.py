"""Which streams exist: each name is looked up once, then remembered, for longer if it exists.

A pipeline, once made, stays for the life of the producer, so none is made for a name that is no stream's. And a
stream has one pipeline, by whichever of its names it is asked for: an ARN that is this account's own is the stream's
name, or each of two pipelines would use up its shards' limits.
"""

from collections import OrderedDict
from collections.abc import Awaitable, Callable
from typing import Final

import anyio

from kpl_core import KinesisTransport, RequestFailure
from kpl_integrations.ingest.admission.admission import Refusal, Refused
from kpl_integrations.ingest.streams.own_arn import ask_arn

__all__ = ["StreamDirectory"]

ABSENT_SECONDS: Final = 30.0
MOST_ABSENT: Final = 10_000
MOST_STREAMS: Final = 1_000
# A flood of invented names must not use up the account's ListShards calls.
MOST_LOOKUPS: Final = 4

_ABSENT_CODES: Final = frozenset({"ResourceNotFoundException", "ValidationException", "InvalidArgumentException"})


class StreamDirectory:
    """The streams of one account, as far as somebody asked for them."""

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
        # By name, and until when where Kinesis could not say.
        self._arns: dict[str, str] = {}
        self._no_arn: OrderedDict[str, float] = OrderedDict()
        # Read directly by the fast path.
        self.known: set[str] = set()
        self._absent: OrderedDict[str, float] = OrderedDict()
        self._lookups = anyio.CapacityLimiter(MOST_LOOKUPS)

    async def admit(self, stream: str, allows: Callable[[str], bool]) -> str | None:
        """Return the one name under which the gateway knows a stream, None if whoever asks may not use it.

        `allows` is asked about a name or an ARN. Who may not use the stream learns nothing of it. An ARN of another
        account, or one of which Kinesis does not say whose it is, stays as it is.

        Raises:
            Refused: as `require`, or Kinesis could not be asked whose an ARN is; nothing is remembered of that.
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
        """Return if the stream exists, or if it cannot be told because listing shards is not allowed.

        Raises:
            Refused: it does not exist, or Kinesis could not be asked.
        """
        if stream in self.known:
            return
        self._require_not_absent(stream)
        async with self._lookups:
            # Somebody else may have asked meanwhile.
            if stream in self.known:
                return
            self._require_not_absent(stream)
            if len(self.known) >= MOST_STREAMS:
                detail = f"this gateway serves {MOST_STREAMS:,} streams already; run another for more"
                raise Refused(Refusal.NO_ROOM, detail, retry_after=60.0)
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
            # Who may put and not list still may put; what does not exist then fails record by record.
            self.known.add(stream)
            return
        detail = f"stream {stream} could not be looked up ({code}); the gateway asks again with the next request"
        raise Refused(Refusal.STREAM_UNCERTAIN, detail, retry_after=2.0)

    def _require_not_absent(self, stream: str) -> None:
        until = self._absent.get(stream)
        if until is None:
            return
        if until > self._clock():
            raise self._unknown(stream)
        del self._absent[stream]

    @staticmethod
    def _unknown(stream: str) -> Refused:
        detail = (
            f"there is no stream {stream} in this account and region; a new one is seen within {ABSENT_SECONDS:g} s"
        )
        return Refused(Refusal.UNKNOWN_STREAM, detail)
