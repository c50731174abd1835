"""Large bodies are put as a whole or not at all, one at a time and in turns, and small requests run between slices."""

import gzip
import json
from collections import Counter
from itertools import pairwise

import anyio
import pytest

from kpl_integrations.ingest import load_settings
from kpl_integrations.ingest.admission.clients import ClientRoom, SharedRoom
from kpl_integrations.ingest.admission.refusals import Refused
from kpl_integrations.ingest.decoding import small_body
from kpl_integrations.ingest.http import large_bodies
from kpl_integrations.ingest.http.large_bodies import SLICE_SECONDS, LargeBodies
from kpl_integrations.ingest.request import records
from kpl_integrations.ingest.tenants import OpenTenants, Tenant
from tests.support.gateway_scene import JSON, NDJSON, STREAM, Client, kinesis, open_gateway

pytestmark = pytest.mark.anyio

PATH = f"/v1/streams/{STREAM}/records"
COUNT = 3_000


def lines(count: int = COUNT, *, size: int = 60, last: bytes = b"") -> bytes:
    made = [b'{"partition_key":"k%d","data":"%d%b"}' % (number % 50, number, b"." * size) for number in range(count)]
    return b"\n".join([*made, last] if last else made)


@pytest.mark.parametrize("ack", ["queued", "delivered"])
@pytest.mark.parametrize("encoding", ["", "gzip"])
@pytest.mark.parametrize("tier", ["normal", "critical"])
async def test_every_record_of_a_large_body_is_delivered(ack, encoding, tier):
    body = gzip.compress(lines()) if encoding else lines()
    directory = OpenTenants(Tenant(id="local", tier=tier))
    async with open_gateway(directory=directory) as gateway:
        headers = {"content-type": NDJSON, **({"content-encoding": encoding} if encoding else {})}
        answer = await Client(gateway).call("POST", f"{PATH}?ack={ack}", body, headers=headers)
        assert (answer.status, answer.json()["accepted"]) == (202 if ack == "queued" else 200, COUNT)
        if ack == "delivered":
            assert Counter("error_code" in each for each in answer.json()["records"]) == {False: COUNT}
    assert gateway.report is not None
    assert gateway.report.delivered == COUNT


@pytest.mark.parametrize("ack", ["queued", "delivered"])
async def test_a_body_is_found_to_be_large_once(ack, monkeypatch):
    found = list[bytes | None]()

    def counted(*args) -> bytes | None:
        found.append(small_body(*args))
        return found[-1]

    monkeypatch.setattr(records, "small_body", counted)
    async with open_gateway() as gateway:
        headers = {"content-type": NDJSON, "content-encoding": "gzip"}
        answer = await Client(gateway).call("POST", f"{PATH}?ack={ack}", gzip.compress(lines()), headers=headers)
        assert (answer.status, found) == (202 if ack == "queued" else 200, [None])


@pytest.mark.parametrize("last", [b"{}", b"[", b'{"partition_key":"","data":"x"}'])
async def test_one_bad_record_at_the_end_refuses_all(last):
    async with open_gateway() as gateway:
        client = Client(gateway)
        answer = await client.call("POST", PATH, lines(last=last), headers={"content-type": NDJSON})
        assert (answer.status, answer.json()["errors"][0]["index"]) == (400, COUNT)
        assert gateway.producer.report().accepted == 0
        answer = await client.call("POST", f"{PATH}?partial=true", lines(last=last), headers={"content-type": NDJSON})
        assert (answer.status, answer.json()["accepted"]) == (202, COUNT)


async def test_a_large_body_without_room_puts_nothing():
    async with open_gateway(max_outstanding_records=COUNT - 1) as gateway:
        answer = await Client(gateway).call("POST", PATH, lines(), headers={"content-type": NDJSON})
        assert answer.status in {413, 429, 503}
        assert gateway.producer.report().accepted == 0
        assert gateway.producer.buffer_limit.outstanding_records == 0


async def test_small_requests_are_answered_while_a_large_one_is_decoded_and_put(monkeypatch):
    # Each step ends its slice.
    monkeypatch.setattr(large_bodies, "SLICE_SECONDS", 0.0)
    async with open_gateway() as gateway:
        client, during = Client(gateway), [0, 0]
        await client.post({"data": "x"})
        answers: list[int] = []

        async def large() -> None:
            answers.append((await client.call("POST", PATH, lines(), headers={"content-type": NDJSON})).status)

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(large)
            while not answers:
                await anyio.lowlevel.checkpoint()
                assert (await client.post({"data": "x"})).status == 202
                during[gateway.producer.buffer_limit.outstanding_records > COUNT] += 1
        # Before its records took room, and while they were put.
        assert min(during) >= 5, during
    assert gateway.report is not None
    assert gateway.report.delivered == COUNT + sum(during) + 1


async def test_a_client_that_disappears_while_its_records_are_put_loses_none(monkeypatch):
    async with open_gateway() as gateway:
        client = Client(gateway)
        await client.post({"data": "x"})
        with anyio.CancelScope() as scope:
            put = gateway.opened.large_bodies.put

            async def put_and_cancel(group) -> None:
                scope.cancel()
                await put(group)

            monkeypatch.setattr(gateway.opened.large_bodies, "put", put_and_cancel)
            await client.call("POST", PATH, lines(), headers={"content-type": NDJSON})
        assert scope.cancelled_caught
        assert gateway.producer.report().accepted == COUNT + 1
        # The turn is free again.
        async with gateway.opened.large_bodies.turn(ClientRoom(SharedRoom(10), "x"), 1):
            pass


async def test_a_gateway_that_closes_puts_the_rest_of_a_group():
    async with open_gateway() as gateway:
        await Client(gateway).post({"data": "x"})
        pairs = [(f"k{number}", b"x") for number in range(COUNT)]
        group = gateway.producer.internal.begin_group(STREAM, pairs, flow="local")
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(gateway.opened.large_bodies.put, group)
            while gateway.producer.report().accepted == 1:
                await anyio.lowlevel.checkpoint()
            await gateway.close()
    assert gateway.report is not None
    assert gateway.report.delivered == COUNT + 1


async def test_clients_take_turns_and_a_cancelled_body_gives_its_turn_away():
    turns, order = LargeBodies(10.0), list[str]()
    room = SharedRoom(1_000)

    async def body(client: str, name: str) -> None:
        async with turns.turn(ClientRoom(room, client), 10):
            order.append(name)
            await anyio.lowlevel.checkpoint()

    async with anyio.create_task_group() as tasks, turns.turn(ClientRoom(room, "z"), 10):
        for name in ("a1", "a2", "a3", "b1"):
            tasks.start_soon(body, name[0], name)
            await anyio.wait_all_tasks_blocked()
        with anyio.CancelScope() as gone:
            async with anyio.create_task_group() as others:
                others.start_soon(body, "c", "c1")
                await anyio.wait_all_tasks_blocked()
                gone.cancel()
        assert room.used_bytes == 50
    assert order == ["a1", "b1", "a2", "a3"]
    assert room.used_bytes == 0


async def test_a_body_that_waits_too_long_or_finds_no_room_is_refused():
    turns, room = LargeBodies(0.01), SharedRoom(100)
    async with turns.turn(ClientRoom(room, "a"), 60):
        with pytest.raises(Refused, match="other large bodies"):
            async with turns.turn(ClientRoom(room, "b"), 10):
                pass
        with pytest.raises(Refused, match="unfinished bodies use"):
            async with turns.turn(ClientRoom(room, "a"), 60):
                pass
        assert room.used_bytes == 60
    assert room.used_bytes == 0


@pytest.mark.parametrize("bodies", [1, 10])
async def test_in_a_round_of_the_loop_runs_one_slice_of_a_few_milliseconds_of_the_clock(bodies):
    now, slices, done = [0.0], list[int](), list[str]()

    def steps():
        for _ in range(100):
            now[0] += 0.001
            yield
        return "done"

    turns = LargeBodies(10.0, lambda: now[0])

    async def run() -> None:
        done.append(await turns.run(steps()))

    async with anyio.create_task_group() as tasks:
        for _ in range(bodies):
            tasks.start_soon(run)
        while len(done) < bodies:
            slices.append(round(now[0] * 1_000))
            await anyio.lowlevel.checkpoint()
    assert done == ["done"] * bodies
    longest = max(after - before for before, after in pairwise(slices))
    # trio runs the tasks of a round in any order, so two slices may follow each other.
    assert longest <= 2 * (SLICE_SECONDS * 1_000 + 1)


@pytest.mark.parametrize(("busy_ms", "most_share"), [(0.0, 1.0), (1.0, 0.5), (10.0, 0.2)])
async def test_a_pause_has_two_rounds_and_other_work_gets_half_of_the_time(anyio_backend_name, busy_ms, most_share):
    now, rounds, sliced, done = [0.0], [0], [0.0], list[str]()
    between: list[int] = []

    def steps():
        for _ in range(100):
            between.append(rounds[0])
            now[0] += 0.004
            sliced[0] += 0.004
            yield
        return "done"

    turns = LargeBodies(10.0, lambda: now[0])

    async def run() -> None:
        done.append(await turns.run(steps()))

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(run)
        while not done:
            rounds[0] += 1
            now[0] += busy_ms / 1_000
            await anyio.lowlevel.checkpoint()
    pauses = [after - before for before, after in pairwise(between)]
    # trio runs the tasks of a round in any order.
    if anyio_backend_name == "asyncio":
        assert min(pauses) >= 2
        assert sliced[0] / now[0] <= most_share
    # If nothing else takes time, no round is waited for in vain.
    assert busy_ms or max(pauses) <= 3


def test_a_record_of_the_largest_size_can_be_sent_in_any_form():
    limits = load_settings(max_record_bytes=4 << 20).decode_limits()
    assert limits.max_uncut_bytes >= limits.max_record_bytes * 4 / 3


async def test_a_single_record_that_is_too_large_to_decode_at_once_is_refused():
    async with open_gateway(transport=kinesis()) as gateway:
        body = json.dumps({"data": "x" * (3 << 20)}).encode()
        answer = await Client(gateway).call("POST", PATH, body, headers={"content-type": JSON})
        assert (answer.status, answer.json()["code"]) == (413, "too-large")
        assert "max_uncut_bytes" in answer.json()["detail"]


async def test_a_body_that_is_evicted_when_it_gets_its_turn_gives_it_away():
    turns, room = LargeBodies(10.0), SharedRoom(100)
    evicting = ClientRoom(room, "c").hold(lambda: None)

    async def evicted() -> None:
        with pytest.raises(Refused):
            async with turns.turn(ClientRoom(room, "b"), 80):
                pytest.fail("it has no room")

    async with anyio.create_task_group() as tasks:
        async with turns.turn(ClientRoom(room, "a"), 10):
            tasks.start_soon(evicted)
            await anyio.wait_all_tasks_blocked()
        # The other body has the turn now, and its task has not run yet.
        assert evicting.try_take(30)
    evicting.release()
    with anyio.fail_after(5):
        async with turns.turn(ClientRoom(room, "a"), 10):
            pass
    assert room.used_bytes == 0


async def test_a_body_that_has_its_turn_keeps_its_room():
    turns, room = LargeBodies(10.0), SharedRoom(100)
    other = ClientRoom(room, "b").hold(lambda: None)
    async with turns.turn(ClientRoom(room, "a"), 80):
        assert not other.try_take(30)
        assert other.try_take(20)
        assert room.used_bytes == 100
    assert (room.bytes_of("a"), room.used_bytes) == (0, 20)
