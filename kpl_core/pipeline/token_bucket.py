"""A token bucket with several token streams, such as records and bytes: a request takes from all of them or none.

A Kinesis shard meters records and bytes at once, so one bucket has one *token stream* for each. Tokens are computed
at every query; there is no task, timer or sleep. (Seed: aiokpl's token bucket; KPL, `aws/utils/token_bucket.h`.)

We differ in one point: a stream does not count tokens. It stores what was spent since it was last full, and derives
*when* a cost may be taken (the virtual scheduling form of the Generic Cell Rate Algorithm):

    full again   = since + spent / rate
    cost admitted = since + (spent + min(cost, capacity) - capacity) / rate

A counter that is topped up at every query adds a rounding error each time. It can then report a wait of a nanosecond
again and again. Here `spent` is an exact sum for whole costs, up to 2**53 between two idle moments, so each answer has
one rounding error. `try_take` and `ready_at` compare the same number: a caller that waits until `ready_at` is admitted.
"""

import math
import time
from collections.abc import Callable, Iterable, Sequence

from kpl_core.errors import ConfigError


class _TokenStream:
    """One metered quantity. It was last full at `since`; `spent` tokens left it from then on."""

    __slots__ = ("capacity", "rate", "since", "spent")

    def __init__(self, rate: float, capacity: float) -> None:
        self.rate = rate
        self.capacity = capacity
        # Full: no time is needed before the first token is taken.
        self.since = -math.inf
        self.spent = 0.0

    def admitted_at(self, cost: float) -> float:
        """Return the instant from which `cost` may be taken; a cost above the capacity needs a full stream."""
        capacity = self.capacity
        return self.since + (self.spent + (cost if cost < capacity else capacity) - capacity) / self.rate

    def take(self, cost: float, now: float) -> None:
        # Strictly before `now`: on a clock coarser than one token's worth of time the sum can
        # round to `since` itself, and what was spent at this very instant must not be forgotten.
        if self.since + self.spent / self.rate < now:
            self.since = now
            self.spent = cost
        else:
            self.spent += cost

    def missing(self, now: float) -> float:
        """Return how far below its capacity the stream is at `now`; more than the capacity means debt."""
        if self.since + self.spent / self.rate < now:
            return 0.0
        return max(0.0, self.spent - self.rate * (now - self.since))


class TokenBucket:
    """A bucket of one or more token streams; every cost is taken from all of them or from none.

    Starts full. A cost above a stream's capacity passes when that stream is full and leaves it
    in debt, so that nothing queued behind it is blocked without end. While a stream is in debt it
    admits nothing, a cost of zero included. In any window of `t` seconds a stream gives at most
    `capacity + rate * t` tokens (and what one cost exceeds the capacity by).

    Not thread-safe. Reads `clock` only when a call leaves `now` out; use one or the other.
    An instant earlier than the latest one seen counts as the latest: a clock that steps
    back removes no tokens, and one that swings back and forth earns none.

    Args:
        streams: `(rate, capacity)` of each stream: tokens per second, and the most it holds.
        now: the instant of construction in seconds, if the caller's clock must not be read.
        clock: returns seconds and never goes back.

    Raises:
        ConfigError: no stream at all, or a rate or capacity that is not finite and above 0.
    """

    __slots__ = ("_clock", "_latest", "_streams")

    def __init__(
        self,
        streams: Iterable[tuple[float, float]],
        *,
        now: float | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._streams = tuple(_TokenStream(_positive("rate", r), _positive("capacity", c)) for r, c in streams)
        if not self._streams:
            message = "streams is empty; a token bucket needs at least one (rate, capacity)"
            raise ConfigError(message)
        self._clock = clock
        self._latest = -math.inf if now is None else now

    def try_take(self, costs: Sequence[float], now: float | None = None) -> bool:
        """Take `costs`, one number of tokens per stream, if every stream admits its own; else take nothing.

        Raises:
            ValueError: a cost that is negative or not finite, or not one cost per stream.
        """
        if now is None:
            now = self._clock()
        if now < self._latest:
            now = self._latest
        else:
            self._latest = now
        streams = self._streams
        if len(streams) == 2 == len(costs):  # noqa: PLR2004
            return _take_two(streams, costs, now)
        _check_costs(costs, streams)
        for stream, cost in zip(streams, costs, strict=True):
            if stream.admitted_at(cost) > now:
                return False
        for stream, cost in zip(streams, costs, strict=True):
            stream.take(cost, now)
        return True

    def charge(self, costs: Sequence[float], now: float) -> None:
        """Take `costs` whether or not they are admitted; a stream with fewer tokens is in debt afterwards."""
        _check_costs(costs, self._streams)
        now = self._advance(now)
        for stream, cost in zip(self._streams, costs, strict=True):
            stream.take(cost, now)

    def give_back(self, costs: Sequence[float]) -> None:
        """Return `costs` that were taken and not used; a stream never holds more than its capacity.

        Right after the take, the bucket is as it was before. Raises ValueError as `try_take`.
        """
        _check_costs(costs, self._streams)
        for stream, cost in zip(self._streams, costs, strict=True):
            stream.spent = max(0.0, stream.spent - cost)

    def ready_at(self, costs: Sequence[float], now: float | None = None) -> float:
        """Return the earliest instant, `now` at best, at which `try_take(costs)` would succeed. Exact.

        Raises:
            ValueError: a cost that is negative or not finite, or not one cost per stream.
        """
        if now is None:
            now = self._clock()
        _check_costs(costs, self._streams)
        ready_at = max(stream.admitted_at(cost) for stream, cost in zip(self._streams, costs, strict=True))
        return ready_at if ready_at > self._advance(now) else now

    def tokens(self, now: float | None = None) -> tuple[float, ...]:
        """Return the tokens of each stream; a negative number for a stream in debt."""
        now = self._advance(self._clock() if now is None else now)
        return tuple(stream.capacity - stream.missing(now) for stream in self._streams)

    def set_rate(
        self, stream_index: int, rate: float, now: float | None = None, *, capacity: float | None = None
    ) -> None:
        """Refill one stream at `rate` tokens per second from `now` on; it keeps the tokens it holds.

        `capacity` changes with it if given; a stream that held more keeps no more than that.

        Raises:
            ConfigError: a rate or capacity that is not finite and above 0.
            IndexError: there is no such stream.
        """
        now = self._advance(self._clock() if now is None else now)
        stream = self._streams[stream_index]
        rate = _positive("rate", rate)
        new_capacity = stream.capacity if capacity is None else _positive("capacity", capacity)
        missing = max(0.0, stream.missing(now) + new_capacity - stream.capacity)
        stream.rate = rate
        stream.capacity = new_capacity
        stream.since = now
        stream.spent = missing

    @property
    def rates(self) -> tuple[float, ...]:
        """The refill rate of each stream, tokens per second."""
        return tuple(stream.rate for stream in self._streams)

    @property
    def capacities(self) -> tuple[float, ...]:
        """The most tokens each stream holds."""
        return tuple([stream.capacity for stream in self._streams])

    def __repr__(self) -> str:
        """Show the rates and capacities, but not the tokens, which change with time."""
        return f"TokenBucket({[(stream.rate, stream.capacity) for stream in self._streams]})"

    def _advance(self, now: float) -> float:
        """Return `now`, or the latest instant seen if the clock stepped back."""
        if now < self._latest:
            return self._latest
        self._latest = now
        return now


def _take_two(streams: Sequence[_TokenStream], costs: Sequence[float], now: float) -> bool:
    """Take records and bytes: the loop of `try_take` written out, because it runs once per Kinesis record."""
    first, second = streams
    cost0, cost1 = costs
    if not (0.0 <= cost0 < math.inf and 0.0 <= cost1 < math.inf):
        _check_costs(costs, streams)
    capacity = first.capacity
    if first.since + (first.spent + (cost0 if cost0 < capacity else capacity) - capacity) / first.rate > now:
        return False
    capacity = second.capacity
    if second.since + (second.spent + (cost1 if cost1 < capacity else capacity) - capacity) / second.rate > now:
        return False
    # As `_TokenStream.take`, without the cost of two calls.
    if first.since + first.spent / first.rate < now:
        first.since, first.spent = now, cost0
    else:
        first.spent += cost0
    if second.since + second.spent / second.rate < now:
        second.since, second.spent = now, cost1
    else:
        second.spent += cost1
    return True


def _positive(name: str, value: float) -> float:
    if not 0.0 < value < math.inf:
        message = f"{name} is {value!r}; a token stream needs a finite number above 0"
        raise ConfigError(message)
    return value


def _check_costs(costs: Sequence[float], streams: Sequence[_TokenStream]) -> None:
    if len(costs) != len(streams):
        message = f"{len(costs)} costs for {len(streams)} token streams; give one cost per stream"
        raise ValueError(message)
    for cost in costs:
        if not 0.0 <= cost < math.inf:
            message = f"cost is {cost!r}; it must be a finite number of tokens, 0 or more"
            raise ValueError(message)
