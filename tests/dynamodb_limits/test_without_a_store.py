"""A store that is away since the start: the budget, which no service enforces, is divided by the workers."""

from typing import Any

import anyio
import pytest
from aiobotocore.session import get_session

from kpl_core.coordination import MemoryStore, Reading, StoreFailed
from kpl_integrations.dynamodb_limits import AsyncDistributedRateWorker
from tests.support.virtual_time import run_in_virtual_time

WORKERS = 2
BUDGET = 20.0
SECONDS = 12.0


class Away(MemoryStore):
    async def read(self, name: str) -> Reading:
        message = "no answer"
        raise StoreFailed(message, reason="down")


def answer(model: Any, **_: object) -> tuple[Any, dict[str, Any]]:
    return type("Response", (), {"status_code": 200})(), {"ConsumedCapacity": {"CapacityUnits": 1.0}}


def test_workers_that_never_reached_the_store_use_their_parts_of_the_budget():
    async def press(worker: AsyncDistributedRateWorker, session: Any) -> None:
        async with session.create_client(
            "dynamodb", region_name="us-east-1", aws_access_key_id="x", aws_secret_access_key="x"
        ) as client:
            client.meta.events.register_last("before-call.dynamodb", answer)
            worker.start()
            while True:
                await client.put_item(TableName="t", Item={"id": {"S": "1"}})

    async def scene() -> tuple[float, float]:
        sessions = [get_session() for _ in range(WORKERS)]
        workers = [
            AsyncDistributedRateWorker(
                session,
                None,
                "bucket",
                "prefix",
                autostart=False,
                aggregate_max_write_rate=BUDGET,
                worker_max_write_rate=BUDGET,
                max_workers=WORKERS,
                store=Away(),
                clock=anyio.current_time,
            )
            for session in sessions
        ]
        async with anyio.create_task_group() as tasks:
            for worker, session in zip(workers, sessions, strict=True):
                tasks.start_soon(press, worker, session)
            await anyio.sleep(SECONDS)
            total = sum(worker.limiter.rates[1] for worker in workers)
            used = sum(worker.limiter.totals()[1] for worker in workers) / SECONDS
            tasks.cancel_scope.cancel()
        for worker in workers:
            await worker.stop()
        return total, used

    total, used = run_in_virtual_time(scene, backend="asyncio")
    assert total == pytest.approx(BUDGET)
    assert 0.9 * BUDGET <= used <= 1.05 * BUDGET
