"""Large PutRecords requests: their stream is checked before their records are decoded, and without a turn."""

import json

import anyio
import cbor2
import pytest

from kpl_integrations.ingest.admission.clients import ClientRoom, SharedRoom
from kpl_integrations.ingest.decoding.put_records_body import named_stream
from kpl_integrations.ingest.request import kinesis_wire
from kpl_integrations.ingest.tenants import OpenTenants, Tenant
from tests.support.gateway_scene import STREAM, Client, open_gateway

pytestmark = pytest.mark.anyio

JSON, CBOR = "application/x-amz-json-1.1", "application/x-amz-cbor-1.1"
COUNT = 100
FIRST, LAST = '{"StreamName":"%s","Records":%s}', '{"Records":%s,"StreamName":"%s"}'


def body_of(form: str) -> tuple[bytes, str]:
    """Return a request and its content type."""
    data = "x" * 2_000
    if form == "cbor":
        entries = [{"PartitionKey": "k", "Data": data.encode()}] * COUNT
        return cbor2.dumps({"StreamName": STREAM, "Records": entries}), CBOR
    text = json.dumps([{"PartitionKey": "k", "Data": data}] * COUNT)
    return (FIRST % (STREAM, text) if form == "first" else LAST % (text, STREAM)).encode(), JSON


async def put_records(client: Client, form: str) -> int:
    body, content_type = body_of(form)
    headers = {"x-amz-target": "Kinesis_20131202.PutRecords", "content-type": content_type}
    return (await client.call("POST", "/", body, headers=headers)).status


@pytest.mark.parametrize("form", ["first", "last", "cbor"])
async def test_no_turn_is_held_while_kinesis_is_asked_for_the_stream(form, monkeypatch):
    async with open_gateway() as gateway:
        opened, statuses = gateway.opened, list[int]()
        admit, may_answer = opened.streams.admit, anyio.Event()

        async def slow_admit(*args, **options):
            await may_answer.wait()
            return await admit(*args, **options)

        monkeypatch.setattr(opened.streams, "admit", slow_admit)

        async def large() -> None:
            statuses.append(await put_records(Client(gateway), form))

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(large)
            await anyio.wait_all_tasks_blocked()
            with anyio.fail_after(5):
                async with opened.large_bodies.turn(ClientRoom(SharedRoom(10), "other"), 1):
                    may_answer.set()
        assert statuses == [200]
    assert gateway.report is not None
    assert gateway.report.delivered == COUNT


@pytest.mark.parametrize("form", ["first", "last"])
async def test_the_permission_is_checked_before_the_records_are_decoded(form, monkeypatch):
    monkeypatch.setattr(kinesis_wire, "put_records_in_steps", lambda *_: pytest.fail("the records are decoded"))
    async with open_gateway(directory=OpenTenants(Tenant(id="local", streams=("other",)))) as gateway:
        assert await put_records(Client(gateway), form) == 400


async def test_a_known_stream_needs_one_turn(monkeypatch):
    async with open_gateway() as gateway:
        await Client(gateway).post({"data": "x"})
        turn, turns = gateway.opened.large_bodies.turn, list[int]()

        def counted(room, size_bytes):
            turns.append(size_bytes)
            return turn(room, size_bytes)

        monkeypatch.setattr(gateway.opened.large_bodies, "turn", counted)
        for number, form in enumerate(("first", "last", "cbor"), 1):
            assert await put_records(Client(gateway), form) == 200
            assert len(turns) == number


@pytest.mark.parametrize(
    ("body", "stream"),
    [
        (b'{"StreamName":"s","Records":[{"Data":"]"}]}', "s"),
        (b' { "Records" : [{}] , "StreamName" : "s" } ', "s"),
        (
            b'{"Records":[],"StreamARN":"arn:aws:kinesis:us-east-1:111122223333:stream/s"}',
            "arn:aws:kinesis:us-east-1:111122223333:stream/s",
        ),
        (b'{"StreamName":"a","Records":[],"StreamName":"b"}', "b"),
        (b'{"Records":[],"Other":1}', ""),
        (b'{"Records":[', ""),
        (b"", ""),
    ],
)
async def test_the_stream_is_found_before_or_after_the_records(body, stream):
    assert named_stream(body) == stream


@pytest.mark.parametrize(("size", "status"), [(2_000_000, 400), (2_200_000, 413)])
async def test_a_request_that_is_decoded_at_once_is_bounded(size, status):
    async with open_gateway() as gateway:
        headers = {"x-amz-target": "Kinesis_20131202.PutRecord", "content-type": JSON, "content-length": str(size)}
        assert (await Client(gateway).call("POST", "/", b"[]".ljust(size), headers=headers)).status == status
