"""Look up stream names once and cache the answers; a missing stream is looked up again after 30 s.

A stream that is deleted while the gateway runs is looked up again as soon as Kinesis has refused a put to it.

A pipeline stays for the life of the producer, so none is created for a name without a stream. A stream has one
pipeline for its name and its ARN. With two pipelines, each would use the full limits of the shards.

If the gateway may not list shards, a name counts as unconfirmed until a record was delivered to it. A tenant may have
20 unconfirmed names at once, each for an hour, and 40 until the process ends. All tenants together may have 200. So the
number of pipelines for invented names is bounded, and one tenant cannot use up the room of the others.
"""

import logging
import math
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any, Final, NamedTuple

import anyio

from kpl_core.transport import KinesisTransport, RequestFailure
from kpl_integrations.ingest.admission.refusals import Refusal, Refused
from kpl_integrations.ingest.streams.call_budget import CallBudget, describe_calls, lookup_calls

_log: Final = logging.getLogger(__name__)

ABSENT_SECONDS: Final = 30.0
# Failed lookups are logged once in so many seconds.
_QUIET_SECONDS: Final = 60.0
MOST_ABSENT: Final = 10_000
MOST_STREAMS: Final = 1_000
# Each unconfirmed name costs a pipeline, which stays and calls ListShards again and again. So a tenant may have 20 at
# once and 40 in the life of the process, and all tenants together 200.
MOST_UNCONFIRMED: Final = 20
MOST_UNCONFIRMED_EVER: Final = 40
MOST_UNCONFIRMED_IN_ALL: Final = 200
UNCONFIRMED_SECONDS: Final = 3_600.0
# Another gateway has to serve further streams, so a retry helps only after a change of the deployment.
_FULL_RETRY_SECONDS: Final = 60.0

# The codes of Kinesis for a name that has no stream or is invalid.
NO_STREAM: Final = "ResourceNotFoundException"
_ABSENT_CODES: Final = frozenset({NO_STREAM, "ValidationException", "InvalidArgumentException"})


class UnconfirmedNames:
    """Stream names of each tenant that may have no stream: a bounded number, each usable for a bounded time. Pure.

    A name keeps its place until it is discarded, also after it expired, because its pipeline stays.
    """

    __slots__ = ("_by_tenant", "names")

    def __init__(self) -> None:
        # By tenant, names with the instant at which they expire.
        self._by_tenant: dict[str, dict[str, float]] = {}
        # By name, the tenants that used it.
        self.names: dict[str, set[str]] = {}

    def has(self, tenant: str, name: str, now: float) -> bool:
        """Return True if the tenant has this name."""
        names = self._by_tenant.get(tenant)
        return names is not None and names.get(name, now) > now

    def add(self, tenant: str, name: str, now: float) -> str | None:
        """Add a name that the tenant does not have. Return the bound that forbids it, or None."""
        names = self._by_tenant.get(tenant, {})
        if sum(until > now for until in names.values()) >= MOST_UNCONFIRMED:
            return f"tenant {tenant} uses {MOST_UNCONFIRMED} streams"
        if name not in names and len(names) >= MOST_UNCONFIRMED_EVER:
            return f"tenant {tenant} has used {MOST_UNCONFIRMED_EVER} streams"
        if name not in self.names and len(self.names) >= MOST_UNCONFIRMED_IN_ALL:
            return f"the tenants of this gateway have used {MOST_UNCONFIRMED_IN_ALL} streams"
        names[name] = now + UNCONFIRMED_SECONDS
        self._by_tenant[tenant] = names
        self.names.setdefault(name, set()).add(tenant)
        return None

    def discard(self, name: str) -> None:
        """Remove a name of all tenants."""
        for tenant in self.names.pop(name, ()):
            names = self._by_tenant[tenant]
            del names[name]
            if not names:
                del self._by_tenant[tenant]


class FailedLookup(NamedTuple):
    """A stream that could not be looked up, when, and the code of the failure."""

    stream: str
    failed_at: float
    code: str


class _Lookup:
    """A question to Kinesis that several requests of one tenant wait for."""

    __slots__ = ("done", "failure")

    def __init__(self) -> None:
        self.done = anyio.Event()
        self.failure: Refused | None = None


class StreamDirectory:
    """The streams of one account that clients asked for.

    `has_pipeline` says whether the producer has a pipeline for a stream, as it has for each stream of its spool. Then
    the gateway accepts records of it while Kinesis does not answer.
    """

    def __init__(
        self,
        transport: KinesisTransport,
        *,
        clock: Callable[[], float],
        has_pipeline: Callable[[str], bool] = lambda _: False,
        arn_of: Callable[[str], Awaitable[str | None]] | None = None,
    ) -> None:
        self._transport = transport
        self._clock = clock
        self._has_pipeline = has_pipeline
        self._arn_of = arn_of or partial(ask_arn, transport)
        # The part before the name of all ARNs of this account and region, once one is known.
        self._own_prefix: str | None = None
        # Names without an ARN, and names without a stream, with the end of their cache entries.
        self._no_arn: OrderedDict[str, float] = OrderedDict()
        self._absent: OrderedDict[str, float] = OrderedDict()
        # Read directly by the records route.
        self.known: set[str] = set()
        # Those that Kinesis has refused a put to because there is none, until it takes one.
        self._doubted: set[str] = set()
        self._unconfirmed = UnconfirmedNames()
        self._logged_at = -math.inf
        # The latest lookup, if Kinesis did not answer it.
        self.failed_lookup: FailedLookup | None = None
        self._lookups: dict[tuple[str, str, str], _Lookup] = {}
        self._lookup_calls = lookup_calls()
        # Also for the questions that the Kinesis API of the gateway forwards.
        self.describe_calls = describe_calls()

    async def admit(self, stream: str, allows: Callable[[str], bool], *, tenant: str) -> str | None:
        """Return the canonical name of a stream, or None if the tenant may not use it.

        `allows` decides for a name or an ARN. It is called before any lookup, so a tenant without permission learns
        nothing about the stream. An ARN of another account, or one that Kinesis cannot resolve, is returned unchanged.

        Raises:
            Refused: as `require`, or Kinesis could not be asked for an ARN; this failure is not cached.
        """
        if not (stream.isascii() and stream.isprintable()):
            # The pattern of ARNs allows control characters, and streams are labels of metrics.
            detail = "this is not a stream; its name or ARN has printable ASCII characters only"
            raise Refused(Refusal.UNKNOWN_STREAM, detail)
        name = stream.rpartition("/")[2] if stream.startswith("arn:") else stream
        if not (allows(stream) or allows(name)):
            return None
        if name != stream and await self._own_arn(name, tenant) == stream:
            stream = name
        elif not allows(stream):
            return None
        await self.require(stream, tenant)
        return stream

    async def _own_arn(self, name: str, tenant: str) -> str | None:
        while self._own_prefix is None:
            if self._no_arn.get(name, 0.0) > self._clock():
                return None
            await self._ask("arn", name, tenant, self.describe_calls, self._look_up_arn)
        return self._own_prefix + name

    async def _look_up_arn(self, name: str, _tenant: str) -> None:
        found = await self._arn_of(name)
        if found is None:
            _remember(self._no_arn, name, self._clock() + ABSENT_SECONDS)
        else:
            self._own_prefix = found.removesuffix(name)

    async def require(self, stream: str, tenant: str) -> None:
        """Return if the stream exists, or if the gateway may not list its shards.

        Raises:
            Refused: the stream does not exist, or Kinesis could not be asked.
        """
        while not self._is_known(stream, tenant):
            await self._ask("stream", stream, tenant, self._lookup_calls, self._look_up)

    def confirm(self, stream: str) -> None:
        """Remember that a record was delivered to this stream, so that it exists."""
        # This runs for every delivered record, also of the spool, whose replay goes on while clients get 404.
        self._doubted.discard(stream)
        if self._absent:
            _ = self._absent.pop(stream, None)
        if stream in self._unconfirmed.names and len(self.known) < MOST_STREAMS:
            self._unconfirmed.discard(stream)
            self.known.add(stream)

    def doubt(self, stream: str) -> None:
        """Look a stream up again before the next put to it: Kinesis has answered one that there is none."""
        if stream in self.known and stream not in self._doubted:
            self.known.discard(stream)
            self._doubted.add(stream)
            _log.warning("Kinesis says that stream %r does not exist any more; the next request looks it up", stream)
        elif stream in self.known or stream in self._unconfirmed.names:
            # It was looked up again and takes no puts all the same, or it may not be looked up.
            self.known.discard(stream)
            _remember(self._absent, stream, self._clock() + ABSENT_SECONDS)

    async def _ask(
        self, what: str, name: str, tenant: str, calls: CallBudget, ask: Callable[[str, str], Awaitable[None]]
    ) -> None:
        """Ask Kinesis once for all concurrent requests of a tenant, within the budget of calls."""
        key = (what, name, tenant)
        running = self._lookups.get(key)
        if running is not None:
            await running.done.wait()
            if running.failure is not None:
                raise running.failure
            return
        lookup = self._lookups[key] = _Lookup()
        try:
            async with calls.turn(tenant) as is_granted:
                if not is_granted:
                    raise _too_many(what, name, tenant)
                await ask(name, tenant)
        except Refused as refused:
            lookup.failure = refused
            raise
        finally:
            del self._lookups[key]
            lookup.done.set()

    async def _look_up(self, stream: str, tenant: str) -> None:
        if len(self.known) >= MOST_STREAMS:
            detail = f"this gateway already serves {MOST_STREAMS:,} streams; run another gateway for more"
            raise Refused(Refusal.NO_ROOM, detail, retry_after=_FULL_RETRY_SECONDS)
        answer = await self._transport.list_shards(stream)
        self.failed_lookup = None
        if isinstance(answer, RequestFailure) and answer.code in _ABSENT_CODES:
            _remember(self._absent, stream, self._clock() + ABSENT_SECONDS)
            raise self._unknown(stream)
        is_forbidden = isinstance(answer, RequestFailure) and answer.code.startswith("AccessDenied")
        is_new = stream not in self._unconfirmed.names and stream not in self._doubted
        if not isinstance(answer, RequestFailure):
            self._unconfirmed.discard(stream)
            self.known.add(stream)
        elif not is_forbidden and is_new and self._has_pipeline(stream):
            self._log_failure(stream, answer, "but the spool has records of it, so it accepts more")
            self.known.add(stream)
        elif not is_forbidden:
            self.failed_lookup = FailedLookup(stream, self._clock(), answer.code)
            self._log_failure(stream, answer, "so its requests get 503")
            detail = (
                f"stream {stream} could not be looked up ({answer.code}); the gateway tries again with the next request"
            )
            raise Refused(Refusal.STREAM_UNCERTAIN, detail)
        # The gateway may be allowed to put without being allowed to list. If the stream does not exist, each record
        # fails.
        elif (reached := self._unconfirmed.add(tenant, stream, self._clock())) is not None:
            detail = (
                f"{reached} that the gateway may not list and that took no record yet; correct their names, or allow "
                f"the gateway kinesis:ListShards"
            )
            raise Refused(Refusal.NO_ROOM, detail, retry_after=_FULL_RETRY_SECONDS)

    def _log_failure(self, stream: str, failure: RequestFailure, consequence: str) -> None:
        now = self._clock()
        if now - self._logged_at >= _QUIET_SECONDS:
            self._logged_at = now
            text = "stream %r could not be looked up, %s: %s: %s; logged once a minute at most"
            _log.warning(text, stream, consequence, failure.code, failure.message)

    def _is_known(self, stream: str, tenant: str) -> bool:
        """Return True if the tenant may put to the stream; raise Refused if it was absent a moment ago."""
        if self._absent.get(stream, 0.0) > self._clock():
            raise self._unknown(stream)
        self._absent.pop(stream, None)
        return stream in self.known or self._unconfirmed.has(tenant, stream, self._clock())

    @staticmethod
    def _unknown(stream: str) -> Refused:
        detail = (
            f"there is no stream {stream} in this account and region; a new one is found within {ABSENT_SECONDS:g} s"
        )
        return Refused(Refusal.UNKNOWN_STREAM, detail)


def _too_many(what: str, name: str, tenant: str) -> Refused:
    detail = f"{what} {name} was not looked up, because tenant {tenant} asks for too many; send the request again"
    return Refused(Refusal.STREAM_UNCERTAIN, detail)


def _remember(names: OrderedDict[str, float], name: str, until: float) -> None:
    names[name] = until
    names.move_to_end(name)
    if len(names) > MOST_ABSENT:
        names.popitem(last=False)


async def ask_arn(transport: object, name: str) -> str | None:
    """Return the ARN of this account's stream with this name; None if there is none, or the transport cannot ask.

    Only the ARN distinguishes this account's stream from another account's stream with the same name.

    Raises:
        Refused: Kinesis could not be asked. Returning None here would create a second pipeline for the stream.
    """
    call: Any = getattr(transport, "call", None)
    if call is None:
        return None
    answer: str | RequestFailure = await call("describe_stream_summary", _arn_in, name)
    if not isinstance(answer, RequestFailure):
        return answer
    code = answer.code
    if code in _ABSENT_CODES or code.startswith("AccessDenied"):
        return None
    detail = f"the ARN of stream {name} could not be looked up ({code}); the gateway tries again with the next request"
    raise Refused(Refusal.STREAM_UNCERTAIN, detail)


def _arn_in(answer: Any) -> str:  # noqa: ANN401 - any JSON value
    arn: str = answer["StreamDescriptionSummary"]["StreamARN"]
    return arn
