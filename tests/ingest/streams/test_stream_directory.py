"""A stream has one pipeline for its name and its ARN, and tenants cannot write to forbidden streams."""

import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import anyio
import pytest
from hypothesis import given, strategies as st

from kpl_core.testing import ErrorAnswer, FakeKinesis, When
from kpl_core.testing.fake_transport import FakeTransport
from kpl_core.transport import RequestFailure
from kpl_integrations.ingest.admission.refusals import Refusal, Refused
from kpl_integrations.ingest.streams.stream_directory import (
    ABSENT_SECONDS,
    MOST_UNCONFIRMED,
    MOST_UNCONFIRMED_EVER,
    MOST_UNCONFIRMED_IN_ALL,
    UNCONFIRMED_SECONDS,
    StreamDirectory,
    UnconfirmedNames,
    ask_arn,
)
from kpl_integrations.ingest.tenants import Tenant
from tests.support.gateway_scene import STREAM, Client, kinesis, open_gateway, records
from tests.support.virtual_time import Backend

pytestmark = pytest.mark.anyio

OWN = "arn:aws:kinesis:us-east-1:000000000000:stream/orders"
FOREIGN = "arn:aws:kinesis:us-east-1:111111111111:stream/orders"
ELSEWHERE = "arn:aws:kinesis:eu-west-1:000000000000:stream/orders"


@pytest.fixture
def anyio_backend(virtual_time_backend: Backend) -> Backend:
    return virtual_time_backend


class Scene:
    """A directory whose account has one stream. It counts the lookups of its ARN."""

    def __init__(self, arn: str | None = OWN) -> None:
        self.arn = arn
        self.asked: list[str] = []
        self.now = 0.0
        self.directory = StreamDirectory(
            FakeTransport(FakeKinesis({"orders": 1})), clock=lambda: self.now, arn_of=self._arn_of
        )

    async def _arn_of(self, name: str) -> str | None:
        self.asked.append(name)
        return self.arn if name == "orders" else None


def globs(*streams: str) -> Callable[[str], bool]:
    return Tenant(id="t", streams=streams).allows


# The tenant's globs, the requested stream, and its canonical name (None: 403).
ROWS = [
    (("orders",), "orders", "orders"),
    (("*",), OWN, "orders"),
    (("orders",), OWN, "orders"),
    (("arn:*",), OWN, "orders"),
    ((OWN,), OWN, "orders"),
    (("orders",), FOREIGN, None),
    (("*",), FOREIGN, None),
    (("orders",), ELSEWHERE, None),
    (("payments",), OWN, None),
    (("payments",), "orders", None),
]


@pytest.mark.parametrize(("allowed", "asked", "known_as"), ROWS)
async def test_an_arn_of_the_account_is_the_stream_s_name_and_another_account_s_is_not(allowed, asked, known_as):
    scene = Scene()
    assert await scene.directory.admit(asked, globs(*allowed), tenant="t") == known_as
    assert scene.directory.known == ({known_as} if known_as else set())


async def test_a_tenant_without_permission_causes_no_lookup():
    scene = Scene()
    assert await scene.directory.admit(OWN, globs("payments"), tenant="t") is None
    assert scene.asked == []


async def test_many_invented_arns_cause_one_lookup():
    scene = Scene()
    for number in range(50):
        invented = f"arn:aws:kinesis:us-east-1:{number:012}:stream/orders"
        assert await scene.directory.admit(invented, globs("orders"), tenant="t") == ("orders" if number == 0 else None)
    assert scene.asked == ["orders"]


async def test_an_unresolved_arn_stays_unchanged_and_is_looked_up_again_later():
    scene = Scene(arn=None)
    assert await scene.directory.admit(OWN, globs("orders"), tenant="t") is None
    assert await scene.directory.admit(OWN, globs("orders"), tenant="t") is None
    assert scene.asked == ["orders"]
    scene.arn, scene.now = OWN, ABSENT_SECONDS + 1
    assert await scene.directory.admit(OWN, globs("orders"), tenant="t") == "orders"


class Describing(FakeTransport):
    """Fails to describe a stream until it is repaired."""

    def __init__(self, code: str | None) -> None:
        super().__init__(FakeKinesis({"orders": 1}))
        self.code = code

    async def call(self, method: str, read: Callable[[Any], Any], stream: str) -> Any:
        assert (method, stream) == ("describe_stream_summary", "orders")
        if self.code is not None:
            return RequestFailure(self.code, "")
        return read({"StreamDescriptionSummary": {"StreamARN": OWN}})


# The code of a failed lookup, and whether it means that the stream has no ARN. "Internal": there was no answer.
FAILURES = {
    "AccessDeniedException": True,
    "AccessDenied": True,
    "ResourceNotFoundException": True,
    "ValidationException": True,
    "LimitExceededException": False,
    "ThrottlingException": False,
    "InternalFailure": False,
    "ExpiredTokenException": False,
    "NoCredentials": False,
    "Internal": False,
}


@pytest.mark.parametrize(("code", "says"), FAILURES.items())
async def test_a_transient_failure_creates_no_second_pipeline(code, says):
    transport = Describing(code)
    directory = StreamDirectory(transport, clock=lambda: 0.0)
    if says:
        assert await ask_arn(transport, "orders") is None
        return
    with pytest.raises(Refused) as refused:
        await directory.admit(OWN, globs("*"), tenant="t")
    assert refused.value.refusal is Refusal.STREAM_UNCERTAIN
    assert refused.value.retry_after == 2.0
    assert directory.known == set()
    transport.code = None
    assert await directory.admit(OWN, globs("*"), tenant="t") == "orders"


class Denied(FakeTransport):
    """A transport that may not list shards. It counts the questions."""

    asked = 0
    gate: anyio.Event | None = None

    async def list_shards(self, stream: str) -> Any:
        self.asked += 1
        await (anyio.sleep(0.01) if self.gate is None else self.gate.wait())
        return RequestFailure("AccessDeniedException", f"not authorized to list {stream}")


class Unreachable(FakeTransport):
    """A transport without a Kinesis."""

    async def list_shards(self, stream: str) -> Any:
        return RequestFailure("Internal", "connection refused")


async def test_failed_lookups_are_logged_once_a_minute(caplog):
    now = [0.0]
    directory = StreamDirectory(Unreachable(FakeKinesis({"orders": 1})), clock=lambda: now[0])
    for instant in (0.0, 30.0, 59.0, 61.0):
        now[0] = instant
        with pytest.raises(Refused):
            await directory.require("orders", "t")
    assert caplog.text.count("stream 'orders' could not be looked up") == 2
    assert "Internal: connection refused" in caplog.text


async def test_concurrent_requests_for_one_new_stream_cause_one_lookup():
    transport = Denied(FakeKinesis({"orders": 1}))
    directory = StreamDirectory(transport, clock=lambda: 0.0)
    async with anyio.create_task_group() as tasks:
        for _ in range(500):
            tasks.start_soon(directory.require, "orders", "t")
    assert transport.asked == 1


async def test_a_cancelled_lookup_is_asked_again_by_a_request_that_waits_for_it():
    transport = Denied(FakeKinesis({"orders": 1}))
    directory = StreamDirectory(transport, clock=lambda: 0.0)
    transport.gate = anyio.Event()
    first = anyio.CancelScope()

    async def ask_first() -> None:
        with first:
            await directory.require("orders", "t")

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(ask_first)
        await anyio.wait_all_tasks_blocked()
        tasks.start_soon(directory.require, "orders", "t")
        await anyio.wait_all_tasks_blocked()
        first.cancel()
        await anyio.wait_all_tasks_blocked()
        assert transport.asked == 2
        transport.gate.set()


async def test_slow_lookups_of_one_tenant_do_not_delay_those_of_another():
    transport = Denied(FakeKinesis({"orders": 1}))
    directory = StreamDirectory(transport, clock=lambda: 0.0)
    transport.gate = anyio.Event()
    finished: list[str] = []

    async def ask(stream: str, tenant: str) -> None:
        with suppress(Refused):
            await directory.require(stream, tenant)
        finished.append(tenant)

    async with anyio.create_task_group() as tasks:
        for number in range(90):
            tasks.start_soon(ask, f"invented-{number}", "a")
        await anyio.wait_all_tasks_blocked()
        assert transport.asked == 4
        tasks.start_soon(ask, "orders", "b")
        await anyio.wait_all_tasks_blocked()
        transport.gate.set()
    # Four lookups of tenant a run already. Then the tenants take turns.
    assert finished.index("b") <= 8


async def test_a_name_that_may_not_be_listed_is_confirmed_by_a_delivered_record():
    transport, now = Denied(FakeKinesis({"orders": 1})), 0.0
    directory = StreamDirectory(transport, clock=lambda: now)
    for number in range(MOST_UNCONFIRMED):
        await directory.require(f"stream-{number}", "t")
    with pytest.raises(Refused, match="may not list") as refused:
        await directory.require("one-more", "t")
    assert refused.value.refusal is Refusal.NO_ROOM
    await directory.require("one-more", "other")
    assert directory.known == set()
    directory.confirm("stream-0")
    directory.confirm("never-seen")
    assert directory.known == {"stream-0"}
    await directory.require("one-more", "t")
    now = UNCONFIRMED_SECONDS + 1
    for number in range(MOST_UNCONFIRMED):
        await directory.require(f"later-{number}", "t")


async def admitted_names(directory: StreamDirectory, tenant: str, names: int) -> int:
    """Return how many of this tenant's invented names are admitted."""
    admitted = 0
    for number in range(names):
        with suppress(Refused):
            await directory.require(f"{tenant}-{number}", tenant)
            admitted += 1
    return admitted


async def test_expired_unconfirmed_names_keep_their_places_until_a_record_is_delivered():
    now = 0.0
    directory = StreamDirectory(Denied(FakeKinesis({"orders": 1})), clock=lambda: now)
    seen: set[str] = set()
    for hour in range(20):
        now = hour * (UNCONFIRMED_SECONDS + 1)
        for number in range(MOST_UNCONFIRMED):
            with suppress(Refused):
                await directory.require(f"invented-{hour}-{number}", "t")
                seen.add(f"invented-{hour}-{number}")
    assert len(seen) == MOST_UNCONFIRMED_EVER
    # An expired name is admitted again, because its pipeline exists.
    await directory.require("invented-0-0", "t")
    with pytest.raises(Refused, match="tenant t has used 40 streams that the gateway may not list"):
        await directory.require("orders", "t")
    directory.confirm("invented-0-1")
    await directory.require("orders", "t")


async def test_unconfirmed_names_of_all_tenants_together_are_bounded():
    directory = StreamDirectory(Denied(FakeKinesis({"orders": 1})), clock=lambda: 0.0)
    admitted = [await admitted_names(directory, f"t{number}", MOST_UNCONFIRMED) for number in range(12)]
    assert sum(admitted) == MOST_UNCONFIRMED_IN_ALL
    with pytest.raises(Refused, match="the tenants of this gateway have used 200 streams") as refused:
        await directory.require("orders", "other")
    assert refused.value.refusal is Refusal.NO_ROOM
    # A name that another tenant used already needs no further pipeline.
    await directory.require("t0-0", "other")
    directory.confirm("t0-0")
    await directory.require("orders", "other")


def test_a_delivered_record_costs_the_same_with_thousands_of_tenants() -> None:
    directory = StreamDirectory(FakeTransport(FakeKinesis({"orders": 1})), clock=lambda: 0.0)
    for number in range(5_000):
        directory._unconfirmed.add(f"t{number}", "shared", 0.0)  # noqa: SLF001
    began_at = time.process_time()
    for _ in range(1_000):
        directory.confirm("orders")
    # A search in all tenants takes 0.3 s or more, a lookup by name 0.2 ms.
    assert time.process_time() - began_at < 0.1
    directory.confirm("shared")
    assert directory.known == {"shared"}


@given(st.lists(st.tuples(st.sampled_from("ab"), st.integers(0, 60), st.floats(0, 500)), max_size=120))
def test_unconfirmed_names_are_bounded_per_tenant_and_expire(steps) -> None:
    names = UnconfirmedNames()
    now = 0.0
    added: dict[tuple[str, str], float] = {}
    for tenant, number, pause in steps:
        now += pause
        name = f"n{number}"
        if names.has(tenant, name, now):
            assert now < added[tenant, name] + UNCONFIRMED_SECONDS
            continue
        of_tenant = {each: at for each, at in added.items() if each[0] == tenant}
        alive = [at for at in of_tenant.values() if now < at + UNCONFIRMED_SECONDS]
        is_new_within_bound = (tenant, name) in added or len(of_tenant) < MOST_UNCONFIRMED_EVER
        is_admitted = len(alive) < MOST_UNCONFIRMED and is_new_within_bound
        assert (names.add(tenant, name, now) is None) == is_admitted
        if is_admitted:
            added[tenant, name] = now
    assert names.names.keys() == {name for _, name in added}
    for name in list(names.names):
        names.discard(name)
    assert not any(names.has(tenant, name, now) for tenant, name in added)


async def test_a_stream_that_does_not_exist_is_looked_up_again_after_half_a_minute():
    service = FakeKinesis({"orders": 1})
    now = 0.0
    directory = StreamDirectory(FakeTransport(service), clock=lambda: now)
    for now in (0.0, ABSENT_SECONDS - 0.1):
        with pytest.raises(Refused) as refused:
            await directory.admit("later", globs("*"), tenant="t")
        assert refused.value.refusal is Refusal.UNKNOWN_STREAM
        if not now:
            service.create_stream("later", shard_count=1, now=0.0)
    now = ABSENT_SECONDS + 0.1
    assert await directory.admit("later", globs("*"), tenant="t") == "later"


async def test_a_stream_that_was_deleted_is_not_acknowledged_any_more(caplog: pytest.LogCaptureFixture):
    """Every record got 202, and was lost."""
    transport = kinesis()
    async with open_gateway(transport) as gateway:
        client = Client(gateway)
        assert (await client.post(records(3), ack="delivered")).status == 200
        transport.kinesis.delete_stream(STREAM, now=anyio.current_time())
        assert (await client.post(records(3))).status == 202
        await gateway.producer.flush()
        for _ in range(3):
            answer = await client.post(records(3))
            assert (answer.status, answer.json()["code"]) == (404, "unknown-stream")
        assert [record.message for record in caplog.records if "does not exist any more" in record.message] == [
            f"Kinesis says that stream {STREAM!r} does not exist any more; the next request looks it up"
        ]
        transport.kinesis.create_stream(STREAM, shard_count=1, now=anyio.current_time())
        await anyio.sleep(ABSENT_SECONDS)
        assert (await client.post(records(3), ack="delivered")).status == 200
        report = gateway.producer.report()
        assert (report.delivered, report.failed_total) == (6, 3)


async def test_a_stream_that_takes_a_record_is_looked_up_again_at_once():
    transport = kinesis()
    async with open_gateway(transport) as gateway:
        client = Client(gateway)
        transport.kinesis.delete_stream(STREAM, now=anyio.current_time())
        assert (await client.post(records(1))).status == 404
        transport.kinesis.create_stream(STREAM, shard_count=1, now=anyio.current_time())
        assert (await client.post(records(1))).status == 404
        # As a replay does.
        delivery = await gateway.producer.put(STREAM, partition_key="k", data=b"x")
        assert (await delivery).successful
        assert (await client.post(records(1), ack="delivered")).status == 200


async def test_a_stream_that_was_deleted_is_not_acknowledged_in_an_outage_either():
    """Its pipeline was taken for records in the spool."""
    transport = kinesis()
    async with open_gateway(transport) as gateway:
        client = Client(gateway)
        assert (await client.post(records(1), ack="delivered")).status == 200
        transport.kinesis.delete_stream(STREAM, now=anyio.current_time())
        assert (await client.post(records(1), ack="delivered")).status == 502
        assert (await client.post(records(1))).status == 404
        transport.kinesis.faults.add(ErrorAnswer("InternalFailure"), When())
        await anyio.sleep(ABSENT_SECONDS)
        assert (await client.post(records(1))).status == 503


async def test_a_stream_that_is_listed_and_takes_no_puts_is_refused_for_a_while(caplog: pytest.LogCaptureFixture):
    """Each request was acknowledged, lost and logged."""
    transport = kinesis()
    async with open_gateway(transport) as gateway:
        client = Client(gateway)
        fault = transport.kinesis.faults.add(ErrorAnswer("ResourceNotFoundException"), When(operation="PutRecords"))
        assert [(await client.post(records(1), ack="delivered")).status for _ in range(4)] == [502, 502, 404, 404]
        assert [record.message for record in caplog.records if "does not exist" in record.message] == [
            f"Kinesis says that stream {STREAM!r} does not exist any more; the next request looks it up"
        ]
        transport.kinesis.faults.remove(fault)
        await anyio.sleep(ABSENT_SECONDS)
        assert (await client.post(records(1), ack="delivered")).status == 200


async def test_a_stream_that_may_not_be_looked_up_and_is_not_there_is_refused_for_a_while():
    scene = Scene()
    scene.directory._unconfirmed.add("t", "secret", 0.0)  # noqa: SLF001 - as after a look-up that is forbidden
    await scene.directory.require("secret", "t")
    scene.directory.doubt("secret")
    with pytest.raises(Refused, match="no stream secret"):
        await scene.directory.require("secret", "t")
    scene.now = ABSENT_SECONDS
    await scene.directory.require("secret", "t")
