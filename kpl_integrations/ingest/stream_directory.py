"""Which streams exist: each name is looked up once, then remembered, for longer if it exists.

A pipeline, once made, stays for the life of the producer, so none is made for a name that is no stream's.
"""

from collections import OrderedDict
from collections.abc import Callable
from typing import Final

import anyio

from kpl_core import KinesisTransport, RequestFailure
from kpl_integrations.ingest.admission import Refusal, Refused

__all__ = ["StreamDirectory"]

ABSENT_SECONDS: Final = 30.0
MOST_ABSENT: Final = 10_000
MOST_STREAMS: Final = 1_000
# A flood of invented names must not use up the account's ListShards calls.
MOST_LOOKUPS: Final = 4

_ABSENT_CODES: Final = frozenset({"ResourceNotFoundException", "ValidationException", "InvalidArgumentException"})


class StreamDirectory:
    """The streams of one account, as far as somebody asked for them."""

    def __init__(self, transport: KinesisTransport, *, clock: Callable[[], float]) -> None:
        self._transport = transport
        self._clock = clock
        # Read directly by the fast path.
        self.known: set[str] = set()
        self._absent: OrderedDict[str, float] = OrderedDict()
        self._lookups = anyio.CapacityLimiter(MOST_LOOKUPS)

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
