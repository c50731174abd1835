"""Forwarded operations: the answer of Kinesis is returned, without details of the gateway."""

from collections import Counter
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from functools import partial
from typing import Any

import anyio
import anyio.lowlevel
import pytest

from kpl_core.transport import RequestFailure
from kpl_integrations.ingest.streams.upstream import Upstream
from kpl_integrations.kinesis_protocol.cbor_wire import CborWire
from kpl_integrations.kinesis_protocol.requests import RequestRefused
from kpl_integrations.kinesis_protocol.wire import JsonWire
from tests.support.virtual_time import Backend


@pytest.fixture
def anyio_backend(virtual_time_backend: Backend) -> Backend:
    return virtual_time_backend


class Transport:
    """A fake transport that answers or fails."""

    def __init__(self, answer: Mapping[str, Any] | RequestFailure) -> None:
        self.answer = answer
        self.asked: list[tuple[str, str | None, dict[str, Any]]] = []

    async def call(self, method: str, read: Callable[[Any], Any], stream: str | None, **arguments: Any) -> Any:
        self.asked.append((method, stream, arguments))
        return self.answer if isinstance(self.answer, RequestFailure) else read(self.answer)


async def refusal(upstream: Upstream) -> RequestRefused:
    with pytest.raises(RequestRefused) as raised:
        await upstream.call("ListShards", {}, tenant="ada")
    return raised.value


@pytest.mark.anyio
async def test_an_answer_is_returned_without_botocores_additions_and_with_timestamps_as_numbers():
    at = datetime(2026, 11, 20, 12, 0, 0, 250_000, tzinfo=UTC)
    transport = Transport({"Shards": [{"ShardId": "s", "At": at}], "ResponseMetadata": {"HTTPStatusCode": 200}})
    answer = await Upstream(transport).call("ListShards", {"StreamName": "orders", "MaxResults": 2}, tenant="ada")
    assert transport.asked == [("list_shards", "orders", {"StreamName": "orders", "MaxResults": 2})]
    assert JsonWire().encode(answer) == b'{"Shards":[{"ShardId":"s","At":1795176000.25}]}'


@pytest.mark.anyio
async def test_an_instant_that_the_transport_reads_as_a_number_is_an_instant_in_cbor():
    transport = Transport({"StreamDescription": {"StreamCreationTimestamp": 1795176000.25, "Shards": [{"N": 1.5}]}})
    answer = await Upstream(transport).call("DescribeStream", {"StreamName": "orders"}, tenant="ada")
    assert CborWire().encode(answer).count(b"\xc1") == 1
    assert JsonWire().encode(answer) == (
        b'{"StreamDescription":{"StreamCreationTimestamp":1795176000.25,"Shards":[{"N":1.5}]}}'
    )


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("failed", "message", "code", "status"),
    [
        ("ResourceNotFoundException", "no such stream", "ResourceNotFoundException", 400),
        ("LimitExceededException", "", "LimitExceededException", 400),
        ("InternalFailure", "try again", "InternalFailure", 500),
        ("AccessDeniedException", "User: arn:aws:sts::1:role/gateway may not", "AccessDeniedException", 400),
        ("ExpiredTokenException", "The token of role/gateway is expired", "ServiceUnavailable", 503),
        ("UnrecognizedClientException", "role/gateway is unknown", "ServiceUnavailable", 503),
        ("ServiceUnavailable", "", "ServiceUnavailable", 503),
        # No answer, or a proxy's page, whose code is its status.
        ("Internal", "Could not connect to http://inside.example", "ServiceUnavailable", 503),
        ("NoCredentials", "the vault of role/gateway is away", "ServiceUnavailable", 503),
        ("404", "inside.example has no such page", "ServiceUnavailable", 503),
    ],
)
async def test_a_failure_has_a_code_of_kinesis_and_no_details_of_the_gateway(failed, message, code, status):
    refused = await refusal(Upstream(Transport(RequestFailure(failed, message))))
    assert (refused.code, refused.status) == (code, status)
    assert "role/gateway" not in str(refused)
    assert "inside.example" not in str(refused)


@pytest.mark.anyio
async def test_tenants_cannot_use_up_the_account_s_calls():
    transport = Transport({})
    upstream = Upstream(transport)
    started_at = anyio.current_time()
    for _ in range(16):
        await upstream.call("ListShards", {}, tenant="ada")
    assert anyio.current_time() == started_at
    for _ in range(8):
        await upstream.call("ListShards", {}, tenant="ada")
    assert anyio.current_time() == pytest.approx(started_at + 1.0)


@pytest.mark.anyio
async def test_a_tenant_with_endless_calls_does_not_delay_others():
    transport = Transport({})
    upstream = Upstream(transport)
    answered: Counter[str] = Counter()
    refused: Counter[tuple[str, str]] = Counter()
    waits: list[float] = []

    async def greedy(tenant: str) -> None:
        while True:
            try:
                await upstream.call("ListShards", {}, tenant=tenant)
                answered[tenant] += 1
            except RequestRefused as refusal:
                refused[tenant, refusal.code] += 1
                await anyio.sleep(0.05)

    async with anyio.create_task_group() as tasks:
        for tenant in ("noisy", "loud"):
            for _ in range(20):
                tasks.start_soon(greedy, tenant)
        await anyio.sleep(5.0)
        before = Counter(answered)
        for _ in range(20):
            asked_at = anyio.current_time()
            await upstream.call("ListShards", {}, tenant="quiet")
            waits.append(anyio.current_time() - asked_at)
            await anyio.sleep(0.5)
        tasks.cancel_scope.cancel()
    # One round: its own turn, behind one call of each of the others.
    assert max(waits) <= 3 / 8 + 1e-6
    assert set(refused) == {("noisy", "LimitExceededException"), ("loud", "LimitExceededException")}
    served = answered - before
    assert abs(served["noisy"] - served["loud"]) <= 1


@pytest.mark.anyio
async def test_a_client_that_disconnects_while_waiting_takes_no_turn():
    upstream = Upstream(Transport({}))
    for _ in range(16):
        await upstream.call("ListShards", {}, tenant="ada")
    async with anyio.create_task_group() as tasks:
        for _ in range(3):
            tasks.start_soon(partial(upstream.call, "ListShards", {}, tenant="gone"))
        await anyio.lowlevel.checkpoint()
        tasks.cancel_scope.cancel()
    started_at = anyio.current_time()
    await upstream.call("ListShards", {}, tenant="ada")
    assert anyio.current_time() - started_at == pytest.approx(1 / 8)


@pytest.mark.anyio
async def test_without_an_aws_client_nothing_is_forwarded():
    assert (await refusal(Upstream(object()))).code == "UnknownOperationException"
