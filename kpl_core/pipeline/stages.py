"""The stages of one stream, wired to each other, and the places that a configuration may fill.

`StreamPipeline` moves records from one stage to the next. Three places are filled when it is built
(`producer/stream_set.py`), and each may stay empty:

* intake: records go straight to the aggregator, or through a `WriteAhead`, a `FairIntake`, or both in this order;
* gate: every admitted record passes, or a `Gate` (circuit breakers) decides;
* ledger: the `Ledger` makes failed records final, or offers them to a durable store first (`DurableLedger`).

An empty place is None, and the hot path does not look at it. `Gate` is all that the pipeline knows of the breakers.
"""

import enum
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import Final, NamedTuple, Protocol

from kpl_core.hooks import Fact
from kpl_core.options.config import Config
from kpl_core.options.stage_rules import aggregation_rules, collection_rules, shard_rules
from kpl_core.pipeline.aggregator import Aggregator
from kpl_core.pipeline.buffer_limit import BufferLimit
from kpl_core.pipeline.collector import Collector
from kpl_core.pipeline.lane import Lane
from kpl_core.pipeline.ledger import Ledger
from kpl_core.pipeline.limiter import StreamLimiter
from kpl_core.pipeline.open_record import BATCH, BATCH_BYTES, PutBatch
from kpl_core.pipeline.retrier import BackoffQueue, Retrier
from kpl_core.pipeline.router import Router
from kpl_core.pipeline.send_queue import SendingPause, SendQueue
from kpl_core.pipeline.shard_map import ShardMap
from kpl_core.records.kinesis_record import DetachedUserRecord, KinesisRecord
from kpl_core.records.outcome import Note, Origin, Outcome, ResultHandle
from kpl_core.records.pipeline_statistics import PipelineStatistics
from kpl_core.records.put_records import PutRecordsAnswer, PutRecordsRequest
from kpl_core.records.record_result import Attempt
from kpl_core.records.user_record import Tier, UserRecord, user_record_digest

# With flows, a buffer of fewer batches has batches of one record.
_FAIR_BATCHES: Final = 16


class Poll(NamedTuple):
    """What the driver has to do: send these requests, and poll again at `wakeup` (`math.inf`: not before news)."""

    requests: list[PutRecordsRequest]
    wakeup: float
    # One more request is due than the driver had places for.
    wants_more: bool


class GroupTerms(NamedTuple):
    """How a run of records is put that are accepted together: all of them or none.

    The flow and the tier hold for all records. Without `aggregate` each travels in a Kinesis record of its own. With
    `keep` False no disk ever stores them: the caller still has them, and hears if they fail. With `durable` they are in
    the spool or have failed; others go `straight` to Kinesis while the spool cannot store, where it is configured for
    that.
    """

    flow: str | None
    tier: Tier = "normal"
    aggregate: bool = True
    keep: bool = True
    durable: bool = False
    straight: bool = False

    def note(self) -> Note | None:
        """Return what a record of this run remembers until its end, None if there is nothing."""
        if self.flow is None and self.keep and self.aggregate:
            return None
        return Note(self.flow, None if self.keep else "caller", is_alone=not self.aggregate)


class Passage(enum.Enum):
    """What a gate decides about a Kinesis record that it does not refuse."""

    OPEN = "send it"
    PROBE = "send it as a probe"
    KEPT = "the gate keeps it and returns it from take_ready"


class Gate(Protocol):
    """Between the limiter and the collector: decides whether an admitted Kinesis record may leave."""

    @property
    def states(self) -> Mapping[str, str]:
        """The state of each circuit breaker by shard, "" for the whole stream."""

    @property
    def user_record_count(self) -> int:
        """How many user records the gate keeps."""

    def decide(self, record: KinesisRecord, now: float) -> Passage | Attempt:
        """Decide about one record. After KEPT the gate has it; the attempt fails a record that is refused."""

    def answered(self, request: PutRecordsRequest, answer: PutRecordsAnswer, now: float) -> None:
        """Count an answer."""

    def take_ready(self, now: float) -> tuple[list[KinesisRecord], list[Fact]]:
        """Let time pass; remove and return the records that may be decided about again, and what the hooks are told."""

    def take_except(self, stable: set[str], open_shards: set[str]) -> list[KinesisRecord]:
        """Remove and return the records of shards that are not in `stable`; forget shards that are not open."""

    def next_wakeup(self) -> float:
        """Return when `take_ready` will have something to do, `math.inf` for never."""


class Stages:
    """The stages of one stream. Constructed once; the pipeline and its intake share them."""

    def __init__(
        self,
        stream: str,
        config: Config,
        buffer_limit: BufferLimit,
        ledger: Ledger,
        *,
        chance: Callable[[], float],
        delivery: type[ResultHandle] = ResultHandle,
    ) -> None:
        self.stream = stream
        self.config = config
        self.buffer_limit = buffer_limit
        self.ledger = ledger
        self.delivery = delivery
        self.max_record_bytes = config.known_max_record_size
        self.shard_map = ShardMap()
        self.aggregator = Aggregator(aggregation_rules(config), ledger.generations, delivery=delivery)
        self.router: Router[Lane] = Router(self.shard_map, self.aggregator.lane, lambda: self.aggregator.accepted)
        self.limiter = StreamLimiter(shard_rules(config))
        request = collection_rules(config)
        self.collector = Collector(request)
        self.retrier = Retrier(config, self.shard_map, ledger, chance=chance)
        self.backoff_queue = BackoffQueue()
        self.send_queue = SendQueue(self.collector, self.retrier.bisection, SendingPause(self.retrier.backoff))
        # What the pipeline makes, and how many records it may have: a request that is full must not wait for its rest.
        self.batch: PutBatch
        request_bytes = min(request.size_limit, request.count_limit * self.aggregator.output.rules.size_limit)
        # And a flow that fills a batch must leave room to others.
        batches = min(buffer_limit.max_records / BATCH, buffer_limit.max_bytes / BATCH_BYTES)
        has_room = config.fairness is None or batches >= _FAIR_BATCHES
        self.batch_limit = BATCH if has_room and request_bytes >= 2 * BATCH_BYTES else 1
        # User records accepted without entering a lane first.
        self.accepted_detached = 0
        # How many records came back from a durable store.
        self.returned: Counter[Origin] = Counter()

    def shard_of(self, record: UserRecord) -> str | None:
        """Return the predicted shard of a valid user record, None if it is unknown."""
        return self.shard_map.predict(user_record_digest(record.partition_key, record.explicit_hash_key))

    @property
    def batching_count(self) -> int:
        """Return how many user records wait only for others to join their batch."""
        return self.aggregating_count + self.collector.packing_count

    @property
    def aggregating_count(self) -> int:
        """Return how many user records wait in the batch, or in an aggregated record that has not been taken."""
        return self.batch.count + self.aggregator.open_user_records + self.aggregator.closed_user_records

    def accept_detached(self, record: UserRecord, now: float, origin: Origin | None = None) -> DetachedUserRecord:
        """Accept a checked user record without a lane: it waits for the disk or for its turn first."""
        generations = self.ledger.generations
        generations.retain(generations.current)
        self.accepted_detached += 1
        outcome = Outcome()
        if record.metadata is not None:
            outcome.metadata = {0: record.metadata}
        if record.flow is not None or origin is not None:
            outcome.notes = {0: Note(record.flow, origin)}
        return DetachedUserRecord(
            user_record=record,
            arrived_at=now,
            generation=generations.current,
            tier=record.tier,
            outcome=outcome,
            index=0,
            history=None,
        )

    def statistics(
        self, in_flight: Iterable[PutRecordsRequest], gate: Gate | None, *, queueing: int, before_disk: int
    ) -> PipelineStatistics:
        """Count the user records in the stages, in flight, at the gate, and those that wait in the intakes."""
        ledger = self.ledger
        return PipelineStatistics(
            accepted=self.batch.count + self.aggregator.accepted + self.accepted_detached - self.returned.total(),
            delivered=ledger.delivered,
            failed=dict(ledger.failed),
            aggregating=self.aggregating_count,
            limited=self.limiter.user_record_count,
            collected=self.send_queue.user_record_count,
            in_flight=sum(len(record.arrivals) for request in in_flight for record in request.records),
            backing_off=self.backoff_queue.user_record_count + (0 if gate is None else gate.user_record_count),
            held=self.retrier.user_records_awaiting_map,
            queueing=queueing,
            keeping=ledger.pending_count + before_disk,
            spooled=ledger.kept["spooled"],
            dead_lettered=ledger.kept["dead_lettered"],
            replayed=self.returned["replay"],
            redriven=self.returned["redrive"],
            breakers={} if gate is None else gate.states,
        )
