"""Every row of the table of refusals is an answer that a client can get."""

import dataclasses
import gzip
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import anyio
import http_sf
import pytest

from kpl_core import SpoolOptions
from kpl_core.pipeline.intake.fair_intake import FairIntake
from kpl_core.testing import Effect, ErrorAnswer, FakeKinesis, FakeTransport, ResetBeforeCommit, When
from kpl_integrations.ingest import REFUSALS, IngestGateway, Refusal, load_settings
from kpl_integrations.ingest.admission.refusals import SERVER_REFUSALS
from kpl_integrations.ingest.http.answers import REGISTERED_TYPES
from kpl_integrations.ingest.http.request_head import SERVER, Server
from kpl_integrations.ingest.tenants import Tenant
from tests.support.gateway_scene import (
    JSON,
    NDJSON,
    STREAM,
    Answer,
    Client,
    KnownTenants,
    kinesis,
    open_gateway,
    records,
)

pytestmark = pytest.mark.anyio

PATH = f"/v1/streams/{STREAM}/records"
ONE = {"partition_key": "k", "data": "x"}
SLOW_TENANT = Tenant(id="slow", records_per_second=10, bytes_per_second=1_000)
TENANTS = (Tenant(id="acme", streams=(STREAM, "nix-*")), SLOW_TENANT)


async def over_the_rate(gateway: IngestGateway) -> Answer:
    client = Client(gateway, "slow")
    assert (await client.post(records(8))).status == 202
    return await client.post(records(5))


async def no_room(gateway: IngestGateway) -> Answer:
    client = Client(gateway, "acme")
    assert (await client.post(records(50))).status == 202
    return await client.post(records(60))


async def never_room(gateway: IngestGateway) -> Answer:
    return await Client(gateway, "acme").post(records(101))


async def queue_share(gateway: IngestGateway) -> Answer:
    client = Client(gateway, "acme")
    while (answer := await client.post(records(20, size=4_000))).status == 202:
        pass
    return answer


async def breaker_open(gateway: IngestGateway) -> Answer:
    transport: Any = gateway._transport  # noqa: SLF001 - the test's own
    transport.kinesis.faults.add(ErrorAnswer("InternalFailure"), When(operation="PutRecords"))
    client = Client(gateway, "acme")
    while (answer := await client.post(records(20))).status == 202:  # noqa: ASYNC110 - what it polls is under test
        await anyio.sleep(0.1)
    return answer


async def draining(gateway: IngestGateway) -> Answer:
    await gateway.close()
    return await Client(gateway, "acme").post(ONE)


async def wrong_keys(gateway: IngestGateway) -> Answer:
    client = Client(gateway, "nobody")
    while (answer := await client.get("/v1/stats")).status == 401:
        pass
    return answer


async def uncertain(gateway: IngestGateway) -> Answer:
    transport: Any = gateway._transport  # noqa: SLF001
    transport.kinesis.faults.add(ErrorAnswer("InternalFailure"), When(operation="ListShards"))
    return await Client(gateway, "acme").post(ONE)


async def slow_body(gateway: IngestGateway) -> Answer:
    sent: list[Any] = []

    async def receive() -> Any:
        await anyio.sleep(1.0)
        return {"type": "http.request", "body": b"x", "more_body": True}

    async def send(message: Any) -> None:
        sent.append({**message, "at": anyio.current_time()})

    headers = [(b"authorization", b"Bearer acme"), (b"content-type", JSON.encode())]
    scope = {"type": "http", "method": "POST", "path": PATH, "query_string": b"", "headers": headers}
    before = anyio.current_time()
    await gateway(scope, receive, send)
    # Then the rest of the body is dropped for 2 s, before the connection is closed.
    assert [each["at"] - before for each in sent] == pytest.approx([30.0, 30.0, 32.0], abs=0.1)
    return Answer(sent[0]["status"], {k.decode(): v.decode() for k, v in sent[0]["headers"]}, sent[1]["body"])


async def cpu_share(gateway: IngestGateway) -> Answer:
    """The server says whether a request may wait for its tenant's turn."""
    server = Server(
        lambda tenant: tenant is None or tenant.id != "acme", lambda: None, lambda _: lambda: None, lambda: None
    )

    async def claimed(scope: Any, receive: Any, send: Any) -> None:
        await gateway({**scope, "extensions": {SERVER: {"request": server}}}, receive, send)

    application: Any = claimed
    assert (await Client(application, "slow").post(ONE)).status == 202
    return await Client(application, "acme").post(ONE)


async def in_use(gateway: IngestGateway) -> Answer:
    client = Client(gateway, "acme")
    answers: list[Answer] = []

    async def first() -> None:
        answers.append(await client.post(ONE, ack="delivered", idempotency_key='"same"'))

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(first)
        await anyio.sleep(0.001)
        second = await client.post(ONE, ack="delivered", idempotency_key='"same"')
    assert answers[0].status == 200
    return second


async def reused(gateway: IngestGateway) -> Answer:
    client = Client(gateway, "acme")
    assert (await client.post(ONE, idempotency_key="one")).status == 202
    return await client.post({**ONE, "data": "y"}, idempotency_key="one")


async def expired(gateway: IngestGateway) -> Answer:
    transport: Any = gateway._transport  # noqa: SLF001
    transport.kinesis.faults.add(ErrorAnswer("InternalFailure"), When(operation="PutRecords"))
    return await Client(gateway, "acme").post(ONE, ack="delivered")


async def not_delivered(gateway: IngestGateway) -> Answer:
    transport: Any = gateway._transport  # noqa: SLF001
    transport.kinesis.faults.add(ErrorAnswer("AccessDeniedException"), When(operation="PutRecords"))
    return await Client(gateway, "acme").post(ONE, ack="delivered")


async def not_spooled(gateway: IngestGateway) -> Answer:
    client = Client(gateway, "acme")
    big = [{"partition_key": "k", "data": "x" * 500_000}] * 4
    return await client.post(big, ack="spooled")


def post(tenant: str | None, body: Any, **options: Any) -> Callable[[IngestGateway], Awaitable[Answer]]:
    return lambda gateway: Client(gateway, tenant).post(body, **options)


def call(*arguments: Any, **options: Any) -> Callable[[IngestGateway], Awaitable[Answer]]:
    return lambda gateway: Client(gateway, "acme").call(*arguments, **options)


def typed(content_type: str, **more: str) -> dict[str, str]:
    return {"content-type": content_type, **{name.replace("_", "-"): value for name, value in more.items()}}


# For each row: the settings, and the requests that lead to it.
ROWS: list[tuple[Refusal, dict[str, Any], Callable[[IngestGateway], Awaitable[Answer]]]] = [
    (Refusal.QUOTA, {}, over_the_rate),
    (Refusal.QUEUE_SHARE, {"max_outstanding_bytes": 4_000_000}, queue_share),
    (Refusal.CPU_SHARE, {}, cpu_share),
    (Refusal.NO_ROOM, {"max_outstanding_records": 110}, no_room),
    (Refusal.BREAKER_OPEN, {}, breaker_open),
    (Refusal.DRAINING, {}, draining),
    (Refusal.NOT_SPOOLED, {"spool": "spool.db"}, not_spooled),
    (Refusal.STREAM_UNCERTAIN, {}, uncertain),
    (Refusal.NO_CREDENTIALS, {}, post(None, ONE)),
    (Refusal.BAD_CREDENTIALS, {}, post("nobody", ONE)),
    (Refusal.FORBIDDEN, {}, post("acme", ONE, stream="others")),
    (Refusal.UNKNOWN_STREAM, {}, post("acme", ONE, stream="nix-1")),
    (Refusal.UNKNOWN_STREAM, {}, post("acme", ONE, stream="no stream")),
    (Refusal.UNKNOWN_PATH, {}, call("GET", "/v2")),
    (Refusal.METHOD, {}, call("GET", PATH)),
    (Refusal.METHOD, {}, call("POST", "/livez")),
    (Refusal.HOST, {"allowed_hosts": "gateway.internal"}, call("POST", PATH, b"{}", headers=typed(JSON))),
    (Refusal.WRONG_KEYS, {"admin_key": "an-administrators-key"}, wrong_keys),
    (Refusal.TOO_LARGE, {"max_outstanding_records": 110}, never_room),
    (Refusal.TOO_LARGE, {"max_body_bytes": 1_024}, call("POST", PATH, b"x" * 1_025, headers=typed(JSON))),
    (
        Refusal.TOO_LARGE,
        {"max_body_bytes": 1_024},
        call("POST", PATH, headers=typed(JSON, content_length="3"), pieces=[b"x" * 1_000, b"x" * 1_000]),
    ),
    (Refusal.TOO_LARGE, {"max_records": 5}, post("acme", records(6))),
    (
        Refusal.TOO_LARGE,
        {"max_inflated_bytes": 1_024},
        call("POST", PATH, gzip.compress(bytes(2_000)), headers=typed(JSON, content_encoding="gzip")),
    ),
    (Refusal.SLOW_BODY, {}, slow_body),
    (Refusal.UNSUPPORTED, {}, call("POST", PATH, b"<x/>", headers=typed("text/xml"))),
    (Refusal.UNSUPPORTED, {}, call("POST", PATH, b"x", headers=typed(JSON, content_encoding="br"))),
    (Refusal.MALFORMED, {}, call("POST", PATH, b"{", headers=typed(JSON))),
    (Refusal.MALFORMED, {}, call("POST", PATH, b"\n", headers=typed(NDJSON))),
    (Refusal.BAD_RECORDS, {}, post("acme", [ONE, {"partition_key": "k"}])),
    (Refusal.BAD_PARAMETER, {}, post("acme", ONE, ack="maybe")),
    (Refusal.BAD_PARAMETER, {}, post("acme", ONE, ack="spooled")),
    (Refusal.BAD_PARAMETER, {}, post("acme", ONE, idempotency_key="x" * 256)),
    (Refusal.BAD_PARAMETER, {}, call("POST", f"{PATH}?what=1", b"{}", headers=typed(JSON))),
    (Refusal.BAD_PARAMETER, {}, call("POST", f"{PATH}?partial=perhaps", b"{}", headers=typed(JSON))),
    (Refusal.BAD_PARAMETER, {}, call("POST", PATH, b"{}", headers=typed(JSON, content_length="many"))),
    (Refusal.KEY_IN_USE, {}, in_use),
    (Refusal.KEY_REUSED, {}, reused),
    (Refusal.EXPIRED, {"record_ttl_ms": 500}, expired),
    (Refusal.NOT_DELIVERED, {}, not_delivered),
]


def parsed(answer: Answer, field: str) -> Any:
    """The value of a header field, parsed by an independent parser of RFC 9651."""
    return http_sf.parse(answer.headers[field].encode(), tltype="list")


def test_every_row_of_the_table_has_a_request():
    # `tests/ingest/http/test_server_refusals.py` has those of the server.
    assert {row[0] for row in ROWS} | SERVER_REFUSALS.keys() == set(REFUSALS) == set(Refusal)


@pytest.mark.parametrize(
    ("refusal", "settings", "lead"), ROWS, ids=[f"{index}-{row[0].value}" for index, row in enumerate(ROWS)]
)
async def test_a_rejected_request_is_answered_by_its_row(refusal, settings, lead, tmp_path: Path):
    config = None
    if "spool" in settings:
        settings = {**settings, "spool": tmp_path / settings["spool"]}
        small = SpoolOptions(path=settings["spool"], mode="write_ahead", max_bytes=1 << 20)
        config = dataclasses.replace(load_settings(**settings).producer_config(), spool=small)
    tenants = KnownTenants(*TENANTS)
    async with open_gateway(kinesis(), tenants, config=config, close_seconds=0.5, **settings) as gateway:
        answer = await lead(gateway)
        row = REFUSALS[refusal]
        assert answer.status == row.status, answer.body
        assert answer.headers["content-type"] == "application/problem+json"
        problem = answer.json()
        assert problem["status"] == row.status
        assert problem["title"]
        assert problem["detail"]
        registered = row.code in REGISTERED_TYPES
        assert problem["type"].endswith(f"#{row.code}") if registered else problem["type"] == "about:blank"
        assert ("retry-after" in answer.headers) == (row.retry_after_seconds is not None)
        assert (answer.headers.get("connection") == "close") == row.closes
        assert ("ratelimit-policy" in answer.headers) == row.shows_quota
        assert ("www-authenticate" in answer.headers) == (row.status == 401)
        assert ("allow" in answer.headers) == (row.status == 405)
        assert gateway.tally.refusals[refusal] >= 1


async def test_no_record_of_a_rejected_request_is_put():
    async with open_gateway(directory=KnownTenants(*TENANTS), max_outstanding_records=100) as gateway:
        for body in ([ONE, {"partition_key": ""}], records(101), [ONE, {"data": None}]):
            answer = await Client(gateway, "acme").post(body)
            assert answer.status in {400, 413}
        assert gateway.producer.report().accepted == 0


async def test_the_fields_of_a_quota_parse_as_structured_fields_and_agree_with_retry_after():
    async with open_gateway(directory=KnownTenants(*TENANTS)) as gateway:
        answer = await over_the_rate(gateway)
        policy = parsed(answer, "ratelimit-policy")
        limit = parsed(answer, "ratelimit")
        assert [(name, parameters["q"], parameters["w"]) for name, parameters in policy] == [
            ("records", 10, 1),
            ("bytes", 1_000, 1),
        ]
        assert policy[1][1]["qu"] == "content-bytes"
        assert [name for name, _ in limit] == ["records", "bytes"]
        assert all(parameters["r"] >= 0 for _, parameters in limit)
        assert int(answer.headers["retry-after"]) >= max(parameters.get("t", 0) for _, parameters in limit)
        assert answer.json()["violated-policies"] == ["records"]
        good = await Client(gateway, "slow").post(ONE)
        assert parsed(good, "ratelimit")[0][1]["r"] <= 10


async def test_a_full_queue_share_is_named_with_the_time_until_it_has_room():
    settings = next(settings for refusal, settings, _ in ROWS if refusal is Refusal.QUEUE_SHARE)
    async with open_gateway(kinesis(), KnownTenants(*TENANTS), close_seconds=0.5, **settings) as gateway:
        answer = await queue_share(gateway)
        ((name, parameters),) = parsed(answer, "ratelimit")
        assert (name, parameters) == ("queue-share", {"r": 0, "t": int(answer.headers["retry-after"])})
        assert answer.json()["violated-policies"] == ["queue-share"]


async def test_bad_records_are_named_by_index_and_field():
    async with open_gateway() as gateway:
        answer = await Client(gateway).post([ONE, {"partition_key": "", "data": "x"}, ONE, {"partition_key": "k"}])
        assert answer.json()["errors"] == [
            {"index": 1, "field": "partition_key", "detail": answer.json()["errors"][0]["detail"]},
            {"index": 3, "field": "data", "detail": answer.json()["errors"][1]["detail"]},
        ]
        assert answer.json()["error_count"] == 2


@pytest.mark.parametrize(
    ("fault", "cause"),
    [
        (ResetBeforeCommit(), "no connection, or no valid answer in time"),
        (ErrorAnswer("ServiceUnavailable", "role arn:aws:iam::1:role/secret"), "ServiceUnavailable"),
    ],
)
async def test_the_refusal_of_an_open_breaker_names_the_cause(fault: Effect, cause: str) -> None:
    """It said "because Kinesis rejects its records" where no connection was possible."""
    transport = FakeTransport(FakeKinesis({STREAM: 1}))
    async with open_gateway(transport, KnownTenants(*TENANTS), aggregation_enabled=False) as gateway:
        transport.kinesis.faults.add(fault, When(operation="PutRecords"))
        client = Client(gateway, "acme")
        while (answer := await client.post(records(20))).status == 202:  # noqa: ASYNC110 - what it polls is under test
            await anyio.sleep(0.1)
    assert answer.json()["detail"] == (
        f"the circuit breaker of stream {STREAM} is open, because requests to Kinesis fail ({cause})"
    )


async def test_what_is_refused_during_an_outage_counts_as_offered() -> None:
    """After an outage a noisy tenant had no rate, and a quiet one was refused in its place."""
    transport = FakeTransport(FakeKinesis({STREAM: 1}))
    async with open_gateway(transport, KnownTenants(*TENANTS), aggregation_enabled=False) as gateway:
        assert (await breaker_open(gateway)).json()["title"] == "The stream does not answer"
        account = gateway.opened.accounts.find("acme")
        assert account is not None
        assert account.shed_records == 20


async def test_in_a_buffer_that_others_have_filled_a_tenant_with_few_records_hears_that_there_is_no_room(
    monkeypatch,
) -> None:
    """It heard that its share was used up: it had more records waiting than there was room left."""
    # No record may leave the queue.
    monkeypatch.setattr(FairIntake, "all_let_pass", lambda _: False)
    monkeypatch.setattr(FairIntake, "keeps_up", lambda *_: False)
    transport = FakeTransport(FakeKinesis({STREAM: 1}))
    async with open_gateway(transport, KnownTenants(*TENANTS), max_outstanding_records=1_000) as gateway:
        limit = gateway.producer.buffer_limit
        limit.reserve(records=limit.free_for("normal")[0] - 8, size_bytes=1_000)
        client = Client(gateway, "acme")
        answers = [await client.post(ONE) for _ in range(8)]
        assert [answer.json().get("title") for answer in answers] == [None] * 5 + ["Out of room"] * 3
