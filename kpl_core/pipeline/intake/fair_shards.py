"""The fair queues in front of the shards: where user records wait, each flow for itself.

As long as a shard keeps up, nothing waits here. When Kinesis records wait for
its tokens, what is put after them waits per flow, and enters aggregation in
weighted fair order by bytes. So behind the queue there is never more than a
moment's worth of the shard's capacity, and a flow that floods a shard delays
itself.

How much one flow may queue here follows the room that is left for all: at most
`weight / default weight` times as many records and bytes as are still free
(dynamic thresholds: Choudhury and Hahne, 1998). One flood takes at most half of
the room, a second at most half of the rest, and a quiet flow always finds some.
"""

import math
from collections.abc import Iterable

from kpl_core.errors import BufferFull
from kpl_core.fairness import FairQueue
from kpl_core.options.policy import FairnessPolicy
from kpl_core.pipeline.buffer_limit import BufferLimit
from kpl_core.records.expiry import EXPIRED_AT_ONCE, has_expired
from kpl_core.records.kinesis_record import DetachedUserRecord
from kpl_core.records.user_record import Tier

Flow = str | None


class FairShards:
    """User records that wait for their shard, by flow. `None` is the shard of those without a prediction."""

    def __init__(self, policy: FairnessPolicy, buffer_limit: BufferLimit, *, ttl_seconds: float) -> None:
        self._policy = policy
        self._buffer_limit = buffer_limit
        self._ttl_seconds = ttl_seconds
        self._queues: dict[str | None, FairQueue[DetachedUserRecord]] = {}
        # By flow: the user records and bytes that wait, over all shards.
        self._held: dict[Flow, list[int]] = {}
        # The first user record expires no earlier; `math.inf` if nothing waits.
        self.next_at = math.inf

    def __bool__(self) -> bool:
        """Return True if a user record waits, for any shard."""
        return bool(self._queues)

    def is_waiting(self, shard_id: str | None) -> bool:
        """Return True if a user record waits for this shard."""
        return shard_id in self._queues

    @property
    def shards(self) -> list[str | None]:
        """Return the shards for which user records wait."""
        return list(self._queues)

    def require_share(self, flow: Flow, size_bytes: int, *, records: int = 1, tier: Tier = "normal") -> None:
        """Check that the flow may queue `records` more user records, of `size_bytes` together.

        A flow with nothing queued may put as much as there is room for.

        Raises:
            BufferFull: it has used up its share of the room; other flows still have theirs.
        """
        held = self._held.get(flow)
        if held is None:
            return
        held_records, held_bytes = held
        factor = self._policy.weight_of(flow) / self._policy.default_weight
        limit = self._buffer_limit
        free_records, free_bytes = limit.free_for(tier)
        if held_records + records <= factor * free_records + 1 and held_bytes + size_bytes <= factor * free_bytes:
            return
        message = (
            f"flow {flow!r} has {held_records:,} user records of {held_bytes:,} bytes waiting, its share of the room "
            f"({free_records:,} records and {free_bytes:,} bytes are free); slow it down, or raise "
            f"max_outstanding_records / max_outstanding_bytes"
        )
        raise BufferFull(
            message, outstanding_records=limit.outstanding_records, outstanding_bytes=limit.outstanding_bytes
        )

    def put(self, shard_id: str | None, waiting: DetachedUserRecord) -> None:
        """Enqueue a user record behind the others of its flow."""
        queue = self._queues.get(shard_id)
        if queue is None:
            queue = self._queues[shard_id] = FairQueue(weight_of=self._policy.weight_of)
        flow, size_bytes = waiting.user_record.flow, waiting.size_bytes
        queue.push(waiting, flow, size_bytes, waiting.tier)
        held = self._held.setdefault(flow, [0, 0])
        held[0] += 1
        held[1] += size_bytes
        self.next_at = min(self.next_at, waiting.arrived_at + self._ttl_seconds)

    def take(self, shard_id: str | None) -> DetachedUserRecord:
        """Remove and return the user record whose turn it is; something is waiting for the shard."""
        queue = self._queues[shard_id]
        waiting = queue.pop()
        self._left(waiting)
        if not queue:
            del self._queues[shard_id]
            if not self._queues:
                self.next_at = math.inf
        return waiting

    def _left(self, waiting: DetachedUserRecord) -> None:
        flow = waiting.user_record.flow
        held = self._held[flow]
        held[0] -= 1
        held[1] -= waiting.size_bytes
        if not held[0]:
            del self._held[flow]

    def take_expired(self, now: float) -> list[DetachedUserRecord]:
        """Remove and return up to 500 expired user records; if there are more, `next_at` stays in the past."""
        if self.next_at > now:
            return []
        expired: list[DetachedUserRecord] = []

        def expires(waiting: DetachedUserRecord) -> bool:
            if not has_expired(waiting.arrived_at + self._ttl_seconds, now) or len(expired) >= EXPIRED_AT_ONCE:
                return False
            expired.append(waiting)
            return True

        for shard_id, queue in list(self._queues.items()):
            for flow in list(queue.flows()):
                # The oldest of a flow expire first, so the rest of the flow needs no check.
                queue.remove(flow, expires, heads_only=True)
                if len(expired) >= EXPIRED_AT_ONCE:
                    break
            if not queue:
                del self._queues[shard_id]
        for waiting in expired:
            self._left(waiting)
        if len(expired) >= EXPIRED_AT_ONCE and self._queues:
            return expired
        self.next_at = self._ttl_seconds + min(
            (next(queue.items(flow)).arrived_at for queue in self._queues.values() for flow in queue.flows()),
            default=math.inf,
        )
        return expired

    def drain(self, shard_ids: Iterable[str | None]) -> list[DetachedUserRecord]:
        """Remove and return what waits for these shards, in the order in which it would have been served."""
        drained = []
        for shard_id in shard_ids:
            queue = self._queues.pop(shard_id, None)
            if queue is not None:
                drained += queue.drain()
        for waiting in drained:
            self._left(waiting)
        if not self._queues:
            self.next_at = math.inf
        return drained

    def oldest_by_flow(self) -> dict[Flow, float]:
        """Return when the oldest waiting user record of each flow arrived, over all shards."""
        oldest: dict[Flow, float] = {}
        for queue in self._queues.values():
            for flow in queue.flows():
                first = next(queue.items(flow))
                key = first.user_record.flow
                oldest[key] = min(first.arrived_at, oldest.get(key, first.arrived_at))
        return oldest

    @property
    def user_record_count(self) -> int:
        """Return how many user records wait."""
        return sum(len(queue) for queue in self._queues.values())

    @property
    def queued_by_flow(self) -> dict[Flow, tuple[int, int]]:
        """Return how many user records, of how many bytes, each flow has waiting; those with none are left out."""
        return {flow: (records, size_bytes) for flow, (records, size_bytes) in self._held.items()}
