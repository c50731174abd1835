"""One producer in the world: clients that put, a service with limits and reshards, and faults; all by one seed.

The producer is the real one, on a virtual clock. The service is `FakeKinesis`, which throttles as shards do. After the
last fault come records that must all be delivered; then the producer closes, and every invariant is checked.
"""

import asyncio
import math
import random
from collections import Counter
from typing import Any, NamedTuple

from kpl_core import BreakerPolicy, BufferFull, Config, Delivery, FairnessPolicy, Producer, TierPolicy
from kpl_core.testing import FakeKinesis
from kpl_core.testing.fake_transport import FakeTransport
from kpl_core.transport import PutRecordsAnswer, PutRecordsRequest, RequestFailure
from tests.world.invariants import Ledger, Put, Run, bounded, conserved, outage_is_said, shown, violations
from tests.world.network import WHOLE, Less, World
from tests.world.service_faults import RAISES, SERVICE_FAULTS, arm, may_double
from tests.world.world_loop import run_in_world, world_loop

STREAM = "orders"
# Seconds with faults, and until the service must have been found back: the longest break of a breaker and the longest
# pause between two probes are 5 s each.
STORY_SECONDS, RECOVERY_SECONDS = 40.0, 15.0
LAST_RECORDS = 20
# So that a story costs a second of CPU.
MOST_RECORDS = 6_000


class Setting(NamedTuple):
    """What a seed draws before the story."""

    config: Config
    shards: int
    latency_seconds: float
    faults: list[str]
    clients: int


def draw(world: World) -> Setting:
    """Draw options and faults: a swarm, in which each run lacks most of them."""
    chance = world.chance
    options: dict[str, Any] = {
        "aggregation_enabled": chance.random() < 0.6,
        "max_outstanding_records": chance.choice([20, 200, 5_000]),
        "max_in_flight_requests": chance.choice([1, 3, 24]),
        "record_max_buffered_time_ms": chance.choice([10.0, 100.0]),
        "record_ttl_ms": chance.choice([2_000.0, 10_000.0, 30_000.0]),
        "request_timeout_ms": chance.choice([500, 2_000]),
        "connect_timeout_ms": 500,
        "ordering": chance.choice(["none", "none", "per_key"]),
        "adaptive_rate": chance.random() < 0.8,
        "fail_if_throttled": chance.random() < 0.1,
        "max_record_size": 1_048_576,
        "consumer": world.consumer,
        "breaker": BreakerPolicy() if chance.random() < 0.5 else None,
        "tiers": TierPolicy() if chance.random() < 0.3 else None,
        "fairness": FairnessPolicy() if chance.random() < 0.3 else None,
    }
    faults = world.drawn((*SERVICE_FAULTS, RAISES), 0.2)
    if chance.random() < 0.1:
        # The rules of the order when shards change are tried by few of all combinations.
        options |= {"ordering": "per_key", "aggregation_enabled": True}
        faults = list(dict.fromkeys([*faults, *world.drawn(("splits", "merges"), 1.0)]))
    # By a chance of its own, as for the pauses of a world.
    if random.Random(f"listings of {world.seed}").random() < 0.1:
        # Those about a shard map that is old when shards change are tried by few of all combinations, too.
        faults = [name for name in ("splits", "merges", "no listings") if name not in world.less.without]
    return Setting(
        Config(region="us-east-1", **options),
        chance.choice([1, 2, 5]),
        chance.choice([0.002, 0.02, 0.2]),
        faults,
        min(chance.randint(1, 4), world.less.clients),
    )


def run_story(seed: int, less: Less = WHOLE) -> Run:
    """Run the story of a seed."""
    # The jitter of retries and breakers.
    random.seed(seed)
    return run_in_world(lambda: _story(World(seed, less)))


class _Transport(FakeTransport):
    """Counts the requests that failed as a whole since the last answer, and raises at times, as a user's own may."""

    def __init__(self, kinesis: FakeKinesis, *, latency_seconds: float, chance: random.Random) -> None:
        super().__init__(kinesis, latency_seconds=latency_seconds)
        self.failed_requests, self.failing_since = 0, math.inf
        self._chance = chance
        self.raises_until = -math.inf

    async def put_records(self, request: PutRecordsRequest) -> PutRecordsAnswer:
        answer: PutRecordsAnswer | None = None
        try:
            if World.now() < self.raises_until and self._chance.random() < 0.5:
                message = "the world has no memory left"
                raise MemoryError(message)
            answer = await super().put_records(request)
        finally:
            now = World.now()
            if answer is not None and _is_known(answer, len(request.records)):
                self.failed_requests, self.failing_since = 0, math.inf
            else:
                self.failed_requests += 1
                self.failing_since = min(self.failing_since, now)
        return answer


def _is_known(answer: PutRecordsAnswer, records: int) -> bool:
    """Return True for an answer that no breaker counts as a failure of the stream."""
    if isinstance(answer, RequestFailure):
        return answer.code in {"InvalidArgumentException", "InvalidSignatureException"}
    return len(answer) == records


class _Story:
    def __init__(self, world: World, setting: Setting) -> None:
        self.world, self.setting, self.chance = world, setting, world.chance
        self.kinesis = FakeKinesis({STREAM: setting.shards}, chance=world.chance.random)
        self.transport = _Transport(self.kinesis, latency_seconds=setting.latency_seconds, chance=self.chance)
        self.ledger = Ledger()
        # Of each client; of few keys many records are on their way at a time.
        self.keys = world.chance.choice([2, 20])
        self.false: list[str] = []

    def check(self, producer: Producer) -> None:
        """Check what holds at every moment."""
        if self.false:
            return
        report, transport = producer.report(), self.transport
        self.false += conserved(report, self.ledger)
        self.false += bounded(report, self.setting.config)
        self.false += outage_is_said(producer, self.world.now() - transport.failing_since, transport.failed_requests)

    async def client(self, producer: Producer, name: str, until: float) -> None:
        """Put at a rate, in one of the ways in which a user puts, until then."""
        chance, world = self.chance, self.world
        way = chance.choice([self.put_nowait, self.put, self.put_many, self.put_and_cancel])
        rate = chance.choice([2.0, 20.0, 200.0])
        while world.now() < until and len(self.ledger.puts) < MOST_RECORDS:
            count = chance.choice([1, 1, 10]) if rate < 200.0 else 20
            await way(producer, [self.made(name) for _ in range(count)])
            self.check(producer)
            await asyncio.sleep(chance.expovariate(rate / count))

    def made(self, name: str) -> Put:
        """Make the next record of a client."""
        chance, tiers = self.chance, self.setting.config.tiers
        size = chance.choice([20, 200, 20_000]) if chance.random() < 0.1 else 20
        tier = chance.choice(["critical", "normal", "bulk"]) if tiers is not None else "normal"
        # The order is promised among the records of one tier of a key.
        key = f"{name}, {tier}, {chance.randrange(self.keys)}"
        flow = name if self.setting.config.fairness is not None else None
        return self.ledger.made(key, size, tier=tier, flow=flow)

    async def put_nowait(self, producer: Producer, puts: list[Put]) -> None:
        for put in puts:
            try:
                delivery = producer.put_nowait(STREAM, **put.arguments())
            except BufferFull:
                self.ledger.refused(put)
            else:
                self.ledger.accepted(put, delivery)

    async def put(self, producer: Producer, puts: list[Put]) -> None:
        for put in puts:
            self.ledger.accepted(put, await producer.put(STREAM, **put.arguments()))

    async def put_many(self, producer: Producer, puts: list[Put]) -> None:
        deliveries = await producer.put_many(STREAM, [put.record() for put in puts])
        for put, delivery in zip(puts, deliveries, strict=True):
            self.ledger.accepted(put, delivery)

    async def put_and_cancel(self, producer: Producer, puts: list[Put]) -> None:
        """Give up a put that has to wait: it has put nothing."""
        for put in puts:
            delivery: Delivery | None = None
            try:
                async with asyncio.timeout(self.chance.choice([0.001, 0.5])):
                    delivery = await producer.put(STREAM, **put.arguments())
            except TimeoutError:
                pass
            if delivery is None:
                self.ledger.refused(put)
            else:
                self.ledger.accepted(put, delivery)

    async def faults(self, until: float) -> None:
        """Let faults come and go until then."""
        chance, world = self.chance, self.world
        while self.setting.faults and world.now() < until:
            seconds = min(chance.expovariate(0.2), until - world.now())
            name = chance.choice(self.setting.faults)
            if name == RAISES:
                self.transport.raises_until = world.now() + seconds
            else:
                arm(self.kinesis.faults, name, chance, now=world.now(), seconds=seconds)
            await asyncio.sleep(chance.expovariate(0.3))

    async def flushes(self, producer: Producer, until: float) -> None:
        """Flush now and then until then. A flush that is complete has waited for all that was put before."""
        while self.world.now() < until:
            await asyncio.sleep(self.chance.expovariate(0.1))
            before = [put for put in self.ledger.puts if put.delivery is not None and put.delivery.peek() is None]
            report = await producer.flush(timeout=self.chance.choice([0.1, 5.0]))
            unfinished = [put.number for put in before if put.delivery is not None and put.delivery.peek() is None]
            if report.complete and unfinished:
                self.false.append(f"a complete flush has not waited for {shown(unfinished)}")

    async def tell(self) -> None:
        """Run the story."""
        until = min(STORY_SECONDS, self.world.less.seconds)
        async with Producer(self.setting.config, transport=self.transport) as producer:
            async with asyncio.TaskGroup() as tasks:
                _ = tasks.create_task(self.faults(until))
                _ = tasks.create_task(self.world.befall(until))
                _ = tasks.create_task(self.flushes(producer, until))
                for number in range(self.setting.clients):
                    _ = tasks.create_task(self.client(producer, f"client {number}", until))
            self.kinesis.faults.clear()
            await asyncio.sleep(RECOVERY_SECONDS)
            last = [self.ledger.made(f"last {number}", 20) for number in range(LAST_RECORDS)]
            for put in last:
                await self.put(producer, [put])
                # One after the other: with ordering per key a shard takes one record for each round trip.
                assert put.delivery is not None
                _ = await put.delivery
            report = await producer.flush(timeout=self.setting.config.record_ttl_ms / 1_000 + RECOVERY_SECONDS)
            self.check(producer)
            if not report.complete:
                self.false.append(f"not drained after the last fault: {report}")
            report = await producer.close()
        self.false += violations(
            self.ledger, report, self.kinesis, STREAM, self.setting.config, last, now=self.world.now()
        )
        consumer = self.setting.config.consumer
        doubles = may_double(self.setting.faults, self.kinesis, STREAM, has_pauses=self.world.has_pauses)
        # Here a user record is sent again as soon as its shard's range is unknown.
        doubles |= consumer == "per_user_record" and not {"splits", "merges"}.isdisjoint(self.setting.faults)
        if not doubles and self.ledger.doubled(self.kinesis, STREAM, self.world.now(), consumer):
            self.false.append("records are stored twice, and no fault of this run does that")


async def _story(world: World) -> Run:
    setting = draw(world)
    story = _Story(world, setting)
    await story.tell()
    outcomes = Counter(result.error_code or "delivered" for result in story.ledger.results())
    faults = setting.faults + world.own_faults
    return Run(
        faults,
        world.now(),
        len(story.ledger.puts),
        len(story.transport.requests),
        outcomes,
        story.false,
        *world_loop().trace(),
    )
