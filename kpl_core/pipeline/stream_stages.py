"""What one stream's pipeline is made of: the stages, wired, and what is asked of all of them together."""

import math
from collections.abc import Callable, Iterable, Mapping

from kpl_core.hooks import Fact
from kpl_core.options.config import Config
from kpl_core.options.stage_rules import aggregation_rules, collection_rules, shard_rules
from kpl_core.pipeline.aggregator import Aggregator
from kpl_core.pipeline.backing_off import BackingOff
from kpl_core.pipeline.buffer_limit import BufferLimit
from kpl_core.pipeline.collector import Collector
from kpl_core.pipeline.departures import Departures
from kpl_core.pipeline.generations import Generations
from kpl_core.pipeline.lane import Lane
from kpl_core.pipeline.ledger import Ledger
from kpl_core.pipeline.limiter import Limiter
from kpl_core.pipeline.pipeline_statistics import PipelineStatistics
from kpl_core.pipeline.retrier import Retrier
from kpl_core.pipeline.router import Router
from kpl_core.pipeline.sending_pause import SendingPause
from kpl_core.pipeline.shard_limiter import ShardUsage
from kpl_core.pipeline.shard_map import Shard, ShardMap
from kpl_core.records.hash_key import hash_key_digest, hash_key_to_digest, parse_explicit_hash_key
from kpl_core.records.kinesis_record import KinesisRecord, MovingUserRecord
from kpl_core.records.outcome import Delivery
from kpl_core.records.put_records import PutRecordsRequest
from kpl_core.records.record_result import WRONG_SHARD
from kpl_core.records.user_record import UserRecord, encode_partition_key

__all__ = ["StreamStages"]


class StreamStages:
    """The stages of one stream. `StreamPipeline` hands user records from one to the next."""

    def __init__(
        self,
        stream: str,
        config: Config,
        buffer_limit: BufferLimit,
        *,
        now: float,
        chance: Callable[[], float],
        delivery: type[Delivery] = Delivery,
        listening: bool = False,
    ) -> None:
        self.stream = stream
        self.shard_map = ShardMap()
        self._buffer_limit = buffer_limit
        self._listening = listening
        self._consumer = config.consumer
        self._retry_delay_seconds = config.retry_delay_seconds
        self._ttl_seconds = config.record_ttl_ms / 1000
        self.max_record_bytes = config.known_max_record_size
        self._generations = Generations()
        self._ledger = self._open_books(config)
        self._aggregator = Aggregator(aggregation_rules(config), self._generations, delivery=delivery)
        self._lanes_output = self._aggregator.output
        self._router: Router[Lane] = Router(self.shard_map, self._aggregator.lane, lambda: self._aggregator.accepted)
        self._routes = self._router.routes
        self._limiter = Limiter(shard_rules(config))
        self._collector = Collector(collection_rules(config))
        self._retrier = Retrier(config, self.shard_map, self._ledger, chance=chance)
        self._backing_off = BackingOff()
        self._bisection = self._retrier.bisection
        self._pause = SendingPause(self._retrier.backoff)
        self._departures = Departures(self._collector, self._bisection, self._pause)
        self._in_flight: set[PutRecordsRequest] = set()
        self._in_order = config.ordering == "per_key"
        # A newer shard map, which waits until nothing is on its way that it would let others overtake.
        self._next_shards: tuple[Shard, ...] | None = None
        self._promised_wakeup = now
        # A put wants attention earlier than `next_wakeup` promised. The driver clears it.
        self.attention = False

    def _open_books(self, config: Config) -> Ledger:  # noqa: ARG002 - where records are kept, that is in it
        return Ledger(self.stream, self._buffer_limit, self._generations, listening=self._listening)

    def _reserve(self, record: UserRecord, size: int) -> None:
        self._buffer_limit.reserve(size_bytes=size, tier=record.tier)

    @staticmethod
    def _digest(key: bytes, explicit_hash_key: str | None) -> bytes:
        if explicit_hash_key is None:
            return hash_key_digest(key)
        return hash_key_to_digest(parse_explicit_hash_key(explicit_hash_key))

    def on_opening(self, opening_context: Callable[[], object] | None) -> None:
        """Ask `opening_context` whenever a Kinesis record opens; a request's fact has its answers."""
        self._lanes_output.opening_context = opening_context

    def take_facts(self) -> list[Fact]:
        """Remove and return the facts for the hooks."""
        return self._ledger.take_facts()

    def shard_usages(self) -> dict[str | None, ShardUsage]:
        """Return what passed each shard's limiter and what waits there; None stands for the unpredicted shard."""
        return self._limiter.usages()

    def set_shard_shares(self, shares: Mapping[str | None, tuple[float, float]], now: float) -> None:
        """Let shards use these rates, records and bytes a second, from now on."""
        self._limiter.set_shares(shares, now)

    def has_request(self, now: float) -> bool:
        """Say whether a request is full or due, and may leave: while requests fail, few may."""
        return self._departures.is_due(now)

    def next_wakeup(self, now: float, *, may_send: bool = True) -> float:
        """Return when there will next be something to do, `math.inf` for never without news.

        With `may_send` False the driver has no place for another request; full requests wait for one,
        and behind them the limiter admits nothing.
        """
        if self._next_shards is not None and self._would_overtake(self._next_shards):
            # Of several shards that closed, one would always be on its way, and the map would wait for ever.
            self._limiter.hold(math.inf, now)
        else:
            self._limiter.hold(self._departures.stopped_until(now, may_send=may_send), now)
        self._promised_wakeup = max(now, self._earliest_wakeup(may_send=may_send))
        return self._promised_wakeup

    def _earliest_wakeup(self, *, may_send: bool = True) -> float:
        return min(
            self._lanes_output.take_at,
            self._aggregator.next_wakeup(),
            self._limiter.next_wakeup(),
            self._departures.next_wakeup(may_send=may_send),
            self._backing_off.next_wakeup(),
            self._retrier.next_wakeup(),
        )

    def is_flushed(self, generation: int) -> bool:
        """Say whether everything put before the flush of this generation has its final result."""
        return self._generations.is_finished(generation)

    def _would_overtake(self, shards: Iterable[Shard]) -> bool:
        """Say whether something is on its way under a prediction that these shards make invalid."""
        new = {
            shard.shard_id: (hash_key_to_digest(shard.starting_hash_key), hash_key_to_digest(shard.ending_hash_key))
            for shard in shards
        }
        old = self.shard_map.open_ranges()
        valid = {shard_id for shard_id, bounds in old.items() if new.get(shard_id) == bounds}
        sent = [request.records for request in self._in_flight] + [list(self._bisection)]
        return any(record.predicted_shard not in valid for records in sent for record in records)

    def _aggregate_again(self, moving: Iterable[MovingUserRecord], now: float) -> None:
        """Aggregate user records a second time, each with its arrival and its attempts."""
        for mover in moving:
            record = mover.user_record
            key = encode_partition_key(record.partition_key)
            digest = self._digest(key, record.explicit_hash_key)
            shard_id = self.shard_map.predict(digest)
            if self._misses_again(mover):
                lane = self._aggregator.single_lane(shard_id, mover.tier)
            else:
                lane = self._aggregator.lane(shard_id, mover.tier)
            # It leaves while it can still be sent. What a flush waits for waits for no company.
            patience = min(self._retry_delay_seconds, (mover.arrived_at + self._ttl_seconds - now) / 2)
            if mover.generation < self._generations.current:
                patience = 0.0
            delivery = lane.add_any(
                record.partition_key,
                lane.entry(key, digest),
                record.data,
                mover.size_bytes,
                mover.arrived_at,
                explicit_hash_key=record.explicit_hash_key,
                moving=mover,
                deadline=now + patience,
            )
            self._ledger.move(mover, delivery)
            mover.outcome.wake()

    def _misses_again(self, mover: MovingUserRecord) -> bool:
        """Say whether a user record missed its shard under a map that is still in use, for want of a newer one.

        Aggregated by it, it would go around until it expires. Alone, the service itself puts it right.
        """
        if mover.history is None or not self.shard_map.refresh_wanted:
            return False
        return mover.history.attempt.error_code == WRONG_SHARD and self._consumer == "kcl"

    def _left_in_place(self, record: KinesisRecord, left: list[MovingUserRecord], now: float) -> list[MovingUserRecord]:
        """Return what is left of an expired Kinesis record, to be aggregated again.

        In arrival order nothing is: closed behind what waits already, it would be overtaken. It becomes a Kinesis
        record of its own, and waits in the place of the expired one before another of its shard is looked at.
        """
        shard_id = record.predicted_shard
        has_place = self._in_order and not self._limiter.is_forced and shard_id in self.shard_map.open_shards
        if not left or not has_place or shard_id is None:
            return left
        lane = self._aggregator.lane_apart(shard_id, record.tier)
        for mover in left:
            user_record = mover.user_record
            delivery = lane.add_any(
                user_record.partition_key,
                lane.entry(user_record.partition_key.encode(), None),
                user_record.data,
                mover.size_bytes,
                mover.arrived_at,
                explicit_hash_key=user_record.explicit_hash_key,
                moving=mover,
                deadline=now,
            )
            self._ledger.move(mover, delivery)
            mover.outcome.wake()
        lane.close()
        rest = self._lanes_output.closed.pop()
        rest.sequence = record.sequence
        self._limiter.put_back(rest, now)
        return []

    def _close_company(self, now: float) -> None:
        """Close what can go along with a request that leaves although it is not full.

        Otherwise each shard's aggregated record, due at an instant of its own, would soon want a request: at a few
        thousand records a second that is most of what they cost. Those that left together are due together again.
        """
        room = self._departures.room_beside(now)
        if room > 0:
            self._aggregator.close_due(now + self._lanes_output.rules.company_seconds, room)

    @property
    def failed(self) -> Mapping[str, int]:
        """Return how many user records failed, by error code; the counts go on."""
        return self._ledger.failed

    def statistics(self) -> PipelineStatistics:
        """Count the user records wherever they are."""
        in_flight = sum(len(record.arrivals) for request in self._in_flight for record in request.records)
        return PipelineStatistics(
            accepted=self._aggregator.accepted,
            delivered=self._ledger.delivered,
            failed=dict(self._ledger.failed),
            aggregating=self._aggregator.open_user_records + self._aggregator.closed_user_records,
            limited=self._limiter.user_record_count,
            collected=self._departures.user_record_count,
            in_flight=in_flight,
            backing_off=self._backing_off.user_record_count,
            held=self._retrier.held_user_records,
            spooled=self._ledger.kept["spooled"],
            dead_lettered=self._ledger.kept["dead_lettered"],
        )
