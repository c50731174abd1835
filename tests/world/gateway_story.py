"""A gateway in the world: quiet and noisy tenants POST while faults befall Kinesis and its disk; all by one seed.

The gateway is the real ASGI application with its producer, on a virtual clock, with a spool or without. Its clients
call it without a socket.
"""

import asyncio
import math
import random
from collections import Counter
from http import HTTPStatus
from pathlib import Path
from typing import Any

from kpl_core import ProducerReport
from kpl_core.hooks import Fact
from kpl_core.testing import FakeKinesis
from kpl_core.testing.fake_transport import FakeTransport
from kpl_integrations.ingest import IngestGateway, load_settings
from kpl_integrations.ingest.tenants import Tenant
from tests.support.consumers import read_as_kcl, read_everything
from tests.support.gateway_scene import STREAM, Answer, Client, KnownTenants
from tests.world.disk import DISK_FAULTS, SLOW_DISK, Disk, world_disk
from tests.world.gateway_events import LOOKUP_FAILED, Event, Restart, events_of
from tests.world.invariants import Run, drained
from tests.world.network import WHOLE, Less, World
from tests.world.service_faults import PASSING_FAULTS, arm, may_double
from tests.world.world_loop import run_in_world, world_loop

STORY_SECONDS, RECOVERY_SECONDS = 30.0, 15.0
CLOSE_SECONDS = 60.0
QUIET_PER_SECOND = 10.0
QUIET_QUOTA, QUOTA_BURST_SECONDS = 15.0, 4.0
OVER_RATE = "Over the tenant's rate"
# A refusal assigns a retry time, which reserves tokens for its client.
RESERVED_SECONDS = 10.0
# A story costs a second of CPU with the first; only with the last does an overload take long.
MOST_RECORDS = (6_000, 6_000, 6_000, 40_000)
# Reasons for which a tenant within its rate may be refused: no tenant's records can flow.
NO_FLOW = frozenset({"The stream does not answer", "The spool takes no more"})
NOTHING_FLOWS = NO_FLOW | {LOOKUP_FAILED, "Out of room"}

ANSWERS = frozenset({200, 202, 207, 409, 429, 502, 503, 504})
MOST_TRIES = 50
# Answers of `ack=delivered` after the records were accepted.
DELIVERING = frozenset({"Gateway Timeout", "Bad Gateway", "No record was delivered in time", "Kinesis took no record"})
# Of a quiet tenant; what may be said of its rate, `_Tokens` knows.
EXPECTED = NOTHING_FLOWS | DELIVERING | {OVER_RATE}
CLOSING = "Shutting down"


def may_be_stored(refusal: Answer) -> bool:
    """Return True if the records were accepted, and none is known to be delivered: an answer of Kinesis may be lost."""
    return "records" in refusal.json()


class _Tokens:
    """What a tenant's rate must at least have left: only records that were accepted, or may have been, cost tokens."""

    def __init__(self, per_second: float, seconds: float) -> None:
        self._per_second, self._most = per_second, per_second * seconds
        self._tokens, self._at, self._refused_at = self._most, 0.0, -math.inf
        # Records that may have been counted by now.
        self.held = 0

    def add(self, tokens: float, now: float) -> None:
        self._tokens = min(self._most, self._tokens + (now - self._at) * self._per_second + tokens)
        self._at = now

    def refused(self, now: float) -> str:
        """Return what is false of a refusal because there are no tokens left; "" for nothing."""
        self.add(0.0, now)
        was_refused, self._refused_at = now < self._refused_at + RESERVED_SECONDS, now
        left = self._tokens - self.held
        return "" if was_refused or left < 2.0 else f"{OVER_RATE}, which has {left:.1f} tokens left"


class Serving:
    """A gateway in a task of its own, so that another one can follow it."""

    def __init__(self, gateway: IngestGateway) -> None:
        self._opened: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._stop_wanted = asyncio.Event()
        self._task = asyncio.create_task(self._serve(gateway))

    async def _serve(self, gateway: IngestGateway) -> None:
        async with gateway:
            self._opened.set_result(None)
            _ = await self._stop_wanted.wait()

    async def opened(self) -> None:
        """Wait until it is open, and raise what ended it before."""
        _ = await asyncio.wait({self._task, self._opened}, return_when=asyncio.FIRST_COMPLETED)
        if self._task.done():
            await self._task

    async def stop(self) -> None:
        """Close the gateway, and raise what ended it."""
        self._stop_wanted.set()
        await self._task


class GatewayTenant:
    """One tenant's clients and what they heard."""

    def __init__(self, story: "GatewayStory", tenant: Tenant, per_second: float) -> None:
        self.story, self.tenant, self.per_second = story, tenant, per_second
        self.client: Any = Client(story.gateway, tenant.id)
        chance = story.world.chance
        self.ack = chance.choice(["queued", "delivered", "spooled"] if story.has_spool else ["queued", "delivered"])
        self.obeys_retry_after = chance.random() < 0.5
        # A client that stops waiting and has a key sends the request again.
        self.has_keys = chance.random() < 0.4
        self.patience_seconds = chance.choice([None, None, 0.05, 2.0])
        # Data of records by what the client heard of their request.
        self.acknowledged: list[bytes] = []
        self.kept: list[bytes] = []
        self.keyed: list[bytes] = []
        self.refused: list[bytes] = []
        # Accepted, and failed as the client heard.
        self.failed: list[bytes] = []
        self.tokens = _Tokens(tenant.records_per_second or math.inf, QUOTA_BURST_SECONDS)
        self.titles: Counter[str] = Counter()
        self.answers: Counter[int] = Counter()

    async def post_until(self, until: float) -> None:
        chance, world = self.story.world.chance, self.story.world
        count = 1 if self.per_second <= QUIET_PER_SECOND else 50
        async with asyncio.TaskGroup() as tasks:
            while world.now() < until and self.story.made < self.story.most_records:
                _ = tasks.create_task(self.post(count))
                await asyncio.sleep(chance.expovariate(self.per_second / count))

    async def post(self, count: int) -> None:
        """Post once; a client that obeys `Retry-After` tries again after that time."""
        records = [self.story.record() for _ in range(count)]
        data = [record["data"].encode() for record in records]
        self.keyed += data if self.has_keys else []
        is_unknown = False
        for _ in range(MOST_TRIES if self.has_keys else 3):
            answer = await self.answer_to(records)
            if answer is None:
                is_unknown = True
                if not self.has_keys:
                    return
                continue
            self.answers[answer.status] += 1
            if answer.status == HTTPStatus.CONFLICT:
                await asyncio.sleep(float(answer.headers["retry-after"]))
                continue
            if answer.status in {HTTPStatus.OK, HTTPStatus.ACCEPTED}:
                self.note_results(answer, data, is_unknown=is_unknown)
                return
            await self.note_refusal(answer)
            if answer.status not in {HTTPStatus.TOO_MANY_REQUESTS, HTTPStatus.SERVICE_UNAVAILABLE}:
                self.failed += data if may_be_stored(answer) and not is_unknown else []
                return
            is_unknown = is_unknown or may_be_stored(answer)
            if not self.obeys_retry_after:
                break
            await asyncio.sleep(float(answer.headers["retry-after"]))
        if not is_unknown:
            self.refused += data

    def note_results(self, answer: Answer, data: list[bytes], *, is_unknown: bool) -> None:
        """Note what the client heard of each record. `is_unknown`: an earlier try may have stored them."""
        results = answer.json().get("records", [])
        failed = {index for index, result in enumerate(results) if "sequence_number" not in result}
        self.acknowledged += [each for index, each in enumerate(data) if index not in failed]
        self.kept += [data[index] for index in failed if results[index].get("kept") == "spooled"]
        self.failed += [data[index] for index in failed if "kept" not in results[index] and not is_unknown]

    async def note_refusal(self, answer: Answer) -> None:
        title = answer.json()["title"]
        self.titles[title] += 1
        self.story.refused_with(STREAM, title)
        if title in NO_FLOW:
            await self.story.ask_readiness(title)

    async def answer_to(self, records: list[dict[str, str]]) -> Answer | None:
        """Return the answer; None: the client stops waiting, and the gateway goes on."""
        _ = await self.story.is_up.wait()
        self.tokens.add(-len(records), self.story.world.now())
        asking = asyncio.create_task(self.client.post(records, ack=self.ack, **self.fields_of(records)))
        if await asyncio.wait({asking}, timeout=self.patience_seconds) != (set(), {asking}):
            answer: Answer = await asking
            self.heard(answer, len(records))
            return answer
        self.story.left.append(asking)
        return None

    def fields_of(self, records: list[dict[str, str]]) -> dict[str, str]:
        """Return the header fields of a request."""
        return {"idempotency_key": f'"{self.tenant.id} {records[0]["data"]}"'} if self.has_keys else {}

    def heard(self, answer: Answer, count: int) -> None:
        """Note what an answer says of the tenant's rate."""
        if answer.status < HTTPStatus.BAD_REQUEST:
            return
        self.tokens.add(count, self.story.world.now())
        if answer.json()["title"] == OVER_RATE and self.tenant.id == "quiet":
            self.story.false += filter(None, [self.tokens.refused(self.story.world.now())])


class GatewayStory:
    """The story; `connections/connections_story.py` puts a network between the clients and the gateway."""

    seconds = STORY_SECONDS
    has_events = True

    def __init__(self, world: World, disk: Disk, folder: Path) -> None:
        chance = world.chance
        self.world, self.disk = world, disk
        self.until = min(self.seconds, world.less.seconds)
        self.faults_on = world.drawn(PASSING_FAULTS, 0.2)
        self.has_spool = chance.random() < 0.4
        self.disk_faults = world.drawn((*DISK_FAULTS, SLOW_DISK), 0.4) if self.has_spool else []
        self.network_names: list[str] = []
        self.false: list[str] = []
        self.kinesis = FakeKinesis({STREAM: chance.choice([1, 4])}, chance=chance.random)
        self.transport = FakeTransport(self.kinesis, latency_seconds=chance.choice([0.002, 0.05]))
        noisy = [f"noisy-{number}" for number in range(min(chance.randint(0, 3), world.less.clients - 1))]
        rates: dict[str, Any] = {"records_per_second": 500} if chance.random() < 0.5 else {}
        quota: dict[str, Any] = {}
        if chance.random() < 0.5:
            quota = {"records_per_second": QUIET_QUOTA, "burst_seconds": QUOTA_BURST_SECONDS}
        tenants = [Tenant(id="quiet", **quota), *(Tenant(id=name, **rates) for name in noisy)]
        spool: dict[str, Any] = {}
        if self.has_spool:
            spool = {"spool": folder / "spool.db", "spool_failure": chance.choice(["bypass", "refuse"])}
        self.directory = KnownTenants(*tenants)
        self.events: list[Event] = events_of(self) if self.has_events else []
        self.restarts = any(isinstance(event, Restart) for event in self.events)
        others: dict[str, Any] = {"close_seconds": CLOSE_SECONDS}
        for event in self.events:
            others |= event.settings
        self.settings = load_settings(
            region="us-east-1",
            reload_seconds=3_600.0,
            request_timeout_ms=chance.choice([500, 2_000]),
            connect_timeout_ms=500,
            max_outstanding_records=chance.choice([2_000, 20_000]),
            record_ttl_ms=chance.choice([5_000.0, 30_000.0]),
            **spool,
            **others,
        )
        self.gateway = self.new_gateway()
        # While it takes requests.
        self.is_up = asyncio.Event()
        # Of the processes that have ended.
        self.reports: list[ProducerReport] = []
        self.made, self.most_records = 0, chance.choice(MOST_RECORDS)
        # Requests whose clients have stopped waiting.
        self.left: list[asyncio.Task[Answer]] = []
        self.tenants = self.clients_of(tenants)

    def new_gateway(self) -> IngestGateway:
        return IngestGateway(
            self.settings,
            self.directory,
            transport=self.transport,
            chance=self.world.chance.random,
            hooks=[self.observe] if self.events else [],
        )

    def observe(self, fact: Fact) -> None:
        for event in self.events:
            event.observe(fact)

    def clients_of(self, tenants: list[Tenant]) -> list[GatewayTenant]:
        """Return the clients of each tenant, the quiet one first."""
        chance = self.world.chance
        speeds = [QUIET_PER_SECOND, *(chance.choice([200.0, 2_000.0, 10_000.0]) for _ in tenants[1:])]
        return [GatewayTenant(self, tenant, speed) for tenant, speed in zip(tenants, speeds, strict=True)]

    async def network_faults(self) -> None:
        """Do nothing: without a network there are none."""

    async def disconnected(self) -> list[str]:
        """Close all connections, and return what is false of them."""
        return []

    def record(self) -> dict[str, str]:
        self.made += 1
        return {"partition_key": f"k{self.world.chance.randrange(50)}", "data": f"{self.made:<10}."}

    async def faults(self, until: float) -> None:
        chance, world = self.world.chance, self.world
        while self.faults_on and world.now() < until:
            seconds = min(chance.expovariate(0.2), until - world.now())
            arm(self.kinesis.faults, chance.choice(self.faults_on), chance, now=world.now(), seconds=seconds)
            await asyncio.sleep(chance.expovariate(0.3))

    def refused_with(self, stream: str, title: str) -> None:
        for event in self.events:
            event.heard(stream, title)

    async def start(self) -> None:
        self.serving = Serving(self.gateway)
        await self.serving.opened()
        self.is_up.set()

    async def restart(self, *, down_seconds: float) -> None:
        """Stop the gateway, and start another one with its options and its spool."""
        await self.serving.stop()
        self.is_up.clear()
        self.reports.append(self.gateway.producer.report())
        await asyncio.sleep(down_seconds)
        self.gateway = self.new_gateway()
        for event in self.events:
            event.restarted()
        for each in self.tenants:
            each.client = Client(self.gateway, each.tenant.id)
        await self.start()

    async def ask_readiness(self, title: str) -> None:
        """While Kinesis or the disk takes no records, the gateway is not ready, or says that a part is not ok."""
        answer = await Client(self.gateway).get("/readyz?verbose")
        states = {part["state"] for part in answer.json().get("parts", {}).values()}
        if answer.status == HTTPStatus.OK and states <= {"ok"}:
            self.false.append(f"refused with {title!r}, and ready with all parts ok: {answer.body[:300]!r}")

    async def tell(self) -> list[str]:
        """Run the story, and return what is false."""
        false = self.false
        await self.start()
        async with asyncio.TaskGroup() as tasks:
            _ = tasks.create_task(self.faults(self.until))
            _ = tasks.create_task(self.disk.trouble(self.disk_faults, self.world, self.until))
            _ = tasks.create_task(self.world.befall(self.until))
            _ = tasks.create_task(self.network_faults())
            for tenant in self.tenants:
                _ = tasks.create_task(tenant.post_until(self.until))
            for event in self.events:
                _ = tasks.create_task(event.befall(self.until))
        self.kinesis.faults.clear()
        await asyncio.sleep(RECOVERY_SECONDS)
        false += await drained(self.gateway.producer)
        if self.left:
            _ = await asyncio.wait(self.left)
        last = await Client(self.gateway, "quiet").post([self.record()], ack="delivered")
        if last.status != HTTPStatus.OK:
            false.append(f"after the last fault: {last.status} {last.body[:200]!r}")
        ready = await Client(self.gateway).get("/readyz")
        if ready.status != HTTPStatus.OK:
            false.append(f"not ready after the last fault: {ready.body[:300]!r}")
        for event in self.events:
            await event.after_faults()
        false += await self.disconnected()
        await self.serving.stop()
        for event in self.events:
            event.after_close()
        return false + self.violations()

    def violations(self) -> list[str]:
        """Return what is false after the close."""
        # A KCL drops what a split made its reader find in the wrong shard, and the producer sends it again.
        read = Counter(each.data for each in read_as_kcl(self.kinesis, STREAM, now=self.world.now()))
        stored = {read.data for read in read_everything(self.kinesis, STREAM)}
        doubles = may_double(self.faults_on, self.kinesis, STREAM, has_pauses=self.world.has_pauses) or self.restarts
        false = self.miscounted(stored)
        for each in self.tenants:
            name = each.tenant.id
            if not each.answers.keys() <= ANSWERS:
                false.append(f"{name} was answered {dict(each.answers)}")
            promised = each.kept + (each.acknowledged if each.ack in {"delivered", "spooled"} else [])
            if missing := [data for data in promised if data not in stored]:
                false.append(f"{name}: {len(missing)} acknowledged ({each.ack}) and not stored, such as {missing[0]!r}")
            if not doubles and (doubled := [data for data in each.keyed if read[data] > 1]):
                false.append(f"{name}: {len(doubled)} sent with a key and read twice, such as {doubled[0]!r}")
            if not doubles and (there := [data for data in each.failed if data in read]):
                false.append(f"{name}: {len(there)} failed, as its client heard, and read, such as {there[0]!r}")
            if ghosts := [data for data in each.refused if data in stored]:
                false.append(f"{name}: {len(ghosts)} refused and stored, such as {ghosts[0]!r}")
        quiet, expected = self.tenants[0], EXPECTED | ({CLOSING} if self.restarts else set())
        if wrongly := {title: count for title, count in quiet.titles.items() if title not in expected}:
            false.append(f"the quiet tenant was refused: {wrongly}")
        return false

    def miscounted(self, stored: set[bytes]) -> list[str]:
        """Return what is false of the reports of all processes."""
        false: list[str] = []
        reports = [*self.reports, self.gateway.producer.report()]
        for report in reports:
            there = report.delivered + report.failed_total + report.spooled + report.dead_lettered
            if report.accepted != there or report.buffered:
                false.append(f"the books do not close: {report}")
            if report.failed.get("NotSpooled") and all(each.ack != "spooled" for each in self.tenants):
                false.append(f"records that need no disk failed because it did: {report}")
        queued = sum(len(each.acknowledged) for each in self.tenants if each.ack == "queued")
        accepted = sum(report.accepted - report.found for report in reports)
        if accepted < queued:
            false.append(f"{queued} acknowledged, {accepted} accepted")
        lost = sum(data not in stored for each in self.tenants for data in each.acknowledged)
        lost += sum(event.lost() for event in self.events)
        counted = sum(report.failed_total for report in reports) + reports[-1].spooled + reports[-1].dead_lettered
        if lost > counted:
            false.append(f"{lost} acknowledged and not stored, and {counted} counted as failed or kept")
        return false


def run_gateway_story(seed: int, less: Less = WHOLE, story: type[GatewayStory] = GatewayStory) -> Run:
    """Run the story of a seed."""
    random.seed(seed)
    with world_disk() as (disk, folder):
        return run_in_world(lambda: _run(story(World(seed, less), disk, folder)))


async def _run(story: GatewayStory) -> Run:
    false = await story.tell()
    outcomes = Counter(
        {f"{each.tenant.id[:5]} {status}": count for each in story.tenants for status, count in each.answers.items()}
    )
    own = [event.name for event in story.events] + story.world.own_faults
    faults = story.faults_on + story.disk_faults + story.network_names + own
    requests = len(story.transport.requests)
    return Run(faults, story.world.now(), story.made, requests, outcomes, false, *world_loop().trace())
