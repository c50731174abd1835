"""A worker process for the supervisor's tests. It reports invented counts and does what its instructions say.

    {"worker": 0, "accepted": 3, "tenants": 2, "then": "wait", "result": "/a/path"}

`then` is "wait" for the supervisor's orders, "ask" for the sum `times` times and write the longest wait in seconds and
the last sum to `result`, "note" which sockets to accept from, a line of `result` for each order, "ask and die" by
SIGKILL before the answer, "die" by SIGKILL after a report, "tear" a second report in the middle by SIGKILL,
"garble" the further reports, "end" in order at once, "disconnect" as one that the system ends, or "hang" and ignore all
orders.
"""

import asyncio
import json
import os
import signal
import socket
import time
from collections.abc import Collection
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

from kpl_integrations.gateway_figures import RecordStats, StatsDocument, TenantStats
from kpl_integrations.ingest.admission.tenant_account import TenantAccount
from kpl_integrations.ingest.stats import GatewayTotals
from kpl_integrations.ingest.workers.link import Channel, StopRequests, SupervisorLink, WorkerIdentity
from kpl_integrations.ingest.workers.peer_stats import PeerStats
from kpl_integrations.ingest.workers.record_counts import RecordCounts
from kpl_integrations.ingest.workers.totals import WorkerTotals, encode

REUSED_PROCESS_ID = 4_711


class InventedStats:
    """The statistics of a worker that accepted `accepted` records of each of its tenants, and delivered them."""

    def __init__(self, accepted: int, tenants: int) -> None:
        self.accepted, self.tenants = accepted, tenants

    async def totals(self) -> GatewayTotals:
        every = TenantStats(requests=1, accepted_records=self.accepted)
        total = self.accepted * self.tenants
        stats = StatsDocument(
            state="open",
            tenants={f"tenant-{number}": every for number in range(self.tenants)},
            records=RecordStats(accepted=total, delivered=total),
        )
        return GatewayTotals(stats, [])

    async def tenant_stats(self, account: TenantAccount) -> StatsDocument:
        raise NotImplementedError


async def report_of(worker: int, own: InventedStats) -> WorkerTotals:
    totals = await own.totals()
    return WorkerTotals(
        worker=worker, process_id=REUSED_PROCESS_ID, inherited=0, stats=totals.stats, families=list(totals.families)
    )


def note(result: Path, numbers: Collection[int]) -> None:
    with result.open("a") as lines:
        lines.write(f"{list(numbers)}\n")


async def garble(channel: Channel) -> None:
    for _ in range(600):
        await channel.send(b"report 0 {")
        await asyncio.sleep(0.1)


async def ask(stats: PeerStats, own: InventedStats, times: int, result: Path) -> None:
    instants, totals = [time.monotonic()], await own.totals()
    for _ in range(times):
        totals = await stats.totals()
        instants.append(time.monotonic())
    longest = max(later - earlier for earlier, later in pairwise(instants))
    part = result.with_suffix(".partial")
    part.write_bytes(b"%f " % longest + encode(totals))
    part.rename(result)


async def run() -> None:
    channel = await Channel.over(socket.socket(fileno=0))
    instructions: dict[str, Any] = json.loads(await channel.receive() or b"{}")
    number, then = instructions["worker"], instructions["then"]
    own = InventedStats(instructions["accepted"], instructions["tenants"])
    counts = RecordCounts([0] * 5)
    link = SupervisorLink(channel, WorkerIdentity(worker=number, count=2, folder="/nowhere"), counts)
    stats = PeerStats(own, link, inherited=0)
    link.send_report = stats.report
    if then == "note":
        link.accept_from = partial(note, Path(instructions["result"]))
    stopped = asyncio.Event()
    obeying = asyncio.create_task(link.run(StopRequests(lambda _: stopped.set())))
    channel.post(b"ready")
    await channel.send(b"report 0 " + encode(await report_of(number, own)))
    if then == "ask":
        await ask(stats, own, instructions.get("times", 1), Path(instructions["result"]))
    elif then == "garble":
        await garble(channel)
    elif then in {"disconnect", "hang"}:
        if then == "disconnect":
            await asyncio.sleep(0.5)
            socket.socket(fileno=0).shutdown(socket.SHUT_RDWR)
        time.sleep(600)  # noqa: ASYNC251 - this worker hangs
    elif then in {"die", "tear", "ask and die"}:
        if then == "ask and die":
            await channel.send(b"totals 1")
        if then == "tear":
            own.accepted *= 1_000
            half = encode(await report_of(number, own))
            os.write(0, b"report 0 " + half[: len(half) // 2])
        os.kill(os.getpid(), signal.SIGKILL)
    if then != "end":
        await stopped.wait()
    await stats.report()
    obeying.cancel()


if __name__ == "__main__":
    asyncio.run(run())
