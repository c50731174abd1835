"""What `/readyz`, the metrics and the log say about a part that fails, and that all end with the cause."""

import logging
from pathlib import Path
from typing import Any

import anyio
import pytest

from kpl_core.coordination import StoreFailed
from kpl_core.coordination.store import MemoryStore
from kpl_core.testing import ErrorAnswer, FakeKinesis, RecordError, When
from kpl_core.testing.fake_transport import FakeTransport
from kpl_integrations.ingest import IngestGateway
from kpl_integrations.ingest.http.certificate import ServerCertificate
from kpl_integrations.ingest.readiness.parts import Part, PartState
from kpl_integrations.ingest.readiness.readyz import USED_SECONDS
from kpl_integrations.ingest.tenants import Tenant
from tests.support.certificates import certificate_pair, days_from_now, needs_openssl
from tests.support.gateway_scene import Client, KnownTenants, gateway_of, kinesis, open_gateway, records
from tests.support.virtual_time import Backend
from tests.support.waiting import until

pytestmark = pytest.mark.anyio
LOGGER = "kpl_integrations.ingest.readiness"


@pytest.fixture
def anyio_backend(virtual_time_backend: Backend) -> Backend:
    return virtual_time_backend


def denied(transport: FakeTransport, code: str = "AccessDeniedException", stream: str | None = None) -> Any:
    return transport.kinesis.faults.add(ErrorAnswer(code), When(operation="PutRecords", stream=stream))


async def shown(gateway: IngestGateway) -> tuple[int, dict[str, Any]]:
    answer = await Client(gateway).get("/readyz?verbose")
    return answer.status, answer.json()["parts"]


async def series(gateway: IngestGateway) -> dict[tuple[str, str], float]:
    """Return the metric of each part and state, as a scrape has it."""
    found = {}
    for line in (await Client(gateway).get("/metrics")).body.decode().splitlines():
        name, _, rest = line.partition("{")
        if name == "kinesis_ingest_part":
            labels, _, value = rest.partition("} ")
            part, state = (each.partition("=")[2].strip('"') for each in labels.split(","))
            found[part, state] = float(value)
    return found


def said(caplog: pytest.LogCaptureFixture, part: str) -> list[str]:
    """Return the states that the log has for a part, in their order."""
    lines: list[Any] = [each for each in caplog.records if each.name == LOGGER]
    return [each.fields["state"] for each in lines if each.fields["part"] == part]


async def test_a_healthy_gateway_names_all_its_parts_and_has_each_series_from_the_start() -> None:
    async with open_gateway() as gateway:
        plain = await Client(gateway).get("/readyz")
        assert plain.json() == {
            "status": "ready",
            "checks": {
                "intake": {"ready": True, "detail": "accepting records"},
                "kinesis": {"ready": True, "detail": "accepts records"},
            },
        }
        status, parts = await shown(gateway)
        assert (status, list(parts)) == (200, [part.value for part in Part])
        for query in ("verbose=1", "a=b&verbose"):
            assert (await Client(gateway).get(f"/readyz?{query}")).json()["parts"].keys() == parts.keys()
        assert parts["kinesis"].keys() == {"state", "accepts_records", "since", "seconds", "detail", "action"}
        assert parts["spool"]["state"] == "not_configured"
        assert (await Client(gateway).get("/readyz?verbosely")).json() == plain.json()
        found = await series(gateway)
        assert found.keys() == {(part.value, state.value) for part in Part for state in PartState}
        assert sum(found.values()) == len(Part)
        assert found["kinesis", "ok"] == found["spool", "not_configured"] == 1.0


async def test_requests_that_kinesis_denies_are_a_failed_part_while_the_gateway_is_ready(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, LOGGER)
    transport = kinesis()
    async with open_gateway(transport, record_max_buffered_time_ms=0) as gateway:
        client = Client(gateway)
        assert (await client.post(records(1), ack="delivered")).status == 200
        fault = denied(transport)
        assert (await client.post(records(1), ack="delivered")).status == 502
        assert (await shown(gateway))[1]["kinesis"]["state"] == "ok"
        await anyio.sleep(4.0)
        status, parts = await shown(gateway)
        assert (status, parts["kinesis"]["state"], parts["kinesis"]["seconds"]) == (
            200,
            "failed",
            pytest.approx(4, abs=1),
        )
        assert parts["kinesis"]["detail"] == "requests to stream orders (AccessDeniedException) fail"
        assert "kpl doctor" in parts["kinesis"]["action"]
        found = await series(gateway)
        assert (found["kinesis", "failed"], found["kinesis", "ok"]) == (1.0, 0.0)
        for _ in range(3):
            gateway.opened.parts.look()
        transport.kinesis.faults.remove(fault)
        assert (await client.post(records(1), ack="delivered")).status == 200
        assert (await shown(gateway))[1]["kinesis"]["state"] == "ok"
    assert said(caplog, "kinesis") == ["failed", "ok"]
    assert "part changed: kinesis is failed: requests to stream orders (AccessDeniedException) fail; " in caplog.text


async def test_a_name_that_cannot_be_looked_up_takes_no_gateway_away_from_the_streams_that_it_has_records_of() -> None:
    """After a restart in an outage a tenant that sends to any other name made it not ready."""
    transport = FakeTransport(FakeKinesis({"orders": 1}))
    async with open_gateway(transport, record_max_buffered_time_ms=0) as gateway:
        client = Client(gateway)
        assert (await client.post(records(1), ack="delivered", stream="orders")).status == 200
        # As after a restart with records of the stream in the spool.
        gateway.opened.streams.known.clear()
        await anyio.sleep(USED_SECONDS + 1.0)
        transport.kinesis.faults.add(ErrorAnswer("InternalFailure"), When())
        assert (await client.post(records(1), stream="invented")).status == 503
        await anyio.sleep(4.0)
        status, parts = await shown(gateway)
        assert (status, parts["kinesis"]["state"]) == (200, "failed")
        assert (await client.post(records(1), stream="orders")).status == 202


@pytest.mark.parametrize(
    ("known", "code", "shown_status", "state", "detail"),
    [
        ([], "InternalFailure", 503, "failed", "stream late ({}) cannot be looked up, and the gateway knows no other"),
        # The answer to many names that a client has invented.
        ([], "LimitExceededException", 200, "failed", "requests to stream late ({}) fail"),
        (["orders"], "InternalFailure", 200, "degraded", "requests to stream late ({}) fail"),
    ],
)
async def test_a_stream_that_cannot_be_looked_up_is_a_failed_part_until_kinesis_answers(
    known: list[str], code: str, shown_status: int, state: str, detail: str
) -> None:
    transport = FakeTransport(FakeKinesis({"orders": 1, "late": 1}))
    async with open_gateway(transport, record_max_buffered_time_ms=0) as gateway:
        client = Client(gateway)
        for stream in known:
            assert (await client.post(records(1), ack="delivered", stream=stream)).status == 200
        fault = transport.kinesis.faults.add(ErrorAnswer(code), When(operation="ListShards"))
        assert (await client.post(records(1), stream="late")).status == 503
        assert (await shown(gateway))[1]["kinesis"]["state"] == "ok"
        await anyio.sleep(4.0)
        status, parts = await shown(gateway)
        assert (status, parts["kinesis"]["state"]) == (shown_status, state)
        assert parts["kinesis"]["detail"] == detail.format(code)
        transport.kinesis.faults.remove(fault)
        assert (await client.post(records(1), stream="late")).status == 202
        assert (await shown(gateway))[1]["kinesis"]["state"] == "ok"


@pytest.mark.parametrize("streams", [1, 2])
async def test_a_stream_without_connection_ends_readiness_only_if_no_other_stream_accepts(streams: int) -> None:
    names = [f"s{number}" for number in range(streams)]
    transport = FakeTransport(FakeKinesis(dict.fromkeys(names, 1)), latency_seconds=0.01)
    async with open_gateway(transport, aggregation_enabled=False, record_ttl_ms=3_000) as gateway:
        client = Client(gateway)
        for name in names:
            assert (await client.post(records(1), ack="delivered", stream=name)).status == 200
        fault = denied(transport, "ServiceUnavailable", "s0")
        assert (await client.post(records(100), stream="s0")).status == 202
        await until(lambda: gateway.producer.breakers()["s0", ""].known_state == "open")
        status, parts = await shown(gateway)
        assert (status, parts["kinesis"]["state"]) == (503 if streams == 1 else 200, "failed")
        assert parts["kinesis"]["accepts_records"] is (streams > 1)
        refused = await client.post(records(1), stream="s0")
        assert (refused.status, refused.json()["code"]) == (503, "temporary-reduced-capacity")
        transport.kinesis.faults.remove(fault)
        for _ in range(20):
            await anyio.sleep(1.0)
            await client.post(records(100), stream="s0")
        status, parts = await shown(gateway)
        assert (status, parts["kinesis"]["state"]) == (200, "ok")


async def test_after_an_outage_the_first_answer_ends_the_failure_and_the_closed_breaker_the_rest() -> None:
    transport = FakeTransport(FakeKinesis({"orders": 1}), latency_seconds=0.01)
    async with open_gateway(transport, aggregation_enabled=False, record_ttl_ms=3_000) as gateway:
        client = Client(gateway)
        fault = denied(transport, "ServiceUnavailable")
        assert (await client.post(records(100))).status == 202
        breaker = gateway.producer.breakers
        await until(lambda: ("orders", "") in breaker() and breaker()["orders", ""].known_state == "open")
        # Until all records have expired: they would be probes enough to close the breaker.
        await anyio.sleep(10.0)
        transport.kinesis.faults.remove(fault)
        assert (await shown(gateway))[1]["kinesis"]["state"] == "failed"
        assert (await client.post(records(1), ack="delivered")).status == 200
        assert breaker()["orders", ""].known_state == "half_open"
        assert (await shown(gateway))[1]["kinesis"]["state"] == "degraded"
        assert (await client.post(records(9), ack="delivered")).status == 200
        assert (await shown(gateway))[1]["kinesis"]["state"] == "ok"


async def test_a_half_open_breaker_without_a_delivery_is_no_recovery(caplog: pytest.LogCaptureFixture) -> None:
    """Without a shard map all failures count for the whole stream, and its requests are answered all the same."""
    caplog.set_level(logging.INFO, LOGGER)
    transport = kinesis()
    async with open_gateway(transport, aggregation_enabled=False, record_max_buffered_time_ms=0) as gateway:
        transport.kinesis.faults.add(ErrorAnswer("AccessDeniedException"), When(operation="ListShards"))
        transport.kinesis.faults.add(RecordError("InternalFailure"), When(operation="PutRecords"))
        assert (await Client(gateway).post(records(100))).status == 202
        states = set()
        for _ in range(600):
            await anyio.sleep(0.1)
            gateway.opened.parts.look()
            states |= {str(each.known_state) for each in gateway.producer.breakers().values()}
        assert "half_open" in states
        assert gateway.producer.report().delivered == 0
    assert "Kinesis answers again" not in caplog.text
    assert said(caplog, "kinesis")[:1] == ["failed"]


async def test_a_stream_without_puts_does_not_keep_a_gateway_ready_that_no_stream_accepts() -> None:
    names = [f"s{number}" for number in range(4)]
    transport = FakeTransport(FakeKinesis(dict.fromkeys(names, 1)), latency_seconds=0.01)
    async with open_gateway(transport, aggregation_enabled=False, record_ttl_ms=3_000) as gateway:
        client = Client(gateway)
        for name in names:
            assert (await client.post(records(1), ack="delivered", stream=name)).status == 200
        await anyio.sleep(USED_SECONDS + 1.0)
        denied(transport, "ServiceUnavailable")
        for name in names[1:]:
            assert (await client.post(records(100), stream=name)).status == 202
        await until(lambda: all(gateway.producer.breakers()[name, ""].known_state == "open" for name in names[1:]))
        status, parts = await shown(gateway)
        assert (status, parts["kinesis"]["state"]) == (503, "failed")
        assert parts["kinesis"]["detail"] == (
            "the circuit breaker of stream s1 (ServiceUnavailable), s2 (ServiceUnavailable), s3 (ServiceUnavailable) "
            "is open, and no spool stores its records"
        )


@pytest.mark.parametrize(("code", "answer"), [("AccessDeniedException", 502), ("ServiceUnavailable", 504)])
async def test_without_traffic_a_failure_ends_after_five_minutes(code: str, answer: int) -> None:
    transport = kinesis()
    async with open_gateway(transport, aggregation_enabled=False, record_ttl_ms=3_000) as gateway:
        fault = denied(transport, code)
        assert (await Client(gateway).post(records(100), ack="delivered")).status == answer
        transport.kinesis.faults.remove(fault)
        await anyio.sleep(290.0)
        assert (await shown(gateway))[1]["kinesis"]["state"] != "ok"
        await anyio.sleep(20.0)
        status, parts = await shown(gateway)
        assert (status, parts["kinesis"]["state"]) == (200, "ok")
        assert (await Client(gateway).post(records(1), ack="delivered")).status == 200


async def test_a_failure_counts_on_while_records_of_its_stream_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    transport = kinesis()
    # By chance, a record is tried ten times in five seconds. With the default minimum that opens the breaker.
    async with open_gateway(transport, record_ttl_ms=3_600_000, breaker_minimum_records=1_000) as gateway:
        fault = denied(transport, "ServiceUnavailable")
        assert (await Client(gateway).post(records(1))).status == 202
        await anyio.sleep(5.0)
        now = anyio.current_time()
        with monkeypatch.context() as later:
            later.setattr(gateway.opened.parts, "_clock", lambda: now + 400.0)
            assert (await shown(gateway))[1]["kinesis"]["state"] == "degraded"
        transport.kinesis.faults.remove(fault)
        await until(lambda: gateway.producer.report().delivered == 1)
        assert (await shown(gateway))[1]["kinesis"]["state"] == "ok"


async def test_a_gateway_without_traffic_waits_for_no_plan_of_its_store() -> None:
    async with open_gateway(
        directory=KnownTenants(Tenant(id="a", records_per_second=10)), coordination="memory://parts-calm"
    ) as gateway:
        assert (await Client(gateway, "a").post(records(1), ack="delivered")).status == 200
        await anyio.sleep(120.0)
        assert (await shown(gateway))[1]["coordination"]["state"] == "ok"


@pytest.mark.parametrize("purpose", ["shards", "quotas"])
async def test_a_store_that_fails_is_a_degraded_part(purpose: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async def fail(self: MemoryStore, name: str) -> Any:
        message = "gone"
        raise StoreFailed(message, reason="down")

    name = f"parts-{purpose}"
    tenant = Tenant(id="a", records_per_second=10)
    async with open_gateway(
        directory=KnownTenants(tenant), coordination=f"memory://{name}", coordination_max_workers=2
    ) as gateway:
        assert (await Client(gateway, "a").post(records(1), ack="delivered")).status == 200
        assert (await shown(gateway))[1]["coordination"]["state"] == "ok"
        store = MemoryStore.named(f"{name}-{purpose}")
        monkeypatch.setattr(store, "read", fail.__get__(store), raising=True)
        await anyio.sleep(10.0)
        status, found = await shown(gateway)
        assert (status, found["coordination"]["state"]) == (200, "degraded")
        said = f"coordination fails at memory://{name}-shards (down); this process may use "
        assert found["coordination"]["detail"].startswith(said)
        monkeypatch.undo()
        await anyio.sleep(3.0)
        assert (await shown(gateway))[1]["coordination"]["state"] == "ok"


@needs_openssl
@pytest.mark.parametrize(
    ("days", "state"),
    [((-9.0, -1.0), "failed"), ((1.0, 9.0), "failed"), ((-9.0, 1.0), "degraded"), ((-9.0, 99.0), "ok")],
)
async def test_a_certificate_that_clients_do_not_accept_is_said_at_the_start(
    days: tuple[float, float], state: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    gateway = gateway_of(kinesis())
    gateway.certificate = ServerCertificate(*certificate_pair(tmp_path, "c", *map(days_from_now, days)))
    async with gateway:
        status, parts = await shown(gateway)
        assert (status, parts["certificate"]["state"]) == (200, state)
        text = (await Client(gateway).get("/metrics")).body.decode()
        left = float(text.partition("\nkinesis_ingest_certificate_days_left ")[2].partition("\n")[0])
        assert left == pytest.approx(days[1], abs=0.01)
    assert said(caplog, "certificate") == ([] if state == "ok" else [state])
