"""The connection between supervisor and worker: whole messages or none, one stop for one signal, and a bounded wait."""

import signal
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import anyio
import anyio.lowlevel
import pytest

from kpl_integrations.ingest.workers import peer_stats
from kpl_integrations.ingest.workers.link import Channel, StopRequests, SupervisorLink, WorkerIdentity
from kpl_integrations.ingest.workers.peer_stats import PeerStats
from kpl_integrations.ingest.workers.record_counts import RecordCounts
from kpl_integrations.ingest.workers.totals import DeadTotals, decode_report, encode, sum_of
from tests.ingest.workers.fake_worker import InventedStats
from tests.support.waiting import until

pytestmark = pytest.mark.anyio
_SECONDS = 30
TERM, INT = signal.SIGTERM, signal.SIGINT


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@asynccontextmanager
async def channels() -> AsyncIterator[tuple[Channel, Channel]]:
    """Yield both ends of a connection."""
    one, other = socket.socketpair()
    both = await Channel.over(one), await Channel.over(other)
    with anyio.fail_after(_SECONDS):
        yield both
    await closed(*both)


async def closed(*ends: Channel) -> None:
    for each in ends:
        each.close()
    await anyio.lowlevel.checkpoint()


async def test_messages_arrive_whole_and_in_order():
    async with channels() as (one, other):
        sent = [b"ready", b"x" * 5_000_000, b"totals 1"]

        async def send() -> None:
            for each in sent:
                await one.send(each)

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(send)
            assert [await other.receive() for _ in sent] == sent


async def test_a_message_that_the_end_of_the_other_process_cut_short_is_dropped():
    here, there = socket.socketpair()
    channel = await Channel.over(here)
    there.sendall(b"report 1 {}\nreport 2 {")
    there.close()
    with anyio.fail_after(_SECONDS):
        assert [await channel.receive(), await channel.receive()] == [b"report 1 {}", None]
        # The other process is gone: nothing is sent, and nothing is raised.
        for _ in range(10):
            await channel.send(b"more")
    await closed(channel)


async def test_the_last_messages_of_a_process_arrive_after_a_failed_write():
    here, there = socket.socketpair()
    channel = await Channel.over(here)
    there.sendall(b"ready\nreport 1 {}\n")
    there.close()
    channel.post(b"report 2")
    channel.post(b"report 3")
    with anyio.fail_after(_SECONDS):
        assert [await channel.receive() for _ in range(3)] == [b"ready", b"report 1 {}", None]
    await closed(channel)


async def test_a_cancelled_send_still_sends_the_whole_message():
    here, there = socket.socketpair()
    one = await Channel.over(here)
    with anyio.move_on_after(0.05) as scope:
        await one.send(b"x" * 5_000_000)
    assert scope.cancelled_caught
    one.post(b"next")
    other = await Channel.over(there)
    with anyio.fail_after(_SECONDS):
        assert await other.receive() == b"x" * 5_000_000
        assert await other.receive() == b"next"
    await closed(one, other)


@pytest.mark.parametrize(
    ("received", "stops"),
    [
        pytest.param([("direct", TERM), ("passed on", TERM)], [TERM], id="one signal, sent to the whole group"),
        pytest.param([("passed on", TERM), ("direct", TERM)], [TERM], id="the same, in the other order"),
        pytest.param([("passed on", TERM), ("passed on", TERM)], [TERM, TERM], id="a second signal"),
        pytest.param([("direct", TERM), ("direct", TERM)], [TERM], id="the worker alone is signalled twice"),
        pytest.param(
            [("passed on", INT), ("passed on", INT), ("passed on", INT)], [INT, INT, INT], id="Ctrl-C three times"
        ),
        pytest.param(
            [("direct", TERM), ("passed on", TERM), ("direct", TERM), ("passed on", TERM)],
            [TERM, TERM],
            id="two signals, both sent to the whole group",
        ),
    ],
)
async def test_a_signal_to_the_whole_process_group_stops_a_worker_once(received, stops):
    seen: list[signal.Signals] = []
    requests = StopRequests(seen.append)
    for source, number in received:
        (requests.signalled if source == "direct" else requests.passed_on)(number)
    assert seen == stops


async def accepted_sum(count: int) -> bytes:
    return encode(await InventedStats(accepted=count, tenants=1).totals())


@asynccontextmanager
async def linked() -> AsyncIterator[tuple[Channel, SupervisorLink, PeerStats]]:
    """Yield the supervisor's end, a worker's link, and its statistics."""
    async with channels() as (supervisor, worker), anyio.create_task_group() as tasks:
        link = SupervisorLink(worker, WorkerIdentity(worker=0, count=2, folder="/nowhere"), RecordCounts([0] * 5))
        stats = PeerStats(InventedStats(accepted=1, tenants=1), link, inherited=0)
        link.send_report = stats.report
        tasks.start_soon(link.run, StopRequests(lambda _: None))
        await supervisor.send(b"sum 0 " + await accepted_sum(3))
        await link.first_sum()
        yield supervisor, link, stats
        tasks.cancel_scope.cancel()


async def test_a_report_names_the_request_that_arrived_before_its_counts_were_taken():
    async with linked() as (supervisor, _, stats):
        await stats.report()
        supervisor.post(b"report 7")
        messages = [await supervisor.receive() or b"" for _ in range(2)]
        assert [each.split(b" ")[:2] for each in messages] == [[b"report", b"0"], [b"report", b"7"]]
        assert decode_report(messages[1].split(b" ", 2)[2]).stats.records.accepted == 1


async def test_a_late_answer_does_not_end_the_next_question_and_the_sum_never_falls(monkeypatch, caplog):
    monkeypatch.setattr(peer_stats, "ANSWER_SECONDS", 0.05)
    async with linked() as (supervisor, link, stats):
        # Without an answer the sum is the one that came with the instructions, not this worker's own count of 1.
        assert (await stats.totals()).stats.records.accepted == 3
        late = await accepted_sum(4)
        supervisor.post(b"sum 1 " + late)
        await until(lambda: link.latest == late)
        monkeypatch.setattr(peer_stats, "ANSWER_SECONDS", _SECONDS)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(answer, supervisor, 2, await accepted_sum(5))
            assert (await stats.totals()).stats.records.accepted == 5
        # The supervisor is silent again: the sum stays what it was, or is the one that another worker asked for.
        monkeypatch.setattr(peer_stats, "ANSWER_SECONDS", 0.05)
        assert (await stats.totals()).stats.records.accepted == 5
        supervisor.post(b"sum 0 " + await accepted_sum(6))
        assert (await stats.totals()).stats.records.accepted == 6
    assert caplog.text.count("the supervisor does not answer") == 2


async def test_figures_are_current_only_if_the_supervisor_answered(monkeypatch):
    async with linked() as (supervisor, _, stats):
        monkeypatch.setattr(peer_stats, "ANSWER_SECONDS", 0.05)
        assert not (await stats.totals()).is_current
        monkeypatch.setattr(peer_stats, "ANSWER_SECONDS", _SECONDS)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(answer, supervisor, 2, await accepted_sum(5))
            assert (await stats.totals()).is_current


async def answer(supervisor: Channel, number: int, body: bytes) -> None:
    while (message := await supervisor.receive()) != b"totals %d" % number:
        assert message is not None
    await supervisor.send(b"sum %d " % number + body)


async def test_scrapes_that_wait_for_a_question_share_the_next_one(caplog):
    """One may not share the running question, because its answer may lack what was counted before the scrape."""
    sums: list[int] = []
    async with linked() as (supervisor, _, stats), anyio.create_task_group() as tasks:

        async def scrape() -> None:
            sums.append((await stats.totals()).stats.records.accepted)

        tasks.start_soon(scrape)
        assert await supervisor.receive() == b"totals 1"
        for _ in range(20):
            tasks.start_soon(scrape)
        await anyio.lowlevel.checkpoint()
        await supervisor.send(b"sum 1 " + await accepted_sum(4))
        await answer(supervisor, 2, await accepted_sum(5))
        await until(lambda: len(sums) == 21)
        supervisor.post(b"report 7")
        # No third question came before this report.
        assert (await supervisor.receive() or b"").startswith(b"report 7 ")
    assert sums == [4] + [5] * 20
    assert not caplog.records


async def test_a_cancelled_scrape_leaves_its_question_to_the_next():
    async with linked() as (supervisor, _, stats), anyio.create_task_group() as tasks:
        with anyio.move_on_after(0.01):
            await stats.totals()
        tasks.start_soon(answer, supervisor, 2, await accepted_sum(5))
        assert (await stats.totals()).stats.records.accepted == 5


async def test_a_worker_stops_when_its_supervisor_is_gone_and_shows_the_last_sum():
    stopped = anyio.Event()
    here, there = socket.socketpair()
    link = SupervisorLink(
        await Channel.over(here), WorkerIdentity(worker=0, count=2, folder="/nowhere"), RecordCounts([0] * 5)
    )
    stats = PeerStats(InventedStats(accepted=1, tenants=1), link, inherited=0)
    with anyio.fail_after(_SECONDS):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(link.run, StopRequests(lambda _: stopped.set()))
            there.close()
            await stopped.wait()
        assert (await stats.totals()).stats.records.accepted == 1
    await closed(link.channel)


async def test_the_sum_over_no_reports_can_be_sent():
    assert b"closed" in encode(sum_of([], DeadTotals()))
