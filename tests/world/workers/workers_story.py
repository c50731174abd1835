"""Gateways of several workers in the world, which share their tenants' rates by leases; all by one seed.

The workers, their supervisor and the sums of `/v1/stats` and `/metrics` are the real ones (`processes.py`).
Requests of a tenant reach one worker or another. The store of the leases has one kind of fault, and workers crash. In
one story there is one gateway; in the other there are two or three, which share the rates through one store.
"""

import asyncio
import math
import random
from collections import Counter
from http import HTTPStatus
from pathlib import Path
from typing import Any, Final

from kpl_core.hooks import Fact, RecordsFinished
from kpl_core.testing import FakeKinesis
from kpl_integrations.ingest import IngestGateway, load_settings
from kpl_integrations.ingest.tenants import Tenant
from kpl_integrations.ingest.workers.link import SupervisorLink, WorkerIdentity
from tests.support.consumers import read_everything
from tests.support.gateway_scene import STREAM, Answer, Client, KnownTenants
from tests.world.disk import DISK_FAULTS, SLOW_DISK, Disk, copy_of, world_disk
from tests.world.gateway_story import may_be_stored
from tests.world.invariants import Run, drained
from tests.world.kinds_of_faults import KINDS, Kind
from tests.world.network import CALM, WHOLE, Less, StoreLink, World, WorldStore
from tests.world.service_faults import PASSING_FAULTS, arm
from tests.world.workers.processes import CHANNEL_SECONDS, Crew, WorkerProcess, WorldChannel
from tests.world.workers.shared_rates import SharedRates
from tests.world.workers.sums import ADMIN_KEY, Heard, Sums
from tests.world.world_loop import run_in_world, world_loop

# Intervals of the leases with faults; the shortest such time; intervals until the leases must be back.
STORY_INTERVALS, STORY_SECONDS, RECOVERY_INTERVALS = 12.0, 25.0, 6.0
CLOSE_SECONDS = 60.0
# Between two sync rounds of the tenants' leases: without options of the coordination, and with them.
QUICK_INTERVAL, SLOW_INTERVAL = 0.5, 5.0
PER_REQUEST = 20
# The part of its rate that a tenant gets at one worker when the leases are back.
MOST_OF_RATE = 0.7
LAST_SECONDS = 5.0
# A tenant that sends only after the last fault.
LATE, LATE_RATE = "late", 100.0
CRASHES, SLOW_SUPERVISOR, CUT = "crashes", "slow supervisor", "a cut"
# Of calls of the store, with bounds for an interval of 5 s; and of the store, for any interval.
_OF_CALLS: Final = ("slow answers", "lost requests", "lost answers", "late calls")
_OF_STORE: Final = ("refused writes", "a store that loses its last writes", "flush and garbage", CUT)


def kind_of(store_fault: str | None, *, has_pauses: bool) -> Kind:
    """Return the bounds of a run: those of each of its faults. A cut lasts as long as the run, so its time has none."""
    names = ["no fault", *([store_fault] if store_fault else []), *(["pauses longer than a lease"] * has_pauses)]
    kinds = [KINDS[name] for name in names]
    return kinds[-1]._replace(
        most_rate=max(each.most_rate for each in kinds),
        longest=math.inf if store_fault == CUT else max(each.longest for each in kinds),
    )


class _Clients:
    """One tenant's clients, which move from worker to worker."""

    def __init__(self, story: "WorkersStory", tenant: Tenant, per_second: float) -> None:
        self.story, self.tenant, self.per_second = story, tenant, per_second
        chance = story.world.chance
        self.ack = chance.choice(["queued", "delivered"])
        # The longest retry time that they wait for.
        self.patience_seconds = chance.choice([0.0, 5.0])
        # How often they move, in seconds.
        self.stays = chance.choice([0.2, 3.0, 20.0])
        self._process: WorkerProcess | None = None
        self._moves_at = 0.0
        self.accepted: list[tuple[float, int]] = []

    def process(self) -> WorkerProcess | None:
        """Return where the next request goes; None while no worker takes requests."""
        serving, chance, now = self.story.serving(), self.story.world.chance, self.story.world.now()
        if self._process not in serving or now >= self._moves_at:
            self._process = chance.choice(serving) if serving else None
            self._moves_at = now + self.stays * chance.expovariate(1.0)
        return self._process

    async def post_until(self, until: float) -> None:
        chance, world = self.story.world.chance, self.story.world
        count = 1 if self.tenant.records_per_second is None else PER_REQUEST
        async with asyncio.TaskGroup() as tasks:
            while world.now() < until:
                _ = tasks.create_task(self.post(count))
                await asyncio.sleep(chance.expovariate(self.per_second / count))

    async def post(self, count: int) -> None:
        """Post once; a client that waits for its retry time tries again after it."""
        story = self.story
        records = [story.record() for _ in range(count)]
        data = [record["data"].encode() for record in records]
        heard, is_unknown = story.gateways[0].heard, False
        for _ in range(2):
            process = self.process()
            if process is None:
                # No worker takes requests.
                break
            heard = story.gateway_of(process).heard
            answer = await story.call(process, self.tenant.id, records, self.ack)
            if answer is None:
                heard.unknown += data
                return
            if heard.take(self.tenant.id, answer, data):
                self.accepted.append((story.world.now(), count))
                return
            if answer.status not in {HTTPStatus.TOO_MANY_REQUESTS, HTTPStatus.SERVICE_UNAVAILABLE}:
                return
            is_unknown = is_unknown or may_be_stored(answer)
            retry_after = float(answer.headers["retry-after"])
            if retry_after > self.patience_seconds:
                break
            await asyncio.sleep(retry_after)
        if not is_unknown:
            heard.refused += data


class _Gateway(Crew):
    """One gateway: its workers, what their clients heard, and its sums."""

    def __init__(self, story: "WorkersStory", number: int, **options: Any) -> None:
        self.story, self.number = story, number
        folder = f"/world-{number}"
        identities = [WorkerIdentity(worker=each, count=story.count, folder=folder) for each in range(story.count)]
        super().__init__(story.world, story.kinesis, identities, self._gateway_of, **options)
        self.heard = Heard()
        self.sums = Sums(self.heard)
        self.finished: Counter[str] = Counter()
        self._spools: dict[int, Path] = {}

    def _gateway_of(self, process: WorkerProcess, link: SupervisorLink) -> IngestGateway:
        story, number, settings = self.story, process.identity.worker, dict(self.story.settings)
        if story.has_spool:
            settings["spool"] = self._spools.setdefault(number, story.folder / f"{self.number}-{number}.db")
        story.rates.started(story.workers)

        def hook(fact: Fact) -> None:
            if isinstance(fact, RecordsFinished) and process.is_alive:
                self.finished[fact.outcome] += fact.user_records

        return IngestGateway(
            load_settings(**settings),
            story.directory,
            transport=process.transport,
            chance=story.world.chance.random,
            supervisor=link,
            hooks=(hook,),
        )

    def crashed(self, process: WorkerProcess) -> None:
        """Count a death, and keep a copy of the spool as it is now."""
        self.sums.deaths += 1
        number = process.identity.worker
        if number in self._spools:
            path = self.story.folder / f"{self.number}-{number}-{self.sums.deaths}.db"
            self._spools[number] = copy_of(self._spools[number], path)

    async def recovered(self) -> list[str]:
        """Return what is false when there are no faults any more: everything drains, and the sums are exact."""
        false: list[str] = []
        serving = self.serving()
        if len(serving) != len({each.identity.worker for each in self.processes}):
            false.append(f"{len(serving)} workers serve after the last fault")
        for process in serving:
            assert process.gateway is not None
            false += await drained(process.gateway.producer)
        for process in serving:
            _ = await self.sums.ask(process)
        return false + await self.sums.exact(serving, self.finished, has_spool=self.story.has_spool)


class WorkersStory:
    """The story. `most_gateways`: so many at most, and two at least if there may be several."""

    most_gateways = 1

    def __init__(self, world: World, disk: Disk, folder: Path) -> None:
        chance = world.chance
        self.world, self.disk, self.folder = world, disk, folder
        self.faults_on = world.drawn(PASSING_FAULTS, 0.1)
        self.store_fault = next(iter(world.drawn([chance.choice([*_OF_CALLS, *_OF_STORE])], 0.6)), None)
        self.has_crashes = CRASHES in world.drawn([CRASHES], 0.4)
        self.is_supervisor_slow = SLOW_SUPERVISOR in world.drawn([SLOW_SUPERVISOR], 0.2)
        self.has_spool = chance.random() < 0.3
        self.disk_faults = world.drawn((*DISK_FAULTS, SLOW_DISK), 0.3) if self.has_spool else []
        self.interval = SLOW_INTERVAL if self.store_fault in _OF_CALLS else QUICK_INTERVAL
        self.until = min(max(STORY_SECONDS, STORY_INTERVALS * self.interval), world.less.seconds)
        self.kinesis = FakeKinesis({STREAM: chance.choice([1, 4])}, chance=chance.random)
        self.count = chance.choice([2, 3])
        several = random.Random(f"gateways of {world.seed}").randint(2, max(2, self.most_gateways))
        gateways = several if self.most_gateways > 1 else 1
        if gateways > 1:
            self.count -= 1
        self.workers = gateways * self.count
        burst_seconds = chance.choice([0.5, 2.0])
        rated = [f"rated-{number}" for number in range(min(chance.randint(1, 2), world.less.clients - 1))]
        rates = {name: chance.choice([100.0, 300.0]) for name in rated}
        rates[LATE] = LATE_RATE
        self.directory = KnownTenants(
            Tenant(id="quiet"),
            *(Tenant(id=name, records_per_second=rate, burst_seconds=burst_seconds) for name, rate in rates.items()),
        )
        kind = kind_of(self.store_fault, has_pauses=world.has_pauses)
        self.rates = SharedRates(
            rates, burst_seconds=burst_seconds, kind=kind, overshoot=self.workers * PER_REQUEST, interval=self.interval
        )
        self.settings = self._settings(is_shared=gateways > 1)
        weather = KINDS[self.store_fault].weather if self.store_fault else CALM
        latency_seconds = chance.choice([0.002, 0.05])
        stores: dict[str, WorldStore] = {}
        self.gateways = [
            _Gateway(self, number, latency_seconds=latency_seconds, weather=weather, stores=stores)
            for number in range(gateways)
        ]
        self.made, self.has_recovered = 0, False
        quiet, *others, late = self.directory.tenants()
        self.clients = [_Clients(self, tenant, self._speed_of(tenant)) for tenant in (quiet, *others)]
        # It stays where it is, and waits as it is asked to: a retry time is reserved for its client.
        self.late = _Clients(self, late, 2.0 * LATE_RATE)
        self.late.stays = self.late.patience_seconds = math.inf

    def _settings(self, *, is_shared: bool) -> dict[str, Any]:
        chance = self.world.chance
        settings: dict[str, Any] = {
            "region": "us-east-1",
            "admin_key": ADMIN_KEY,
            "reload_seconds": 3_600.0,
            "close_seconds": CLOSE_SECONDS,
            "request_timeout_ms": chance.choice([500, 2_000]),
            "connect_timeout_ms": 500,
            "max_outstanding_records": 20_000,
            "record_ttl_ms": chance.choice([5_000.0, 30_000.0]),
        }
        if self.has_spool:
            settings["spool_failure"] = chance.choice(["bypass", "refuse"])
        if is_shared or self.interval == SLOW_INTERVAL:
            # The leases of tenants have half the interval of those of shards.
            settings |= {"coordination": "memory://world", "coordination_interval_seconds": 2.0 * self.interval}
        if is_shared:
            settings["coordination_max_workers"] = self.workers
        return settings

    def _speed_of(self, tenant: Tenant) -> float:
        if tenant.records_per_second is None:
            return 10.0
        return tenant.records_per_second * self.world.chance.choice([0.3, 2.0, 3.0])

    def serving(self) -> list[WorkerProcess]:
        """Return the processes of all gateways that take requests."""
        return [process for gateway in self.gateways for process in gateway.serving()]

    def gateway_of(self, process: WorkerProcess) -> _Gateway:
        """Return the gateway of a process."""
        return next(each for each in self.gateways if each is process.crew)

    def links(self) -> list[StoreLink]:
        """Return the ways of all living processes to their stores."""
        return [link for gateway in self.gateways for link in gateway.links()]

    def record(self) -> dict[str, str]:
        self.made += 1
        return {"partition_key": f"k{self.world.chance.randrange(50)}", "data": f"{self.made:<10}."}

    async def call(self, process: WorkerProcess, tenant: str, records: list[dict[str, str]], ack: str) -> Answer | None:
        """Return the answer to a request; None if the worker crashed before it."""
        assert process.gateway is not None
        asking = process.call(Client(process.gateway, tenant).post(records, ack=ack))
        _ = await asyncio.wait({asking})
        return None if asking.cancelled() or not process.is_alive else asking.result()

    # Faults

    async def service_faults(self) -> None:
        chance, world = self.world.chance, self.world
        while self.faults_on and world.now() < self.until:
            seconds = min(chance.expovariate(0.2), self.until - world.now())
            arm(self.kinesis.faults, chance.choice(self.faults_on), chance, now=world.now(), seconds=seconds)
            await asyncio.sleep(chance.expovariate(0.3))

    async def crashes(self) -> None:
        while self.has_crashes:
            await asyncio.sleep(self.world.chance.expovariate(0.2))
            serving = self.serving()
            if self.world.now() >= self.until:
                return
            if serving:
                self.world.chance.choice(serving).crash()

    async def store_faults(self) -> None:
        chance, world = self.world.chance, self.world
        while self.store_fault in _OF_STORE:
            await asyncio.sleep(chance.expovariate(0.5 / self.interval))
            if world.now() >= self.until:
                return
            store = chance.choice(list(self.gateways[0].stores.values()))
            if self.store_fault == CUT:
                # None while all workers are being replaced.
                for link in chance.sample(links := self.links(), min(1, len(links))):
                    link.is_cut = not link.is_cut
            elif self.store_fault == "a store that loses its last writes":
                store.remember()
                await asyncio.sleep(chance.uniform(0.05, 0.5))
                store.forget()
            elif self.store_fault == "flush and garbage":
                if chance.random() < 0.5:
                    store.flush()
                else:
                    await store.garble(chance)

    async def slow_supervisor(self) -> None:
        while self.is_supervisor_slow and self.world.now() < self.until:
            await asyncio.sleep(self.world.chance.expovariate(0.3))
            WorldChannel.seconds = self.world.chance.choice([0.3, 3.0])
            await asyncio.sleep(self.world.chance.uniform(0.1, 3.0))
            WorldChannel.seconds = CHANNEL_SECONDS

    async def questions(self) -> None:
        """Ask any worker for the sum now and then."""
        while self.world.now() < self.until:
            await asyncio.sleep(self.world.chance.expovariate(0.5))
            if serving := self.serving():
                process = self.world.chance.choice(serving)
                sums = self.gateway_of(process).sums
                _ = await sums.ask(process)
                _ = await sums.scrape(process)

    async def recounts(self) -> None:
        while not self.has_recovered:
            self.rates.recount()
            await asyncio.sleep(0.05)

    # The story

    async def tell(self) -> list[str]:
        """Run the story, and return what is false."""
        with self.gateways[0].patched(), self.rates.watched():
            running = [await self._started(each) for each in self.gateways]
            recounting = asyncio.create_task(self.recounts())
            async with asyncio.TaskGroup() as tasks:
                for part in (self.service_faults, self.crashes, self.store_faults, self.slow_supervisor):
                    _ = tasks.create_task(part())
                _ = tasks.create_task(self.questions())
                _ = tasks.create_task(self.disk.trouble(self.disk_faults, self.world, self.until))
                _ = tasks.create_task(self.world.befall(self.until))
                for each in self.clients:
                    _ = tasks.create_task(each.post_until(self.until))
            false = await self._after_faults()
            await recounting
            lasts = []
            for gateway, running_gateway in zip(self.gateways, running, strict=True):
                gateway.supervisor.stop()
                lasts.append((await running_gateway).stats)
                for process in gateway.processes:
                    await process.end()
        copies = [read.data for read in read_everything(self.kinesis, STREAM)]
        for gateway, last in zip(self.gateways, lasts, strict=True):
            false += gateway.sums.final(last, copies) + gateway.sums.false
        return false

    @staticmethod
    async def _started(gateway: _Gateway) -> "asyncio.Task[Any]":
        """Start a gateway, and return the task of its supervisor."""
        started = asyncio.Event()
        running = asyncio.create_task(gateway.supervisor.run(started=started.set))
        _ = await started.wait()
        return running

    async def _after_faults(self) -> list[str]:
        """Without faults the leases come back, everything drains, and the sums are exact."""
        self.kinesis.faults.clear()
        for link in self.links():
            link.is_cut, link.weather = False, CALM
        # What crashed last has its replacement.
        end = self.world.now() + max(RECOVERY_INTERVALS * self.interval, 15.0)
        await self.late.post_until(end)
        got = sum(count for at, count in self.late.accepted if end - LAST_SECONDS <= at < end) / LAST_SECONDS
        self.has_recovered = True
        false = self.rates.violations()
        if got < MOST_OF_RATE * LATE_RATE:
            false.append(f"a tenant gets {got:.0f}/s of its {LATE_RATE:.0f}/s after the last fault")
        for gateway in self.gateways:
            false += await gateway.recovered()
        return false


class GatewaysStory(WorkersStory):
    """The same with several gateways, which share the rates through one store."""

    most_gateways = 3


def run_workers_story(seed: int, less: Less = WHOLE, story: type[WorkersStory] = WorkersStory) -> Run:
    """Run the story of a seed."""
    random.seed(seed)
    with world_disk() as (disk, folder):
        return run_in_world(lambda: _run(story(World(seed, less), disk, folder)))


def run_gateways_story(seed: int, less: Less = WHOLE) -> Run:
    """Run the story of a seed with several gateways."""
    return run_workers_story(seed, less, GatewaysStory)


async def _run(story: WorkersStory) -> Run:
    false = await story.tell()
    own = [story.store_fault] if story.store_fault else []
    own += [CRASHES] * story.has_crashes + [SLOW_SUPERVISOR] * story.is_supervisor_slow
    faults = [*story.faults_on, *story.disk_faults, *own, *story.world.own_faults]
    requests = sum(len(each.transport.requests) for gateway in story.gateways for each in gateway.processes)
    answers = sum((gateway.heard.answers for gateway in story.gateways), Counter[int]())
    outcomes = Counter({f"worker {status}": count for status, count in answers.items()})
    return Run(faults, story.world.now(), story.made, requests, outcomes, false, *world_loop().trace())
