"""What a producer's hooks tell, summed up for a table."""

from typing import Final

import anyio

from kpl_core.hooks import Fact, RequestCompleted, ShardMapRefreshed

__all__ = ["Traffic"]

_SHARD_MAP_SECONDS: Final = 1.0


class Traffic:
    """A hook that counts requests and what was in them."""

    def __init__(self) -> None:
        self.requests = 0
        self.kinesis_records = 0
        self.throttled_records = 0
        # User records in requests; one that is sent twice counts twice.
        self.user_records = 0
        # Error code and instant (of the loop's clock) of the first request that failed since one succeeded.
        self.failing: tuple[str, float] | None = None
        self._shard_map_known = anyio.Event()

    def __call__(self, fact: Fact) -> None:
        """Note a completed request, or that the shard map is known; other facts are not counted here."""
        if isinstance(fact, ShardMapRefreshed):
            self._shard_map_known.set()
        if not isinstance(fact, RequestCompleted):
            return
        self.requests += 1
        self.kinesis_records += fact.kinesis_records
        self.user_records += fact.user_records
        self.throttled_records += sum(fact.throttled_by_shard.values())
        if fact.error_code is None:
            self.failing = None
        elif self.failing is None:
            self.failing = fact.error_code, fact.ended_at

    async def shard_map_known(self) -> None:
        """Wait until the stream's shards are known, for a second at most (nobody may be allowed to list them).

        A producer learns of a stream with its first user record, and until it knows the shards each
        record travels alone. Who has many at hand does better to wait a moment after the first.
        """
        with anyio.move_on_after(_SHARD_MAP_SECONDS):
            await self._shard_map_known.wait()

    @property
    def aggregation_ratio(self) -> float:
        """Return how many user records a Kinesis record carried, 0 before the first."""
        return self.user_records / self.kinesis_records if self.kinesis_records else 0.0
