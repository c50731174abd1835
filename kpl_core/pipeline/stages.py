"""The stages of one stream, wired to each other, and the places that a configuration may fill.

`StreamPipeline` moves records from one stage to the next. Three places are filled when it is built
(`producer/composition.py`), and each may stay empty:

* intake: records go straight to the aggregator, or through a `WriteAhead`, a `FairQueueing`, or both in this order;
* gate: every admitted record passes, or a `Gate` (circuit breakers) decides;
* ledger: the `Ledger` makes failed records final, or offers them to a durable store first (`DurableLedger`).

An empty place is None, and the hot path does not look at it. The protocols below are all that the pipeline knows of
the fair queue and the gate.
"""

import enum
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import Final, NamedTuple, Protocol

from kpl_core.errors import NotSpooled
from kpl_core.hooks import Fact
from kpl_core.options.config import Config
from kpl_core.options.reliability import SpoolFailure
from kpl_core.options.stage_rules import aggregation_rules, collection_rules, shard_rules
from kpl_core.pipeline.aggregator import Aggregator
from kpl_core.pipeline.buffer_limit import BufferLimit
from kpl_core.pipeline.collector import Collector
from kpl_core.pipeline.lane import Lane
from kpl_core.pipeline.ledger import Ledger
from kpl_core.pipeline.limiter import StreamLimiter
from kpl_core.pipeline.retrier import BackoffQueue, Retrier
from kpl_core.pipeline.router import Router
from kpl_core.pipeline.send_queue import SendingPause, SendQueue
from kpl_core.pipeline.shard_map import ShardMap
from kpl_core.records.kinesis_record import DetachedUserRecord, KinesisRecord
from kpl_core.records.outcome import Note, Origin, Outcome, ResultHandle
from kpl_core.records.pipeline_statistics import PipelineStatistics
from kpl_core.records.put_records import PutRecordsAnswer, PutRecordsRequest
from kpl_core.records.record_result import NOT_SPOOLED, SHUTDOWN, Attempt
from kpl_core.records.user_record import Tier, UserRecord, user_record_digest

# How often a spool that cannot store is tried again.
PROBE_SECONDS: Final = 1.0


class Poll(NamedTuple):
    """What the driver has to do: send these requests, and poll again at `wakeup` (`math.inf`: not before news)."""

    requests: list[PutRecordsRequest]
    wakeup: float
    # One more request is due than the driver had places for.
    wants_more: bool


class SpoolState:
    """Whether a producer's spool can store, since when it cannot, and which puts that concerns.

    The driver reports each success and each failure of the disk. While there was a failure last, it tries a small write
    every `PROBE_SECONDS`, so all ends by itself. Instants are seconds on the producer's clock.

    | `SpoolOptions.failure` | while the spool cannot store |
    | --- | --- |
    | fail | a put tries, and fails with `NotSpooled` |
    | bypass | it goes straight to Kinesis; refused if it must be durable, or would break the order of its key |
    | refuse | refused with `NotSpooled` |

    With the last two, records that the spool fails to store after they were accepted go straight to Kinesis, unless
    they must be durable: their caller would not be told. No put waits for an overflow spool (`writes_ahead` False), so
    none is refused because it cannot store.
    """

    def __init__(self, failure: SpoolFailure = "fail", *, writes_ahead: bool = True) -> None:
        self.failure: SpoolFailure = failure
        self.writes_ahead = writes_ahead
        # Why it cannot store, None while it can; and since when.
        self.why: str | None = None
        self.since = 0.0
        # It cannot store because it has `max_bytes`; its disk may be well.
        self.is_full = False
        # Accepted user records that went straight to Kinesis.
        self.bypassed = 0
        # The streams and partition keys that have records in the spool, None before they are known. Read only while it
        # cannot store, and only where the order of keys is promised.
        self.keys: frozenset[tuple[str, str]] | None = None
        # The outcomes of the user records that wait for the disk.
        self.waiting: set[Outcome] = set()

    @property
    def can_store(self) -> bool:
        """Return True if the last write succeeded, or there was none."""
        return self.why is None

    def refused(self, why: str, now: float, *, is_full: bool = False) -> bool:
        """Note that the spool did not store; return True if it did before."""
        did_store, self.why, self.is_full = self.why is None, why, is_full
        if did_store:
            self.since, self.keys = now, None
        return did_store

    def stored(self) -> bool:
        """Note that the spool has stored; return True if it did not before."""
        did_store, self.why, self.is_full = self.why is None, None, False
        return not did_store

    def unready(self) -> str | None:
        """Return why puts are refused, None if they are accepted."""
        accepts = self.why is None or self.failure == "bypass" or not self.writes_ahead
        return None if accepts else "the spool cannot store records"

    def goes_straight(self, stream: str, keys: Iterable[str], *, durable: bool, in_order: bool) -> bool:
        """Return True if user records with these partition keys go straight to Kinesis, False if to the spool.

        Raises:
            NotSpooled: they are refused, because the spool cannot store.
        """
        why = self.why
        if why is None or self.failure == "fail":
            return False
        if self.failure == "refuse":
            raise NotSpooled(why)
        if durable:
            message = f"{why}; only records that need not be in the spool are accepted"
            raise NotSpooled(message)
        # What waits is in transit to the spool, and its keys are not yet among those that were read.
        if in_order and (self.waiting or self.keys is None or any((stream, key) in self.keys for key in keys)):
            message = f"{why}; a record must not overtake those of its partition key that are in the spool"
            raise NotSpooled(message)
        return True


class WriteAhead:
    """Intake: user records wait here until the spool has stored them, and start their journey afterwards."""

    def __init__(self, stream: str, ledger: Ledger, state: SpoolState, *, in_order: bool) -> None:
        self._stream = stream
        self._ledger = ledger
        self.state = state
        self._in_order = in_order
        # Not yet taken by the driver, and the count of those that it has taken and not settled. Each with whether it
        # must be durable.
        self._records: list[tuple[DetachedUserRecord, bool]] = []
        self._in_transit = 0

    @property
    def count(self) -> int:
        """Return how many user records are not on disk yet."""
        return len(self._records) + self._in_transit

    @property
    def has_records(self) -> bool:
        """Return True if the driver has user records to take to the disk."""
        return bool(self._records)

    def goes_straight(self, keys: Iterable[str], *, durable: bool = False) -> bool:
        """Return True if user records with these keys need not wait here; raises as `SpoolState.goes_straight`."""
        return self.state.goes_straight(self._stream, keys, durable=durable, in_order=self._in_order)

    def add(self, detached: DetachedUserRecord, *, durable: bool) -> None:
        """Enqueue an accepted user record for the disk. One that need not be `durable` may go straight to Kinesis."""
        self._records.append((detached, durable))
        self.state.waiting.add(detached.outcome)

    def take(self) -> list[tuple[DetachedUserRecord, bool]]:
        """Remove and return the user records to write, each with whether it must be durable.

        Each must come back to `left`, `not_written` or `left_in_spool`.
        """
        records, self._records = self._records, []
        self._in_transit += len(records)
        return records

    def left(self, detached: DetachedUserRecord) -> None:
        """Note that a user record waits no more; the pipeline starts its journey."""
        self._in_transit -= 1
        self.state.waiting.discard(detached.outcome)

    def not_written(self, detached: DetachedUserRecord, message: str, now: float) -> None:
        """Fail a user record that the spool did not take; it was not acknowledged."""
        self.left(detached)
        attempt = Attempt(False, NOT_SPOOLED, message, detached.arrived_at, now)  # noqa: FBT003
        self._ledger.settle_unsent(detached, attempt, None)

    def left_in_spool(self, detached: DetachedUserRecord, now: float) -> None:
        """End the journey of a written user record before it began, because the producer is closed."""
        self.left(detached)
        text = "the producer was closed before this record could be sent; the spool has it"
        self._ledger.settle_unsent(detached, Attempt(False, SHUTDOWN, text, now, now), "spooled")  # noqa: FBT003


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


class FairQueueing(Protocol):
    """Intake: user records that wait per flow in front of an overloaded shard."""

    def require_share(self, flow: str | None, size_bytes: int, *, records: int, tier: Tier) -> None:
        """Raise BufferFull if the flow has used up its share of the buffer."""

    def lets_pass(self, shard_id: str | None) -> bool:
        """Return True if a user record put now enters aggregation at once."""

    def enqueue(self, shard_id: str | None, detached: DetachedUserRecord) -> None:
        """Let a user record wait for its turn."""

    def all_let_pass(self) -> bool:
        """Return True if no gate needs a look of its own, as is usual."""

    def reserve(self, size_bytes: int, records: int, terms: GroupTerms) -> None:
        """Take room for so many records of a flow together; raises BufferFull, and then nothing was taken."""

    def next_ready(self, now: float) -> DetachedUserRecord | None:
        """Remove and return the next user record that may enter aggregation, None if none may."""

    def sent(self, records: Iterable[KinesisRecord]) -> None:
        """Note that a request left with these records."""

    def answered(self, records: Iterable[KinesisRecord]) -> None:
        """Note that the request with these records was answered."""

    def take_expired(self, now: float) -> list[DetachedUserRecord]:
        """Remove and return user records whose time to live is over."""

    def take_all(self) -> list[DetachedUserRecord]:
        """Remove and return every waiting user record."""

    def route_again(self, stable: set[str]) -> None:
        """Move the user records whose shard is not in `stable` to the queue of their new shard."""

    def force(self) -> None:
        """Let every user record enter from now on, because the producer is closing."""

    def next_wakeup(self) -> float:
        """Return when the first user record may expire, `math.inf` if none waits."""

    def travels_alone(self, flow: str | None) -> bool:
        """Return True if the user records of this flow are not aggregated."""

    @property
    def user_record_count(self) -> int:
        """Return how many user records wait."""


class Passage(enum.Enum):
    """What a gate decides about a Kinesis record."""

    OPEN = "send it"
    PROBE = "send it as a probe"
    KEPT = "the gate keeps it and returns it from take_ready"
    REFUSED = "fail it"


class Gate(Protocol):
    """Between the limiter and the collector: decides whether an admitted Kinesis record may leave."""

    def decide(self, record: KinesisRecord, now: float) -> Passage:
        """Decide about one record. After KEPT the gate has it."""

    def refusal(self, record: KinesisRecord, now: float) -> Attempt:
        """Return the attempt that fails a record after REFUSED."""

    def answered(self, request: PutRecordsRequest, answer: PutRecordsAnswer, now: float) -> None:
        """Count an answer."""

    def take_ready(self, now: float) -> list[KinesisRecord]:
        """Let time pass; remove and return the records that may be decided about again."""

    def take_facts(self) -> list[Fact]:
        """Remove and return the facts about the gate for the hooks."""

    def take_except(self, stable: set[str]) -> list[KinesisRecord]:
        """Remove and return the records of shards that are not in `stable`."""

    def keep_only(self, open_shards: set[str]) -> None:
        """Forget the shards that are not among these."""

    def next_wakeup(self) -> float:
        """Return when `take_ready` will have something to do, `math.inf` for never."""

    @property
    def user_record_count(self) -> int:
        """Return how many user records the gate keeps."""

    @property
    def states(self) -> Mapping[str, str]:
        """Return the state of each circuit breaker by shard, "" for the whole stream."""


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
        self.collector = Collector(collection_rules(config))
        self.retrier = Retrier(config, self.shard_map, ledger, chance=chance)
        self.backoff_queue = BackoffQueue()
        self.send_queue = SendQueue(self.collector, self.retrier.bisection, SendingPause(self.retrier.backoff))
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
        aggregating = self.aggregator.open_user_records + self.aggregator.closed_user_records
        return aggregating + self.collector.packing_count

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
        self,
        in_flight: Iterable[PutRecordsRequest],
        fair: FairQueueing | None,
        write_ahead: WriteAhead | None,
        gate: Gate | None,
    ) -> PipelineStatistics:
        """Count the user records in the stages, in flight, and in what fills the places."""
        return PipelineStatistics(
            accepted=self.aggregator.accepted + self.accepted_detached - self.returned.total(),
            delivered=self.ledger.delivered,
            failed=dict(self.ledger.failed),
            aggregating=self.aggregator.open_user_records + self.aggregator.closed_user_records,
            limited=self.limiter.user_record_count,
            collected=self.send_queue.user_record_count,
            in_flight=sum(len(record.arrivals) for request in in_flight for record in request.records),
            backing_off=self.backoff_queue.user_record_count + (0 if gate is None else gate.user_record_count),
            held=self.retrier.user_records_awaiting_map,
            queueing=0 if fair is None else fair.user_record_count,
            keeping=self.ledger.pending_count + (0 if write_ahead is None else write_ahead.count),
            spooled=self.ledger.kept["spooled"],
            dead_lettered=self.ledger.kept["dead_lettered"],
            replayed=self.returned["replay"],
            redriven=self.returned["redrive"],
            breakers={} if gate is None else gate.states,
        )
