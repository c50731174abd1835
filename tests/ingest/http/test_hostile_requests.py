"""Hostile requests get an answer of the table, without a 500, a leak or a hang."""

import gzip
import time
from random import Random
from typing import Any, Final

import pytest
import zstandard
from hypothesis import given, settings, strategies as st

from kpl_integrations.ingest import REFUSALS, IngestGateway
from tests.support.gateway_scene import JSON, NDJSON, STREAM, Client, gateway_of, kinesis, records
from tests.support.virtual_time import virtual_time_backend as backend_in_virtual_time

PATH = f"/v1/streams/{STREAM}/records"
KNOWN = {row.status for row in REFUSALS.values()} | {200, 202}
TYPES: Final = (
    JSON,
    NDJSON,
    "application/octet-stream",
    "application/cloudevents+json",
    "application/cloudevents-batch+json",
    "application/json; charset=latin-1",
    "text/plain",
    "",
)
ENCODINGS: Final = (None, "gzip", "zstd", "br", "gzip, gzip", "identity")
GOOD: Final = b'{"records": [{"partition_key": "k", "data": {"a": [1, 2, {"b": null}]}}]}'


def mutilated(chance: Random) -> bytes:
    """A valid body, truncated, with flipped bits, with repeated pieces, nested or compressed."""
    body = bytearray(GOOD)
    for _ in range(chance.randrange(4)):
        kind = chance.randrange(6)
        at = chance.randrange(len(body) + 1)
        if kind == 0:
            del body[at:]
        elif kind == 1:
            body[at:at] = bytes(chance.randrange(256) for _ in range(chance.randrange(8)))
        elif kind == 2:
            body[at:at] = body[: chance.randrange(200)]
        elif kind == 3:
            body = bytearray(b"[" * chance.choice([10, 100_000]) + body)
        elif kind == 4:
            body[at:at] = b'"\xed\xa0\x80\\ud800\\u0000'
        else:
            body = bytearray(b'{"partition_key":"k","data":' + bytes(body) + b"}")
    packed = bytes(body)
    match chance.randrange(5):
        case 0:
            packed = gzip.compress(packed)
        case 1:
            packed = zstandard.compress(packed)
        case 2:
            packed = gzip.compress(bytes(5_000_000))
    return packed if chance.random() < 0.9 else packed[: chance.randrange(len(packed) + 1)]


def run(gateway: IngestGateway, requests: list[tuple[str, bytes, dict[str, str]]]) -> list[int]:
    import anyio  # noqa: PLC0415

    async def main() -> list[int]:
        statuses = []
        async with gateway:
            for path, body, headers in requests:
                answer = await Client(gateway).call("POST", path, body, headers=headers)
                statuses.append(answer.status)
                if answer.status >= 400:
                    assert answer.json()["status"] == answer.status
                    assert len(answer.body) < 50_000
            assert (await Client(gateway).post(records(3), ack="delivered")).status == 200
            accepted = gateway.producer.report().accepted
        assert gateway.report is not None
        assert gateway.report.accepted == gateway.report.delivered == accepted
        return statuses

    backend, options = backend_in_virtual_time("asyncio")
    return anyio.run(main, backend=backend, backend_options=options)


@pytest.mark.parametrize("seed", range(4))
def test_damaged_nested_and_compressed_bodies_are_answered_from_the_table(seed):
    chance = Random(seed)
    requests = []
    for _ in range(150):
        headers = {"content-type": chance.choice(TYPES)}
        encoding = chance.choice(ENCODINGS)
        if encoding is not None:
            headers["content-encoding"] = encoding
        query = chance.choice(["", "?partial=true", "?ack=delivered", "?ack=delivered&partial=1"])
        requests.append((PATH + query, mutilated(chance), headers))
    started = time.process_time()
    statuses = run(gateway_of(kinesis(enforce_limits=False), max_inflated_bytes=1_000_000), requests)
    assert set(statuses) <= KNOWN
    assert {200, 400, 415} <= set(statuses)
    # No body takes seconds, for any decompressed size.
    assert time.process_time() - started < 30


HEADER_NAMES = st.sampled_from(
    ["authorization", "content-type", "content-encoding", "content-length", "idempotency-key", "x-ack",
     "x-partition-key", "x-explicit-hash-key", "ce-specversion", "ce-id", "ce-type", "ce-source"]
)  # fmt: skip
ANY_VALUE = st.text(st.characters(max_codepoint=255, exclude_characters="\r\n"), max_size=40)


@given(
    st.lists(
        st.tuples(
            st.text(st.characters(exclude_categories=["Cs"]), max_size=30),
            st.text(st.characters(max_codepoint=127), max_size=20),
            st.dictionaries(HEADER_NAMES, ANY_VALUE, max_size=4),
            st.binary(max_size=60),
        ),
        min_size=1,
        max_size=20,
    )
)
@settings(max_examples=25)
def test_arbitrary_stream_names_queries_and_headers_are_answered_from_the_table(requests: list[Any]):
    asked = [(f"/v1/streams/{stream}/records?{query}", body, headers) for stream, query, headers, body in requests]
    assert set(run(gateway_of(kinesis(enforce_limits=False)), asked)) <= KNOWN
