"""One worker's part in the gateway: it reports its counts to the supervisor, and shares its tenants' rates.

The supervisor keeps the last report of each worker. When a worker asks, it requests a report from all of them and adds
them up. So a sum is exact while all workers answer, and counters never fall. Each worker also reports once a second.
What a worker counted after its last report is missing if it is killed, except the counters of `record_counts.py`.

Every worker gets each sum, and a new process gets one before it takes requests. So if the supervisor does not answer,
all workers show the same last sum, and none shows less than another did.
"""

import contextlib
import logging
import os
import time
from collections.abc import AsyncIterator
from typing import Final

import anyio

from kpl_integrations.gateway_figures import StatsDocument
from kpl_integrations.ingest.admission.tenant_account import TenantAccount
from kpl_integrations.ingest.open_gateway import OpenGateway
from kpl_integrations.ingest.stats import GatewayStats, GatewayTotals
from kpl_integrations.ingest.workers.link import SupervisorLink
from kpl_integrations.ingest.workers.totals import WorkerTotals, decode_totals, encode

REPORT_SECONDS: Final = 1.0
# A worker with very many tenants spends at most this share of its time on periodic reports.
_MAX_REPORT_SHARE: Final = 0.02
# The supervisor waits 0.5 s for the other workers. Later answers mean that it is stopped, or busy.
ANSWER_SECONDS: Final = 2.0

_logger: Final = logging.getLogger("kpl_integrations.ingest.workers")


class PeerStats:
    """The statistics of all workers, as one of them shows them; `own` are this worker's."""

    def __init__(self, own: GatewayStats, link: SupervisorLink, *, inherited: int) -> None:
        self._own = own
        self._link = link
        self._inherited = inherited
        self._known: tuple[bytes, GatewayTotals] | None = None
        self._is_well = True
        # Questions to the supervisor, one at a time.
        self._asking = anyio.Lock()
        self._begun = self._ended = 0
        # Reports arrive in the order in which their counts were taken.
        self._reporting = anyio.Lock()

    async def run(self) -> None:
        """Report periodically, until cancelled."""
        while True:
            started = time.process_time()
            await self.report()
            await anyio.sleep(max(REPORT_SECONDS, (time.process_time() - started) / _MAX_REPORT_SHARE))

    async def report(self) -> None:
        """Send this worker's counts to the supervisor."""
        async with self._reporting:
            request, identity = self._link.request, self._link.identity
            totals = await self._own.totals()
            report = WorkerTotals(
                worker=identity.worker,
                process_id=os.getpid(),
                inherited=self._inherited,
                counts=self._link.counts.now(),
                drains=identity.drains,
                stats=totals.stats,
                families=list(totals.families),
            )
            await self._link.channel.send(b"report %d " % request + encode(report))

    async def totals(self) -> GatewayTotals:
        """Return the sum over all workers; the last known one if the supervisor does not answer.

        Callers that wait for the end of one question share the next one.
        """
        begun = self._begun
        async with self._asking:
            if self._ended <= begun:
                self._begun += 1
                await self._ask()
                self._ended = self._begun
        latest = self._link.latest
        if latest is None:
            # The supervisor has ended, and this worker stops.
            return await self._own.totals()
        if self._known is None or self._known[0] is not latest:
            self._known = latest, decode_totals(latest)
        return self._known[1]._replace(is_current=self._is_well)

    async def _ask(self) -> None:
        is_answered = False
        with anyio.move_on_after(ANSWER_SECONDS):
            is_answered = await self._link.ask_for_sum()
        if self._is_well and not is_answered:
            _logger.warning("the supervisor does not answer; statistics are those of the last answer")
        self._is_well = is_answered

    async def tenant_stats(self, account: TenantAccount) -> StatsDocument:
        """Return the sum over all workers, which includes the tenant's."""
        del account
        return (await self.totals()).stats


@contextlib.asynccontextmanager
async def take_part(link: SupervisorLink, opened: OpenGateway, own: GatewayStats) -> AsyncIterator[PeerStats]:
    """Report this worker's counts while the block runs."""
    stats = PeerStats(own, link, inherited=opened.producer.report().accepted)
    async with anyio.create_task_group() as tasks:
        await stats.report()
        await link.first_sum()
        link.send_report = stats.report
        tasks.start_soon(stats.run)
        try:
            yield stats
        finally:
            link.send_report = None
            tasks.cancel_scope.cancel()
