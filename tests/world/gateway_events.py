"""What befalls a gateway in the world besides faults of requests and of its disk.

One of its streams is deleted, and perhaps made again; it restarts while Kinesis is away; and its permission to put is
taken away for a time. Each has a chance of its own, so that a run without it stays as it was.
"""

import asyncio
import math
import random
import sqlite3
from contextlib import closing
from http import HTTPStatus
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from kpl_core.durability.spool.envelope import decode_record
from kpl_core.hooks import Fact, RecordsFinished, RequestCompleted
from kpl_core.testing import ErrorAnswer, When
from kpl_integrations.ingest.streams.stream_directory import ABSENT_SECONDS, NO_STREAM
from kpl_integrations.ingest.tenants import Tenant
from tests.support.consumers import read_everything
from tests.support.gateway_scene import STREAM, Answer, Client
from tests.world.service_faults import PUT

if TYPE_CHECKING:
    from tests.world.gateway_story import GatewayStory

PROBABILITY = 0.2
# A stream that is deleted; one that clients have used before an outage, and one that they have not; and their tenant.
BRIEF, SEEN, UNSEEN, OWNER = "brief", "seen", "unseen", "owner"
SHORT_CLOSE_SECONDS = 2.0
PROBE_SECONDS = 0.5
# A part says what has lasted for three seconds, and is looked at once a second.
PROBES_UNTIL_SAID = 10
# Until a replay has read the spool, from a slow disk too.
READING_SECONDS = 3.0
LOOKUP_FAILED = "The stream could not be looked up"


def streams_in(spool: Path) -> set[str]:
    """Return the streams of the records in a spool that no process has open."""
    with closing(sqlite3.connect(spool)) as connection:
        rows = connection.execute("SELECT checksum, envelope FROM spooled").fetchall()
    return {record.stream for row in rows if (record := decode_record(*row)) is not None}


def is_accepted(answer: Answer) -> bool:
    """Return True if the gateway took the records, whatever became of them."""
    return answer.status < HTTPStatus.BAD_REQUEST or "records" in answer.json()


class Event:
    """Something that befalls the gateway of a run."""

    name: str

    def __init__(self, story: "GatewayStory", chance: random.Random) -> None:
        self.story, self.chance = story, chance
        # Of the gateway, in a run with this.
        self.settings: dict[str, Any] = {}
        story.directory.change(Tenant(id=OWNER))
        # Data of the records that the event's own clients put.
        self.acknowledged: list[bytes] = []
        self.stored: set[bytes] = set()
        self.made = 0
        self._has_said = False

    def say(self, sentence: str) -> None:
        """Note that a sentence is false; the first one shows enough."""
        if not self._has_said:
            self.story.false.append(sentence)
        self._has_said = True

    def observe(self, fact: Fact) -> None:
        """Note what the producer tells its hooks."""

    def restarted(self) -> None:
        """Note that another process is the gateway now."""

    def heard(self, stream: str, title: str) -> None:
        """Check a refusal that a client of a stream heard."""

    async def befall(self, until: float) -> None:
        """Let it happen, at most until then."""

    async def after_faults(self) -> None:
        """Check what must be true when no fault is left."""

    def after_close(self) -> None:
        """Check what must be true of the event's own records."""

    def lost(self) -> int:
        """Return how many of the event's own records were acknowledged and are not stored."""
        return sum(data not in self.stored for data in self.acknowledged)

    async def put(self, stream: str, ack: str = "queued") -> tuple[bytes, Answer]:
        """Put a record, and return its data and the answer."""
        self.made += 1
        data = f"{stream} {self.made}"
        client = Client(self.story.gateway, OWNER)
        answer = await client.post([{"partition_key": data, "data": data}], stream=stream, ack=ack)
        if answer.status == HTTPStatus.ACCEPTED:
            self.acknowledged.append(data.encode())
        elif answer.status >= HTTPStatus.BAD_REQUEST:
            self.story.refused_with(stream, answer.json()["title"])
        return data.encode(), answer

    def read(self, stream: str) -> None:
        """Note what is stored in a stream now."""
        self.stored |= {read.data for read in read_everything(self.story.kinesis, stream)}


class DeletedStream(Event):
    """A stream is deleted while clients put to it. Once Kinesis has refused a put, the gateway accepts no more."""

    name = "a deleted stream"

    def __init__(self, story: "GatewayStory", chance: random.Random) -> None:
        super().__init__(story, chance)
        # It is listed for so long and takes no puts.
        self.deleting_seconds = chance.choice([0.0, 3.0])
        # A spool keeps its records for as long as it takes.
        self.returns = story.has_spool or chance.random() < 0.5
        self.ack = chance.choice(["queued", "queued", "delivered"])
        story.kinesis.create_stream(BRIEF, shard_count=1, now=0.0)
        self.delivered: list[bytes] = []
        self.is_deleted, self.gone_at = False, math.inf
        self.forget()

    def forget(self) -> None:
        """Note that this process cannot know of the deletion."""
        # Kinesis has refused a put; records were accepted since, because the stream is still listed;
        # and those were refused too.
        self.is_refused = self.is_known_again = self.is_refused_again = False

    def restarted(self) -> None:
        self.forget()

    def observe(self, fact: Fact) -> None:
        if isinstance(fact, RequestCompleted) and (fact.stream, fact.error_code) == (BRIEF, NO_STREAM):
            self.is_refused_again |= self.is_known_again
            self.is_refused = True
        elif isinstance(fact, RecordsFinished) and (fact.stream, fact.outcome) == (BRIEF, "delivered"):
            # A late answer, from before the deletion.
            self.forget()

    def must_refuse(self) -> bool:
        """Return True if the gateway can know that the stream is not there."""
        is_gone = self.story.world.now() >= self.gone_at
        return self.is_refused and (self.is_refused_again or (is_gone and not self.is_known_again))

    async def befall(self, until: float) -> None:
        chance, world = self.chance, self.story.world
        async with asyncio.TaskGroup() as tasks:
            _ = tasks.create_task(self.post_until(until))
            await asyncio.sleep(chance.uniform(1.0, 8.0))
            if world.now() >= until:
                return
            await self.delete()
            await asyncio.sleep(chance.choice([0.5, 3.0, 12.0]))
            if self.returns:
                self.make_again()

    async def delete(self) -> None:
        kinesis, world = self.story.kinesis, self.story.world
        self.is_deleted = True
        deleting = kinesis.faults.add(ErrorAnswer(NO_STREAM), When(operation=PUT, stream=BRIEF))
        await asyncio.sleep(self.deleting_seconds)
        self.read(BRIEF)
        kinesis.delete_stream(BRIEF, now=world.now())
        kinesis.faults.remove(deleting)
        self.gone_at = world.now()

    def make_again(self) -> None:
        self.story.kinesis.create_stream(BRIEF, shard_count=1, now=self.story.world.now())
        self.is_deleted, self.gone_at = False, math.inf
        self.forget()

    async def post_until(self, until: float) -> None:
        async with asyncio.TaskGroup() as tasks:
            while self.story.world.now() < until:
                _ = tasks.create_task(self.post(self.ack))
                await asyncio.sleep(self.chance.expovariate(4.0))

    async def post(self, ack: str) -> Answer:
        await self.story.is_up.wait()
        gateway, must_refuse, was_refused = self.story.gateway, self.must_refuse(), self.is_refused
        data, answer = await self.put(BRIEF, ack)
        if is_accepted(answer) and self.is_deleted and gateway is self.story.gateway:
            if must_refuse:
                self.say(f"Kinesis had said that {BRIEF} is not there: {answer.status} {answer.body!r}")
            self.is_known_again |= was_refused
        if answer.status == HTTPStatus.OK:
            result = answer.json()["records"][0]
            if "sequence_number" in result or result.get("kept") == "spooled":
                self.delivered.append(data)
        return answer

    async def after_faults(self) -> None:
        expected = HTTPStatus.NOT_FOUND if self.is_deleted else HTTPStatus.OK
        until = self.story.world.now() + ABSENT_SECONDS + 10.0
        while (answer := await self.post("delivered")).status != expected:
            await asyncio.sleep(1.0)
            if self.story.world.now() > until:
                break
        else:
            return
        self.say(f"{BRIEF}, deleted: {self.is_deleted}: {answer.status} {answer.body!r}")

    def after_close(self) -> None:
        if not self.is_deleted:
            self.read(BRIEF)
        if missing := [data for data in self.delivered if data not in self.stored]:
            self.say(f"{BRIEF}: {len(missing)} delivered or kept and not stored, such as {missing[0]!r}")


class Outage(Event):
    """While all requests to the stream fail, the part kinesis of `/readyz` says so."""

    def __init__(self, story: "GatewayStory", chance: random.Random) -> None:
        super().__init__(story, chance)
        # How often it was asked since the latest request that did not fail.
        self.probes = -1

    def observe(self, fact: Fact) -> None:
        if isinstance(fact, RequestCompleted) and fact.stream == STREAM:
            self.probes = max(0, self.probes) if fact.error_code is not None else -1

    def restarted(self) -> None:
        self.probes = -1

    async def ask_readiness(self) -> tuple[int, dict[str, Any]]:
        """Return the status of `/readyz`, and what it says of Kinesis."""
        answer = await Client(self.story.gateway).get("/readyz?verbose")
        part: dict[str, Any] = answer.json()["parts"]["kinesis"]
        if self.probes >= 0:
            self.probes += 1
        if self.probes >= PROBES_UNTIL_SAID and part["state"] == "ok":
            self.say(f"every request fails, and the part kinesis is ok: {answer.body[:300]!r}")
        return answer.status, part


class Restart(Outage):
    """The gateway restarts while Kinesis is away: it goes on with the streams of its spool, and refuses others."""

    name = "a restart in an outage"

    def __init__(self, story: "GatewayStory", chance: random.Random) -> None:
        super().__init__(story, chance)
        # A gateway that closes in an outage leaves records in its spool.
        self.settings = {"close_seconds": SHORT_CLOSE_SECONDS}
        if story.has_spool:
            self.settings["spool_replay_in_flight_records"] = chance.choice([100, 1_000])
        for stream in (SEEN, UNSEEN):
            story.kinesis.create_stream(stream, shard_count=1, now=0.0)
        # Of which streams the spool had records when the gateway opened it.
        self.in_spool: set[str] = set()
        # Those that it must know by now.
        self.must_know: set[str] = set()

    async def befall(self, until: float) -> None:
        chance, story = self.chance, self.story
        await asyncio.sleep(chance.uniform(2.0, 10.0))
        _ = await self.put(SEEN)
        now = story.world.now()
        ends_at = min(now + chance.uniform(8.0, 15.0), until)
        if now >= ends_at:
            return
        code = chance.choice(["InternalFailure", "ServiceUnavailable"])
        _ = story.kinesis.faults.add(ErrorAnswer(code), When(starts_at=now, ends_at=ends_at))
        await asyncio.sleep(chance.choice([0.0, 1.0, 3.0]))
        _ = await self.put(SEEN)
        await story.restart(down_seconds=chance.choice([0.0, 2.0]))
        failed_lookups, opened_at = 0, story.world.now()
        while story.world.now() < ends_at:
            if failed_lookups >= PROBES_UNTIL_SAID:
                # Not before: a gateway that knows a stream is ready for it.
                _ = await self.put(SEEN)
            _, answer = await self.put(UNSEEN)
            status, part = await self.ask_readiness()
            if story.world.now() >= ends_at:
                return
            if answer.status != HTTPStatus.SERVICE_UNAVAILABLE:
                self.say(f"{UNSEEN} is not in the spool: {answer.status} {answer.body!r}")
            failed_lookups = failed_lookups + 1 if code in answer.json()["detail"] else 0
            self.check_readiness(status, part, failed_lookups)
            self.must_know = self.in_spool if story.world.now() > opened_at + READING_SECONDS else set()
            await asyncio.sleep(PROBE_SECONDS)

    def check_readiness(self, status: int, part: dict[str, Any], failed_lookups: int) -> None:
        story = self.story
        if self.in_spool and not story.disk_faults and not part["accepts_records"]:
            self.say(f"its spool has records, and it is not ready: {part}")
        # Look-ups that are throttled show nothing.
        is_said = status != HTTPStatus.OK or "no listings" in story.faults_on
        if failed_lookups >= PROBES_UNTIL_SAID and not self.in_spool and not is_said:
            self.say(f"it can look up no stream, and is ready: {part}")

    def restarted(self) -> None:
        super().restarted()
        spool = self.story.settings.spool
        self.in_spool = set() if spool is None else streams_in(spool)

    def heard(self, stream: str, title: str) -> None:
        # A stream that Kinesis has refused a put to is looked up again.
        if stream in self.must_know and stream != BRIEF and title == LOOKUP_FAILED:
            self.say(f"refused with {title!r}, and the spool had records of {stream}")

    async def after_faults(self) -> None:
        _, answer = await self.put(UNSEEN, "delivered")
        if answer.status != HTTPStatus.OK:
            self.say(f"{UNSEEN} after the outage: {answer.status} {answer.body!r}")

    def after_close(self) -> None:
        self.read(SEEN)
        self.read(UNSEEN)


class NoPermission(Outage):
    """The permission to put to the stream is taken away for a time."""

    name = "no permission"

    async def befall(self, until: float) -> None:
        await asyncio.sleep(self.chance.uniform(2.0, 12.0))
        now = self.story.world.now()
        ends_at = min(now + self.chance.uniform(1.0, 12.0), until)
        when = When(operation=PUT, stream=STREAM, starts_at=now, ends_at=ends_at)
        _ = self.story.kinesis.faults.add(ErrorAnswer("AccessDeniedException"), when)
        while self.story.world.now() < ends_at:
            await self.story.is_up.wait()
            _ = await self.ask_readiness()
            await asyncio.sleep(PROBE_SECONDS)


EVENTS: Final[tuple[type[Event], ...]] = (DeletedStream, Restart, NoPermission)


def events_of(story: "GatewayStory") -> list[Event]:
    """Return the events of this run."""
    events = []
    for kind in EVENTS:
        chance = random.Random(f"{kind.name} of {story.world.seed}")
        if chance.random() < PROBABILITY and kind.name not in story.world.less.without:
            events.append(kind(story, chance))
    return events
