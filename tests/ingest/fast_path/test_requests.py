"""A request that a connection runs itself has exactly the answer and the effects of one that ASGI receives."""

import gzip
import json
from typing import Any

import anyio
import pytest

from kpl_core.testing import ErrorAnswer, RecordError, When
from kpl_integrations.ingest import IngestGateway
from kpl_integrations.ingest.admission.refusals import Refusal
from kpl_integrations.ingest.fast_path.protocol import PendingRequest
from kpl_integrations.ingest.http.answers import Answer, encoded
from kpl_integrations.ingest.http.correlation import new_request_id
from kpl_integrations.ingest.request.needs import Results, Steps
from kpl_integrations.ingest.tenants import Tenant
from tests.support.gateway_scene import JSON, NDJSON, STREAM, Client, KnownTenants, gateway_of, kinesis, records
from tests.support.producer_scene import stored

pytestmark = [pytest.mark.anyio, pytest.mark.usefixtures("same_request_ids")]
PATH = f"/v1/streams/{STREAM}/records"
ONE = b'{"partition_key":"k","data":"x"}'
LINES = b"\n".join(json.dumps(each).encode() for each in records(100))
BAD = b'{"records":[{"partition_key":"k","data":"x"},{"data":null}]}'


def directory() -> KnownTenants:
    return KnownTenants(
        Tenant(id="plain"),
        Tenant(id="metered", records_per_second=150, bytes_per_second=1_000_000),
        Tenant(id="small", bytes_per_second=1_000),
        Tenant(id="alone", aggregation=False),
        Tenant(id="critical", tier="critical"),
        Tenant(id="sure", default_ack="delivered"),
        Tenant(id="other", streams=("else*",)),
    )


# A request: target, body, further header fields, and whether a connection may run it itself.
Asked = tuple[str, bytes, dict[str, str], bool]
ASKED: dict[str, Asked] = {
    "one": (PATH, ONE, {}, True),
    "lines": (PATH, LINES, {"content-type": NDJSON}, True),
    "a value that is no text": (PATH, b'{"partition_key":"k","data":[1]}', {}, True),
    "no key": (PATH, b'{"data":"x"}', {}, True),
    "with a charset": (PATH, ONE, {"content-type": "application/json; charset=utf-8"}, True),
    "bytes": (PATH, b"\x00", {"content-type": "application/octet-stream"}, True),
    "a cloud event": (PATH, b"{}", {"ce-specversion": "1.0", "ce-id": "1", "ce-source": "s", "ce-type": "t"}, True),
    "packed": (PATH, gzip.compress(ONE), {"content-encoding": "gzip"}, True),
    "ack in the query": (PATH + "?ack=queued", ONE, {}, True),
    "the good of it": (PATH + "?partial=true", BAD, {}, True),
    "metered": (PATH, LINES, {"content-type": NDJSON, "authorization": "metered"}, True),
    "more than it may send": (PATH, LINES, {"content-type": NDJSON, "authorization": "small"}, True),
    "each alone": (PATH, ONE, {"authorization": "alone"}, True),
    "critical": (PATH, ONE, {"authorization": "critical"}, True),
    "a bad one": (PATH, BAD, {}, True),
    "no JSON": (PATH, b"{", {}, True),
    "nothing": (PATH, b"", {}, True),
    "another type": (PATH, ONE, {"content-type": "text/html"}, True),
    "another encoding": (PATH, ONE, {"content-encoding": "br"}, True),
    "too large": (PATH, b"x" * 20_000, {}, True),
    "no credentials": (PATH, ONE, {"authorization": ""}, True),
    "bad credentials": (PATH, ONE, {"authorization": "nobody"}, True),
    "delivered": (PATH + "?ack=delivered", ONE, {}, True),
    "lines, delivered": (PATH + "?ack=delivered", LINES, {"content-type": NDJSON}, True),
    "packed, delivered": (PATH + "?ack=delivered", gzip.compress(ONE), {"content-encoding": "gzip"}, True),
    "the good of it, delivered": (PATH + "?partial=true&ack=delivered", BAD, {}, True),
    "metered, delivered": (PATH + "?ack=delivered", LINES, {"content-type": NDJSON, "authorization": "metered"}, True),
    "each alone, delivered": (PATH + "?ack=delivered", ONE, {"authorization": "alone"}, True),
    "a bad one, delivered": (PATH + "?ack=delivered", BAD, {}, True),
    "delivered by default": (PATH, ONE, {"authorization": "sure"}, True),
    "a key": (PATH, ONE, {"idempotency-key": "k"}, True),
    "a bad parameter": (PATH + "?ack=never", ONE, {}, True),
    "an unknown parameter": (PATH + "?a=b", ONE, {}, True),
    "a header": (PATH, ONE, {"x-ack": "spooled"}, True),
    "another's stream": (PATH, ONE, {"authorization": "other"}, True),
    "no such stream": ("/v1/streams/absent/records", ONE, {}, True),
    "no name of a stream": ("/v1/streams/a%20b/records", ONE, {}, False),
    "no stream": ("/v1/streams//records", ONE, {}, False),
    "another path": ("/v1/logs", ONE, {}, False),
}


async def asked(gateway: IngestGateway, each: Asked, *, at_once: bool) -> tuple[int, dict[str, str], bytes] | None:
    target, body, fields, _ = each
    fields = {"content-type": JSON, "content-length": str(len(body)), "authorization": "plain", **fields}
    if not fields["authorization"]:
        del fields["authorization"]
    if not at_once:
        answer = await Client(gateway).call("POST", target, body, headers=fields)
        return answer.status, answer.headers, answer.body
    headers = [(name.encode(), value.encode()) for name, value in fields.items()]
    head = gateway.head_of(target.encode(), headers)
    request = None if head is None else gateway.begin(head, body, "", None)
    if request is None:
        return None
    made = await ran(gateway, request.run())
    answered = encoded(made)
    lines, _, content = answered.content.partition(b"\r\n\r\n")
    named = dict(line.split(": ", 1) for line in lines.decode().split("\r\n"))
    # The connection writes it, because answers are shared.
    named.setdefault("x-request-id", (made.request_id or new_request_id()).decode())
    assert answered.closes == (named.get("connection") == "close")
    return answered.status, named, content


async def ran(gateway: IngestGateway, steps: Steps[Answer]) -> Answer:
    """Run a request as a connection does."""
    try:
        need = next(steps)
        if isinstance(need, Results):
            is_done = anyio.Event()
            pending = PendingRequest(steps, need.deliveries)
            pending.begin(lambda look: look(), lambda _: is_done.set())
            assert not pending.response_complete
            await is_done.wait()
            assert pending.response_complete
            next(steps)
    except StopIteration as end:
        answer: Answer = end.value
        return answer
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    await gateway.finish(steps, need, send)
    start, content = sent
    fields = [field for field in start["headers"] if field[0] != b"content-length"]
    return Answer(start["status"], content["body"], fields)


async def what_it_did(each: Asked, *, at_once: bool, fault: Any = None) -> tuple[Any, ...]:
    transport = kinesis()
    if fault is not None:
        transport.kinesis.faults.add(fault, When(operation="PutRecords", skip=1))
    async with gateway_of(transport, directory(), max_body_bytes=10_000) as gateway:
        known = await Client(gateway, "plain").post({"partition_key": "k", "data": "first"})
        assert known.status == 202
        # For some, the first request uses up the quota of the second.
        answers = [await asked(gateway, each, at_once=at_once) for _ in range(2)]
        accounts = sorted((one.tenant.id, one.requests, one.accepted_records) for one in gateway.opened.accounts)
        refused = {one.tenant.id: dict(one.refused) for one in gateway.opened.accounts if one.refused}
        tally = dict(gateway.tally.answers), dict(gateway.tally.refusals)
    return answers, accounts, refused, tally, sorted(data for _, data in stored(transport, STREAM))


@pytest.mark.parametrize("name", [name for name, each in ASKED.items() if each[3]])
async def test_a_connection_answers_like_the_application(name):
    assert await what_it_did(ASKED[name], at_once=True) == await what_it_did(ASKED[name], at_once=False)


@pytest.mark.parametrize("fault", [RecordError("InvalidArgumentException"), ErrorAnswer("ResourceNotFoundException")])
@pytest.mark.parametrize("name", ["delivered", "lines, delivered", "the good of it, delivered"])
async def test_the_answer_to_records_that_fail_is_the_application_s(name, fault):
    fast = await what_it_did(ASKED[name], at_once=True, fault=fault)
    assert fast == await what_it_did(ASKED[name], at_once=False, fault=fault)
    assert 502 in {status for status, *_ in fast[0]}


@pytest.mark.parametrize("name", [name for name, each in ASKED.items() if not each[3]])
async def test_a_request_in_another_form_is_left_to_the_application_without_effects(name):
    answers, accounts, refused, tally, _ = await what_it_did(ASKED[name], at_once=True)
    assert answers == [None, None]
    assert ("plain", 1, 1) in accounts
    assert all(requests == 0 for tenant, requests, _ in accounts if tenant != "plain")
    assert (refused, tally) == ({}, ({202: 1}, {}))


async def test_a_closed_gateway_rejects_in_the_fast_path_and_closes_the_connection():
    async with gateway_of(kinesis()) as gateway:
        await Client(gateway).post({"partition_key": "k", "data": "x"})
        await gateway.close()
        answer = await asked(gateway, ASKED["one"], at_once=True)
        assert answer is not None
        assert answer[0] == 503
        assert answer[1]["connection"] == "close"
        assert gateway.tally.refusals[Refusal.DRAINING] == 1
