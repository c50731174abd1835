"""The limiter's hooks on real boto3 and aiobotocore clients with prepared answers, in virtual time."""

import asyncio
import json
import threading
from typing import Any

import boto3
import pytest
from aiobotocore.session import get_session
from botocore.awsrequest import AWSResponse, HeadersDict
from botocore.config import Config
from botocore.exceptions import ClientError
from hypothesis import given, strategies as st

from kpl_core import ConfigError, CoordinationOptions
from kpl_core.coordination import MemoryStore
from kpl_integrations.dynamodb_limits import SessionLimiter
from kpl_integrations.dynamodb_limits.leased_rate import leased_worker
from kpl_integrations.dynamodb_limits.repetition import RepeatingTask, RepeatingThread, Repetition
from kpl_integrations.dynamodb_limits.session_limiter import PostpaidBucket

KEY = {"id": {"S": "1"}}


class Clock:
    """A clock that only `sleep` advances."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


class Body:
    def __init__(self, body: bytes) -> None:
        self._body = body

    def stream(self, **_: object):
        yield self._body


class Table:
    """Answers a client's requests instead of DynamoDB."""

    def __init__(self, units: Any = 1.0, *, status: int = 200, error: str = "") -> None:
        self.units = units
        self.status = status
        self.error = error
        self.requests: list[dict[str, Any]] = []

    def __call__(self, request: Any, **_: object) -> AWSResponse:
        sent = json.loads(request.body)
        self.requests.append(sent)
        answer: dict[str, Any] = {}
        if self.error:
            answer = {"__type": self.error, "message": ""}
        elif sent.get("ReturnConsumedCapacity") in {"TOTAL", "INDEXES"}:
            answer["ConsumedCapacity"] = (
                self.units if isinstance(self.units, list) else {"TableName": "t", "CapacityUnits": self.units}
            )
        headers: Any = HeadersDict()
        return AWSResponse(request.url, self.status, headers, Body(json.dumps(answer).encode()))


def client_of(limiter: SessionLimiter, table: Table) -> Any:
    session = boto3.Session(aws_access_key_id="x", aws_secret_access_key="x", region_name="us-east-1")
    limiter.attach(session)
    # One attempt: with retries botocore itself would wait up to half a minute.
    client = session.client("dynamodb", config=Config(retries={"total_max_attempts": 1}))
    client.meta.events.register("before-send.dynamodb", table)
    return client


def limited(clock: Clock, read: float = 10.0, write: float = 10.0) -> SessionLimiter:
    return SessionLimiter(read_rate=read, write_rate=write, clock=clock, sleep=clock.sleep)


def test_reads_and_writes_have_their_own_rates():
    clock = Clock()
    table = Table(1.0)
    limiter = limited(clock, read=10.0, write=5.0)
    client = client_of(limiter, table)
    for _ in range(110):
        client.get_item(TableName="t", Key=KEY)
    # A burst of one second, then ten a second.
    assert clock.now == pytest.approx(10.0, abs=0.2)
    for _ in range(60):
        client.put_item(TableName="t", Item=KEY)
    assert clock.now == pytest.approx(10.0 + 11.0, abs=0.4)
    assert limiter.totals() == (110.0, 60.0)


def test_the_next_call_waits_for_the_debt_of_an_expensive_one():
    clock = Clock()
    table = Table(100.0)
    client = client_of(limited(clock), table)
    client.query(TableName="t", KeyConditionExpression="id = :id", ExpressionAttributeValues={":id": {"S": "1"}})
    assert clock.now == 0.0
    table.units = 1.0
    client.get_item(TableName="t", Key=KEY)
    assert clock.now == pytest.approx(9.1)


def test_the_cost_estimate_follows_the_last_costs():
    clock = Clock()
    table = Table(5.0)
    client = client_of(limited(clock), table)
    for _ in range(41):
        client.scan(TableName="t")
    assert clock.now == pytest.approx(41 * 5 / 10 - 1, abs=0.6)


def test_consumed_capacity_is_requested_unless_the_caller_did():
    table = Table()
    client = client_of(limited(Clock()), table)
    client.get_item(TableName="t", Key=KEY)
    client.get_item(TableName="t", Key=KEY, ReturnConsumedCapacity="INDEXES")
    client.describe_table(TableName="t")
    assert [sent.get("ReturnConsumedCapacity") for sent in table.requests] == ["TOTAL", "INDEXES", None]


def test_transactions_count_reads_and_writes_separately():
    table = Table([{"TableName": "t", "ReadCapacityUnits": 2.0, "WriteCapacityUnits": 6.0, "CapacityUnits": 8.0}])
    limiter = limited(Clock())
    client = client_of(limiter, table)
    client.transact_write_items(TransactItems=[{"Put": {"TableName": "t", "Item": KEY}}])
    assert limiter.totals() == (2.0, 6.0)


def test_a_throttled_call_costs_nothing_and_a_failed_condition_costs_the_estimate():
    clock = Clock()
    table = Table(status=400, error="ProvisionedThroughputExceededException")
    limiter = limited(clock)
    client = client_of(limiter, table)
    with pytest.raises(ClientError):
        client.put_item(TableName="t", Item=KEY)
    assert limiter.totals() == (0.0, 0.0)
    table.error = "ConditionalCheckFailedException"
    with pytest.raises(ClientError):
        client.put_item(TableName="t", Item=KEY)
    assert limiter.totals() == (0.0, 1.0)


def test_rates_can_be_changed_and_a_debt_stays():
    clock = Clock()
    limiter = limited(clock)
    client = client_of(limiter, Table(20.0))
    client.put_item(TableName="t", Item=KEY)
    limiter.set_rates(10.0, 100.0)
    assert limiter.rates == (10.0, 100.0)
    client.put_item(TableName="t", Item=KEY)
    assert clock.now == pytest.approx(0.167, abs=0.01)
    with pytest.raises(ConfigError, match="finite number above 0"):
        limiter.set_rates(0.0, 1.0)


def test_an_aiobotocore_client_waits_without_blocking_the_loop():
    async def scene() -> tuple[float, int]:
        session = get_session()
        limiter = SessionLimiter(read_rate=1_000.0, write_rate=100.0, burst_seconds=0.1)
        limiter.attach(session)
        ticks = 0

        async def tick() -> None:
            nonlocal ticks
            while True:
                ticks += 1
                await asyncio.sleep(0.01)

        async with session.create_client(
            "dynamodb", region_name="us-east-1", aws_access_key_id="x", aws_secret_access_key="x"
        ) as client:

            def answer(model: Any, **_: object) -> tuple[Any, dict[str, Any]]:
                return type("Response", (), {"status_code": 200})(), {"ConsumedCapacity": {"CapacityUnits": 5.0}}

            client.meta.events.register_last("before-call.dynamodb", answer)
            ticking = asyncio.create_task(tick())
            for _ in range(12):
                await client.put_item(TableName="t", Item=KEY)
            ticking.cancel()
        return limiter.totals()[1], ticks

    consumed, ticks = asyncio.run(scene())
    assert consumed == 60.0
    # 60 units at 100 a second take at least a third of a second, in which the loop ran.
    assert ticks > 10


@given(st.lists(st.tuples(st.floats(0, 3), st.floats(0.1, 50), st.floats(0, 50)), max_size=60))
def test_consumption_is_at_most_the_rate_plus_one_burst_plus_one_cost(calls):
    bucket = PostpaidBucket(10.0, burst_seconds=1.0, now=0.0)
    now = 0.0
    consumed = 0.0
    for pause, estimate, actual in calls:
        now += pause
        now += bucket.reserve(estimate, now)
        # Consumed before this call.
        assert consumed <= 10.0 * now + 10.0 + 100.0 + 1e-6
        bucket.settle(estimate, actual, now)
        consumed += actual
    assert bucket.total == pytest.approx(consumed)


def test_a_thread_continues_after_failures_reports_each_series_once_and_can_be_restarted():
    steps: list[int] = []
    reported: list[Exception] = []
    reached = threading.Semaphore(0)

    def step() -> None:
        steps.append(len(steps))
        reached.release()
        if len(steps) % 4:
            message = "unexpected"
            raise RuntimeError(message)

    repetition = Repetition(name="tests", pause=lambda: 0.001, pauses_first=True, on_failure=reported.append)
    thread = RepeatingThread(step, repetition)
    for _ in range(2):
        thread.start()
        thread.start()
        for _ in range(8):
            assert reached.acquire(timeout=30)
        thread.stop()
    # Three failures in a row are reported once, and again after a successful step.
    assert len(reported) == len([number for number in steps if number % 4 == 0])


def test_a_task_continues_after_failures_and_can_be_restarted():
    async def scene() -> int:
        reported: list[Exception] = []
        steps = asyncio.Semaphore(0)

        async def step() -> None:
            steps.release()
            raise RuntimeError

        task = RepeatingTask(step, Repetition("tests", lambda: 0.001, pauses_first=False, on_failure=reported.append))
        for _ in range(2):
            task.start()
            async with asyncio.timeout(30):
                for _ in range(5):
                    await steps.acquire()
            await task.stop()
        return len(reported)

    assert asyncio.run(scene()) == 1


def test_the_units_of_refused_calls_are_demand():
    """Otherwise a table that refuses most calls looks like a fleet that wants little."""
    limiter = limited(Clock())
    client = client_of(limiter, Table(status=400, error="ThrottlingException"))
    for _ in range(3):
        with pytest.raises(ClientError):
            client.put_item(TableName="t", Item=KEY)
    assert limiter.totals() == (0.0, 0.0)
    assert limiter.demand() == ((0.0, 3.0), (0.0, 0.0))
    assert (limiter.call_count, limiter.refused_count) == (3, 3)


def test_a_waiting_call_follows_a_rate_that_is_raised_meanwhile():
    clock = Clock()
    limiter = SessionLimiter(read_rate=1.0, write_rate=0.01, burst_seconds=0.1, clock=clock, sleep=clock.sleep)
    limiter.on_waiting = lambda: limiter.set_rates(1.0, 10.0)
    client = client_of(limiter, Table(1.0))
    client.put_item(TableName="t", Item=KEY)
    # At a hundredth of a unit a second this call would wait for more than a minute.
    client.put_item(TableName="t", Item=KEY)
    assert clock.now < 1.0


def test_limiters_divide_the_rates_by_leases_and_a_busy_one_gets_what_idle_ones_leave():
    clock = Clock()
    store = MemoryStore(lambda: 1e9 + clock.now)
    limiters = [
        SessionLimiter(read_rate=1.0, write_rate=1.0, burst_seconds=0.1, clock=clock, sleep=clock.sleep)
        for _ in range(4)
    ]
    workers = [
        leased_worker(
            limiter,
            store,
            CoordinationOptions(store="memory://unused", max_workers=4, worker_id=f"w{index}"),
            total=(100.0, 50.0),
            worker_max=(100.0, 50.0),
            clock=clock,
            wall_clock=lambda: 1e9 + clock.now,
            chance=lambda: 0.5,
        )
        for index, limiter in enumerate(limiters)
    ]
    client = client_of(limiters[0], Table(1.0))
    for second in range(40):
        while clock.now < second:
            # Each call waits for its units, in virtual time.
            client.put_item(TableName="t", Item=KEY)

        async def step() -> None:
            for worker in workers:
                await worker.step()

        asyncio.run(step())
        assert sum(limiter.rates[1] for limiter in limiters) <= 50.0 * 1.001
    assert limiters[0].rates[1] >= 0.9 * 50.0
    assert min(limiter.rates[1] for limiter in limiters[1:]) > 0.0
