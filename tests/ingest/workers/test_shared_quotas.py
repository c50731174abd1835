"""One tenant's rate across several workers, in virtual time: never exceeded, and nearly all of it where it is used."""

from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager

import anyio
import pytest

from kpl_core.coordination import MemoryStore, Reading, StoreFailed
from kpl_integrations.ingest import IngestSettings, load_settings
from kpl_integrations.ingest.admission.tenant_account import TenantAccounts
from kpl_integrations.ingest.tenants import Tenant
from kpl_integrations.ingest.workers.link import WorkerIdentity
from kpl_integrations.ingest.workers.shared_quotas import SharedQuotas, sharing_of
from tests.support.virtual_time import Backend

pytestmark = pytest.mark.anyio
RATE = 1_000.0
BURST_SECONDS = 0.1
REQUEST = 5
STEP_SECONDS = 0.01
TENANT = Tenant(id="t", records_per_second=RATE, burst_seconds=BURST_SECONDS)


@pytest.fixture
def anyio_backend(virtual_time_backend: Backend) -> Backend:
    return virtual_time_backend


class Worker:
    """One worker's accounts, limited by its leases; `taken` are times and records."""

    def __init__(self, store: MemoryStore, number: int, count: int) -> None:
        identity = WorkerIdentity(worker=number, count=count, folder="/nowhere")
        sharing = sharing_of(IngestSettings(), identity)
        assert sharing is not None
        self.quotas = SharedQuotas(
            store, sharing.quotas, clock=anyio.current_time, chance=lambda: 0.5, tell=lambda _: None
        )
        self.accounts = TenantAccounts(
            clock=anyio.current_time, chance=lambda: 0.5, idempotency_keys=1, idempotency_seconds=1.0
        )
        self.accounts.opened = self.quotas.opened
        self.taken: list[tuple[float, int]] = []
        self._owed = 0.0

    def receive(self, per_second: float, tenant: Tenant = TENANT) -> None:
        """Receive one step's requests, at a rate in records a second."""
        quota = self.accounts.of(tenant).quota
        assert quota is not None
        now = anyio.current_time()
        self._owed += per_second * STEP_SECONDS
        while self._owed >= REQUEST:
            self._owed -= REQUEST
            quota.offer(REQUEST, 0)
            if quota.try_take(REQUEST, 0, now) is None:
                self.taken.append((now, REQUEST))

    def taken_since(self, began_at: float) -> int:
        return sum(records for at, records in self.taken if at >= began_at)


class Away(MemoryStore):
    """A store that never answers."""

    async def read(self, name: str) -> Reading:
        message = "no answer"
        raise StoreFailed(message, reason="down")


@asynccontextmanager
async def workers(
    count: int, kind: type[MemoryStore] = MemoryStore, *, planned: int = 0
) -> AsyncIterator[list[Worker]]:
    store = kind(clock=lambda: anyio.current_time() + 1e9)
    found = [Worker(store, number, planned or count) for number in range(count)]
    async with AsyncExitStack() as stack:
        tasks = await stack.enter_async_context(anyio.create_task_group())
        stack.callback(tasks.cancel_scope.cancel)
        for worker in found:
            tasks.start_soon(await stack.enter_async_context(worker.quotas.taking_part()))
        yield found


async def load(found: Sequence[Worker], offers: Sequence[float], seconds: float) -> float:
    """Send each worker this many records a second; return the time of the start."""
    began_at = anyio.current_time()
    while anyio.current_time() < began_at + seconds - STEP_SECONDS / 2:
        for worker, per_second in zip(found, offers, strict=True):
            worker.receive(per_second)
        await anyio.sleep(STEP_SECONDS)
    return began_at


def most_in(found: Sequence[Worker], window: float) -> int:
    """Return the maximum that all workers took in any window of this many seconds."""
    taken = sorted(each for worker in found for each in worker.taken)
    most = within = first = 0
    for at, records in taken:
        within += records
        while taken[first][0] < at - window:
            within -= taken[first][1]
            first += 1
        most = max(most, within)
    return most


def bound(count: int, window: float) -> float:
    return RATE * BURST_SECONDS + 1.1 * RATE * window + count * REQUEST


@pytest.mark.long
@pytest.mark.parametrize("count", [2, 4, 16])
async def test_flooded_workers_together_take_no_more_than_one_worker_would(count):
    async with workers(count) as found:
        await load(found, [2 * RATE] * count, 10.0)
        for window in (0.1, 1.0, 5.0):
            assert most_in(found, window) <= bound(count, window)
        assert sum(worker.taken_since(3.0) for worker in found) >= 0.9 * RATE * 7.0


async def test_a_tenant_that_uses_one_worker_gets_nearly_its_whole_rate_there():
    async with workers(4) as found:
        await load(found, [2 * RATE, 0, 0, 0], 6.0)
        assert found[0].taken_since(2.0) >= 0.9 * RATE * 4.0
        assert most_in(found, 1.0) <= bound(4, 1.0)


async def test_without_a_store_since_the_start_a_tenants_rate_is_divided_by_the_processes():
    async with workers(2, Away) as found:
        began_at = await load(found, [RATE, RATE / 4], 5.0)
    assert found[0].taken_since(began_at) <= RATE / 2 * (5.0 + BURST_SECONDS) + REQUEST
    assert found[0].taken_since(began_at) >= 0.95 * RATE / 2 * 5.0
    # It asks for half of its part, and nothing is refused.
    assert found[1].taken_since(began_at) >= 0.99 * RATE / 4 * 5.0


def test_the_processes_that_usually_run_are_an_option_of_the_gateway():
    settings = load_settings(coordination="redis://host/0", coordination_max_workers=16, coordination_usual_workers=3)
    sharing = sharing_of(settings, None)
    assert sharing is not None
    assert (sharing.quotas.max_workers, sharing.quotas.usual_workers) == (16, 3)


async def test_a_rate_follows_its_tenant_to_another_worker_within_two_seconds():
    async with workers(2) as found:
        await load(found, [2 * RATE, 0], 5.0)
        moved_at = await load(found, [0, 2 * RATE], 6.0)
        assert found[1].taken_since(moved_at + 2.0) >= 0.9 * RATE * 4.0
        for window in (0.5, 1.0, 5.0):
            assert most_in(found, window) <= bound(2, window)


async def test_a_tenant_within_its_rate_is_almost_never_throttled_on_any_worker():
    async with workers(2) as found:
        await load(found, [RATE / 2, RATE / 10], 10.0)
        offered = 0.6 * RATE * 8.0
        assert sum(worker.taken_since(2.0) for worker in found) >= 0.99 * offered


async def test_after_a_pause_a_tenant_gets_its_rate_again_and_no_more():
    async with workers(2) as found:
        await load(found, [2 * RATE, 2 * RATE], 5.0)
        # Longer than the leaseholder keeps an idle tenant.
        await anyio.sleep(30.0)
        woken_at = await load(found, [2 * RATE, 2 * RATE], 6.0)
        for window in (0.5, 1.0, 5.0):
            assert most_in(found, window) <= bound(2, window)
        assert sum(worker.taken_since(woken_at + 2.0) for worker in found) >= 0.9 * RATE * 4.0


async def test_a_tenant_that_sends_again_gets_more_than_a_newcomers_share_in_a_tenth_of_a_second():
    """A worker without active tenants next measures when it syncs, up to a quarter of a second later."""
    async with workers(4) as found:
        await load(found, [RATE / 20] * 4, 5.0)
        await anyio.sleep(30.1)
        await load(found, [2 * RATE, 0, 0, 0], 0.1)
        assert found[0].quotas._worker.share("t", (RATE, 1.0))[0] >= 0.1 * RATE  # noqa: SLF001 - its lease
        # The other three have no more than what every plan reserves for newcomers.
        await load(found, [2 * RATE, 0, 0, 0], 0.3)
        assert found[0].quotas._worker.share("t", (RATE, 1.0))[0] >= 0.9 * RATE  # noqa: SLF001 - its lease


async def test_a_tenants_first_records_at_a_worker_have_the_share_of_the_present_plan():
    """A request that is refused before its records are offered opens the account, which kept the share of that time."""
    async with workers(2) as found:
        _ = found[1].accounts.of(TENANT)
        await load(found, [2 * RATE, 0], 10.0)
        found[1].receive(REQUEST / STEP_SECONDS)
        quotas = [worker.accounts.of(TENANT).quota for worker in found]
        assert sum(quota._rates[0] for quota in quotas if quota is not None) <= RATE  # noqa: SLF001 - in force


async def test_a_retry_time_does_not_count_on_the_share_before_the_lease():
    """Of a plan for 64 workers that is a thousandth of the rate: clients were told to wait for minutes."""
    async with workers(2, planned=64) as found:
        await load(found, [2 * RATE, 0], 2.0)
        longest = 0.0
        for _ in range(200):
            for worker in found:
                worker.receive(2 * RATE)
                quota = worker.accounts.of(TENANT).quota
                assert quota is not None
                longest = max(longest, quota.states(REQUEST, 0, anyio.current_time())[0].ready_in)
            await anyio.sleep(STEP_SECONDS)
        assert longest <= 4 * REQUEST / RATE


async def test_in_an_outage_of_the_store_waits_are_planned_with_the_part_in_force(monkeypatch):
    """The part stays as it is, so nothing else tells the quota that it will get no more."""
    async with workers(2) as found:
        offers = [2 * RATE, RATE / 50]
        await load(found, offers, 5.0)
        quota = found[1].accounts.of(TENANT).quota
        assert quota is not None
        assert quota.seconds_for(REQUEST, 0) == pytest.approx(2 * REQUEST / RATE, rel=0.1)
        monkeypatch.setattr(MemoryStore, "read", Away.read)
        await load(found, offers, 10.0)
        in_force = quota._rates[0]  # noqa: SLF001 - in force
        assert in_force < 0.2 * RATE
        assert quota.seconds_for(REQUEST, 0) == pytest.approx(REQUEST / in_force)


async def test_changed_rates_of_a_tenant_apply_at_once():
    slower = Tenant(id="t", records_per_second=RATE / 10, burst_seconds=BURST_SECONDS)
    async with workers(2) as found:
        await load(found, [2 * RATE, 2 * RATE], 5.0)
        changed_at = anyio.current_time()
        for _ in range(500):
            for worker in found:
                worker.receive(2 * RATE, slower)
            await anyio.sleep(STEP_SECONDS)
        taken = sum(worker.taken_since(changed_at) for worker in found)
        assert taken <= slower.burst_seconds * RATE / 10 + 1.1 * RATE / 10 * 5.0 + 2 * REQUEST
        assert taken >= 0.8 * RATE / 10 * 5.0


async def test_a_tenant_without_rates_has_no_quota():
    async with workers(2) as found:
        assert found[0].accounts.of(Tenant(id="free")).quota is None


async def test_workers_synchronize_from_the_first_tenant_with_a_rate_on(monkeypatch):
    worker = Worker(MemoryStore(), 0, 2)
    synchronizer, steps = worker.quotas._worker, [0]  # noqa: SLF001 - its rounds are counted
    step = synchronizer.step

    async def counted() -> None:
        steps[0] += 1
        await step()

    monkeypatch.setattr(synchronizer, "step", counted)
    async with worker.quotas.taking_part() as share, anyio.create_task_group() as tasks:
        tasks.start_soon(share)
        assert worker.accounts.of(Tenant(id="free")).quota is None
        await anyio.sleep(60)
        assert steps == [1]
        worker.receive(RATE)
        await anyio.sleep(5)
        assert steps[0] > 10
        tasks.cancel_scope.cancel()
