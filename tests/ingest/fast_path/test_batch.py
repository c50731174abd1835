"""Requests with one record that the event loop reads in one iteration are put together, and answered as if alone."""

import asyncio
import json
import logging
import re
import time
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import count
from typing import Any, NoReturn

import anyio
import pytest
from hypothesis import example, given, settings, strategies as st

from kpl_core.testing import ErrorAnswer, When
from kpl_integrations.ingest import IngestGateway
from kpl_integrations.ingest.admission.tenant_account import TenantAccount
from kpl_integrations.ingest.decoding import DecodeLimits, decode_singles
from kpl_integrations.ingest.fast_path.batch import RequestBatch
from kpl_integrations.ingest.open_gateway import OpenGateway
from kpl_integrations.ingest.request.records import RecordsRequest
from kpl_integrations.ingest.tenants import Tenant
from tests.ingest.fast_path.test_protocol import LAST, address_of
from tests.ingest.fast_path.test_repeated_requests import NAMED, ONE, PATH, Line, line_to, protocol_of, request
from tests.ingest.served import served
from tests.support.gateway_scene import JSON, NDJSON, STREAM, Client, KnownTenants, gateway_of, kinesis
from tests.support.producer_scene import stored
from tests.support.virtual_time import run_in_virtual_time, virtual_time_backend

# An id, and what depends on its length.
_ID = re.compile(rb'(?<=x-request-id: )[^\r]+|(?<="request_id":")[^"]+|(?<=content-length: )[0-9]+')
TENANTS = ("plain", "other", "metered", "alone", "traced")

pytestmark = pytest.mark.usefixtures("same_request_ids")


def body_of(data: Any, key: str = "k") -> bytes:
    return json.dumps({"partition_key": key, "data": data}).encode()


ASKED = {
    "one": request(ONE, f"content-type: {JSON}"),
    "an object": request(body_of({"a": [1, {}]}), f"content-type: {JSON}"),
    "a number": request(body_of(1), f"content-type: {JSON}"),
    "no key": request(b'{"data":"x"}', f"content-type: {JSON}"),
    "a hash key": request(b'{"partition_key":"k","data":"x","explicit_hash_key":"7"}', f"content-type: {JSON}"),
    "two in a line": request(ONE + ONE, f"content-type: {JSON}"),
    "two and a comma": request(ONE + b"," + ONE, f"content-type: {JSON}"),
    "an open text": request(b'{"partition_key":"k","data":"}', f"content-type: {JSON}"),
    "the end of it": request(b'{"}', f"content-type: {JSON}"),
    "an open object": request(b'{"partition_key":"k","data":{"a":1}', f"content-type: {JSON}"),
    "many": request(b'{"records":[' + ONE + b"," + ONE + b"]}", f"content-type: {JSON}"),
    "not UTF-8": request(b'{"partition_key":"k","data":{"a":"\xff"}}', f"content-type: {JSON}"),
    "too deep": request(b'{"partition_key":"k","data":%b1%b}' % (b'{"a":' * 70, b"}" * 70), f"content-type: {JSON}"),
    "too long": request(body_of("x" * 5_000), f"content-type: {JSON}"),
    "other": request(ONE, f"content-type: {JSON}", tenant="other"),
    "metered": request(ONE, f"content-type: {JSON}", tenant="metered"),
    "alone": request(ONE, f"content-type: {JSON}", tenant="alone"),
    "nobody": request(ONE, f"content-type: {JSON}", tenant="nobody"),
    "a line": request(ONE, f"content-type: {NDJSON}"),
    "delivered": request(ONE, f"content-type: {JSON}", target=PATH + "?ack=delivered"),
    "pipelined": 2 * request(ONE, f"content-type: {JSON}"),
    **{name: request(body, f"content-type: {JSON}", *fields, tenant=tenant) for name, body, tenant, *fields in NAMED},
    "named and delivered": request(ONE, "x-request-id: d", f"content-type: {JSON}", target=PATH + "?ack=delivered"),
}  # fmt: skip


def tenants() -> KnownTenants:
    return KnownTenants(
        Tenant(id="plain"),
        Tenant(id="other"),
        Tenant(id="metered", records_per_second=3),
        Tenant(id="alone", aggregation=False),
        Tenant(id="traced", trace_records=True),
    )


async def settle() -> None:
    for _ in range(30):
        await asyncio.sleep(0)


@asynccontextmanager
async def lines(count: int, **options: Any) -> AsyncIterator[tuple[IngestGateway, list[Line]]]:
    """Yield a gateway, and connections with a cached head."""
    async with gateway_of(kinesis(), tenants(), **options) as gateway:
        await Client(gateway, "plain").post({"partition_key": "k", "data": "first"})
        kind = protocol_of(gateway)
        made = [line_to(gateway, kind) for _ in range(count)]
        for line in made:
            await line.hear(ASKED["one"])
            line.wire.writes.clear()
        yield gateway, made
        for line in made:
            line.protocol.connection_lost(None)


def read_together(made: list[Line], names: list[str]) -> None:
    """Let each connection receive a request in one iteration of the event loop."""
    for line, name in zip(made, names, strict=False):
        if not line.wire.closed:
            line.protocol.data_received(ASKED[name])


async def wait_for_delivered(made: list[Line]) -> None:
    """Let the cached head of each connection be that of a request that waits for its result."""
    for line in made:
        await line.hear(ASKED["delivered"])
    await anyio.sleep(1.0)
    # The loop looks late after this, and the first request, which ends that, is answered alone.
    for line in made:
        line.wire.writes.clear()


def answers_of(line: Line) -> list[bytes]:
    return line.wire.said.split(b"HTTP/1.1 ")[1:]


def statuses(made: list[Line]) -> list[bytes]:
    return [each[:3] for line in made for each in answers_of(line)]


def without_id(answer: bytes) -> bytes:
    """Return an answer that says what is left of a quota without its id: which of several has which is not defined."""
    return _ID.sub(b"", answer) if b"ratelimit" in answer.lower() else answer


async def what_happens(rounds: list[list[str]], **options: Any) -> tuple[Any, ...]:
    async with lines(4, **options) as (gateway, made):
        for names in rounds:
            read_together(made, names)
            await settle()
        await anyio.sleep(1.0)
        accounts = [gateway.opened.accounts.find(name) for name in TENANTS]
        counted = [(each.requests, each.accepted_records, dict(each.refused)) for each in accounts if each is not None]
        tally = dict(gateway.tally.answers), dict(gateway.tally.refusals)
        # Which of the requests that arrive together exhausts a quota is not defined.
        by_line = [
            [None if each[:3] == b"429" or b"ratelimit" in each.lower() else each for each in answers_of(line)]
            for line in made
        ]
        everything = sorted(without_id(each) for line in made for each in answers_of(line) if b"delivered" not in each)
        closed = [line.wire.closed for line in made]
        total = sum(line.protocol.server.answered() for line in made)
        transport: Any = gateway._transport  # noqa: SLF001 - what it delivered
    is_delivered = any("delivered" in name for names in rounds for name in names)
    data = sorted(data for _, data in stored(transport, STREAM))
    return None if is_delivered else by_line, everything, closed, counted, tally, total, data


@given(st.lists(st.lists(st.sampled_from(sorted(ASKED)), min_size=2, max_size=4), min_size=1, max_size=5))
@example([["one"] * 4, ["one", "two in a line", "one", "one"], ["one", "two and a comma", "one", "one"]])
@example([["an open text", "the end of it", "one", "one"], ["an open object", "one", "one", "an object"]])
@example([["no key", "no key", "one", "a hash key"], ["a hash key", "a hash key", "an object", "a number"]])
@example([["metered"] * 4, ["metered", "one", "metered", "other"], ["alone", "alone", "nobody", "nobody"]])
@example([["metered", "named and metered"], ["named and metered", "metered", "metered", "named and metered"]])
@example([["named"] * 4, ["named", "named again", "named badly", "named and bad"], ["one", "named", "one", "named"]])
@example([["traced"] * 4, ["traced", "traced again", "traced badly", "traced and plain"], ["traced"] * 4])
@example([["named and delivered"] * 4, ["named and delivered", "delivered", "delivered", "named and delivered"]])
@settings(max_examples=40, deadline=None)
def test_answers_and_effects_are_those_without_a_batch(rounds: list[list[str]]):
    async def main() -> None:
        together = await what_happens(rounds)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(RequestBatch, "takes", lambda *_: False)
            assert together == await what_happens(rounds)

    run_in_virtual_time(main, backend="asyncio")


@given(st.lists(st.integers(1, 8), min_size=1, max_size=5), st.integers(3, 30))
@settings(max_examples=12, deadline=None)
def test_a_full_buffer_refuses_as_many_requests_as_without_a_batch(sizes: list[int], room: int):
    async def statuses_of() -> list[list[bytes]]:
        async with lines(8, max_outstanding_records=40, record_max_buffered_time_ms=60_000) as (gateway, made):
            gateway.producer.buffer_limit.free_records = room
            said = []
            for size in sizes:
                read_together(made, ["one"] * size)
                await settle()
                said.append(statuses(made))
            return said

    async def main() -> None:
        together = await statuses_of()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(RequestBatch, "takes", lambda *_: False)
            assert together == await statuses_of()

    run_in_virtual_time(main, backend="asyncio")


def test_the_records_of_one_call_are_those_of_each_body_or_none():
    limits = DecodeLimits()
    assert decode_singles([ONE, body_of("y")], limits) == [("k", b"x"), ("k", b"y")]
    keyless = decode_singles([b'{"data":"x"}'] * 3, limits)
    assert keyless is not None
    # Each request has a random key of its own.
    assert len({key for key, _ in keyless}) == 3  # type: ignore[misc] # pairs, because none has a hash key
    assert decode_singles([ONE + ONE, ONE], limits) is None
    for form in (b'{"partition_key":"k","data":"%b}', b'{"partition_key":"k","data":{"a":"%b}', b'{"data_base64":"%b}'):
        assert decode_singles([form % b"", b'{"}'], limits) is None


@pytest.fixture
def groups(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return how many records each put of a batch had."""
    sizes: list[int] = []
    put = RecordsRequest.put_together

    def counted(self: RecordsRequest, bodies: Any) -> Any:
        answer = put(self, bodies)
        sizes.append(len(bodies) if answer is not None else 0)
        return answer

    monkeypatch.setattr(RecordsRequest, "put_together", counted)
    return sizes


@pytest.mark.anyio
# In virtual time: on a busy machine the gateway would find its loop idle or late between two steps, and answer apart.
@pytest.mark.parametrize("anyio_backend", [virtual_time_backend("asyncio")], ids=["asyncio"])
class TestOneIteration:
    """What may happen between the arrival of a request and the end of the iteration."""

    async def test_requests_of_one_tenant_are_put_together_and_a_request_alone_is_not(self, groups):
        async with lines(66) as (gateway, made):
            read_together(made[:6], ["one", "one", "other", "one", "an object", "other"])
            assert statuses(made) == []
            await settle()
            assert sorted(groups) == [2, 4]
            read_together(made, ["one"])
            await settle()
            assert sorted(groups) == [2, 4]
            # A batch has at most 64 requests. The next ones wait in another one.
            read_together(made, ["one"] * 66)
            assert len(statuses(made)) == 7 + 64
            await settle()
            assert sorted(groups) == [2, 2, 4, 64]
            assert gateway.tally.answers[202] == 1 + 66 + 7 + 66

    async def test_bytes_behind_a_request_in_the_batch_are_handled_after_it(self):
        async with lines(2) as (_, made):
            for line in made:
                line.protocol.data_received(ASKED["one"])
                line.protocol.data_received(ASKED["a number"] + b"GET /li")
                line.protocol.data_received(b"vez HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
            await settle()
            assert statuses(made) == [b"202", b"202", b"200"] * 2

    async def test_a_client_that_leaves_gets_no_answer_and_its_record_is_put(self):
        async with lines(3) as (gateway, made):
            read_together(made, ["one", "one", "alone"])
            for gone in made[1:]:
                gone.wire.close()
            await settle()
            assert statuses(made) == [b"202"]
            assert gateway.tally.answers[202] == 7

    async def test_a_shutdown_sends_the_answers_of_the_batch_before_it_closes(self):
        async with lines(3) as (_, made):
            read_together(made, ["one"] * 3)
            for line in made:
                line.protocol.shutdown()
                assert statuses([line]) == [b"202"]
                assert line.wire.closed

    async def test_a_client_that_closes_its_side_gets_its_answer(self):
        async with lines(3) as (_, made):
            read_together(made, ["one"] * 3)
            assert all(line.protocol.is_answering() for line in made)
            for line in made:
                line.protocol.eof_received()
                assert statuses([line]) == [b"202"]

    async def test_an_idle_timer_does_not_close_a_connection_in_the_batch(self):
        async with lines(2) as (_, made):
            read_together(made, ["one"] * 2)
            await asyncio.sleep(0)
            protocol = made[0].protocol
            protocol._is_batched, protocol._answered_at = True, -1_000.0  # noqa: SLF001 - a request waits
            protocol._close_if_idle()  # noqa: SLF001 - as the timer does
            assert not made[0].wire.closed
            protocol._is_batched = False  # noqa: SLF001
            protocol._close_if_idle()  # noqa: SLF001
            assert made[0].wire.closed

    async def test_a_gateway_that_closes_in_between_refuses_each_request(self):
        async with lines(3) as (gateway, made):
            read_together(made, ["one"] * 3)
            gateway.admission.state = "closed"
            await settle()
            assert statuses(made) == [b"503"] * 3
            gateway.admission.state = "open"

    async def test_an_exception_is_answered_500_and_logged_once(self, caplog, monkeypatch):
        async with lines(3) as (_, made):
            monkeypatch.setattr(RecordsRequest, "put_together", _fails)
            with caplog.at_level(logging.ERROR):
                read_together(made, ["one"] * 3)
                await settle()
            assert statuses(made) == [b"500"] * 3
            assert all(line.wire.closed for line in made)
            assert [each.message for each in caplog.records] == ["Exception in the fast path"]

    async def test_each_request_is_answered_alone_if_the_directory_fails(self, caplog, monkeypatch):
        async with lines(3) as (gateway, made):
            account_shown, shown = OpenGateway.account_shown, list[str | None]()

            def fails_twice(self: OpenGateway, authorization: str | None) -> TenantAccount:
                shown.append(authorization)
                return _fails() if len(shown) in {1, 3} else account_shown(self, authorization)

            monkeypatch.setattr(OpenGateway, "account_shown", fails_twice)
            before = gateway.producer.report().accepted
            with caplog.at_level(logging.ERROR):
                read_together(made, ["one"] * 3)
                await settle()
            assert statuses(made) == [b"202", b"500", b"202"]
            assert gateway.producer.report().accepted - before == 2

    async def test_a_connection_that_fails_is_closed_and_the_others_get_their_answers(self, caplog, monkeypatch):
        async with lines(3) as (_, made):
            monkeypatch.setattr(made[1].wire, "write", _fails)
            monkeypatch.setattr(made[1].wire, "abort", made[1].wire.close)
            with caplog.at_level(logging.ERROR):
                read_together(made, ["one"] * 3)
                await settle()
            assert statuses(made) == [b"202"] * 2
            assert [line.wire.closed for line in made] == [False, True, False]
            assert [each.message for each in caplog.records] == ["Exception in the fast path"]

    async def test_requests_with_a_line_in_the_access_log_are_not_batched(self, groups):
        async with lines(3, access_log=1.0) as (_, made):
            read_together(made, ["one"] * 3)
            assert statuses(made) == [b"202"] * 3
            assert groups == []

    async def test_requests_that_wait_for_their_results_are_put_together(self, groups):
        async with lines(7) as (gateway, made):
            await wait_for_delivered(made)
            read_together(made, ["delivered"] * 7)
            await settle()
            assert (groups, statuses(made)) == ([6], [])
            # A client that leaves has put its record, and a request behind one that waits comes after it.
            made[1].wire.close()
            made[2].protocol.data_received(ASKED["one"])
            assert made[3].protocol.is_answering()
            await anyio.sleep(1.0)
            assert statuses(made) == [b"200", b"200", b"202", *[b"200"] * 4]
            answered = [answers_of(line)[0] for line in made if not line.wire.closed]
            bodies = [json.loads(each.partition(b"\r\n\r\n")[2]) for each in answered]
            assert {(body["accepted"], body["delivered"], body["failed"]) for body in bodies} == {(1, 1, 0)}
            assert gateway.tally.answers[200] == 7 + 7

    @pytest.mark.parametrize("code", ["AccessDeniedException", "ResourceNotFoundException"])
    async def test_a_record_that_is_not_delivered_is_answered_as_alone(self, groups, monkeypatch, code):
        async def said() -> tuple[Any, ...]:
            async with lines(5, record_ttl_ms=500) as (gateway, made):
                await wait_for_delivered(made)
                transport: Any = gateway._transport  # noqa: SLF001 - the service that it has
                transport.kinesis.faults.add(ErrorAnswer(code), When(operation="PutRecords"))
                read_together(made, ["delivered"] * 5)
                await anyio.sleep(5.0)
                account = gateway.opened.accounts.find("plain")
                assert account is not None
                answers = [each.partition(b"date")[0] for line in made for each in answers_of(line)]
                counted = account.requests, account.accepted_records, dict(account.refused)
                return answers, counted, dict(gateway.tally.answers), dict(gateway.tally.refusals)

        together = await said()
        assert groups == [4]
        monkeypatch.setattr(RequestBatch, "takes", lambda *_: False)
        assert together == await said()
        assert len(together[0]) == 5
        assert not any(answer.startswith(b"200") for answer in together[0])

    async def test_a_shutdown_waits_for_the_results_of_the_batch(self):
        async with lines(4) as (_, made):
            await wait_for_delivered(made)
            read_together(made, ["delivered"] * 4)
            for line in made:
                line.protocol.shutdown()
            assert statuses(made) == []
            await anyio.sleep(1.0)
            assert statuses(made) == [b"200"] * 4
            assert all(line.wire.closed for line in made)

    async def test_while_connections_take_turns_their_tenant_is_charged_when_their_records_are_put(self, groups):
        async with lines(4) as (_, made):
            turns = made[0].protocol.turns
            read_together(made, ["one"] * 4)
            turns.is_attentive = True
            await settle()
            assert (statuses(made), groups) == ([b"202"] * 4, [4])
            machine: Any = turns._turns  # noqa: SLF001 - as after a standing delay
            machine.is_active = True
            # Those that need not wait for a turn are answered at once.
            read_together(made, ["one"] * 4)
            assert (statuses(made), groups) == ([b"202"] * 8, [4])
            # The connection of a proxy cannot wait for a turn, so each of its requests may have to be refused.
            made[3].protocol.reader.is_shared = True
            for line in made:
                line.protocol.reader._pause(deque([ASKED["one"]]))  # noqa: SLF001 - as above its share
                turns.leave(line.protocol.reader)
                line.protocol.reader.run_turn(is_overdue=False)
            assert (statuses(made), groups) == ([b"202"] * 9, [4])
            read = turns.charges.cpu_seconds["plain"]
            await settle()
            assert (statuses(made), groups) == ([b"202"] * 12, [4, 3])
            assert turns.charges.cpu_seconds["plain"] > read > 0.0
            machine.is_active = False

    async def test_a_connection_that_fills_a_batch_is_not_charged_for_the_records_of_the_others(self, monkeypatch):
        async with lines(66) as (_, made):
            turns = made[0].protocol.turns
            machine: Any = turns._turns  # noqa: SLF001 - as above
            machine.is_active = turns.is_attentive = True
            charged: list[tuple[object, float]] = []
            monkeypatch.setattr(turns.charges, "add", lambda flow, _, seconds: charged.append((flow, seconds)))
            # Each look at the clock takes a second.
            monkeypatch.setattr(time, "thread_time", count(0.0, 1.0).__next__)
            for line in made[:64]:
                line.protocol.reader._pause(deque([ASKED["one"]]))  # noqa: SLF001 - as above
                turns.leave(line.protocol.reader)
                line.protocol.reader.run_turn(is_overdue=False)
            # 63 that only waited; the last one until the batch was put, the batch, and the rest of the last one.
            assert [seconds for _, seconds in charged] == [1.0] * 63 + [1.0, 1.0, 1.0]
            assert statuses(made) == [b"202"] * 64
            machine.is_active = False

    async def test_pipelined_requests_of_a_turn_are_answered_in_their_order(self, groups):
        async with lines(2) as (_, made):
            machine: Any = made[0].protocol.turns._turns  # noqa: SLF001 - as above
            machine.is_active = True
            for line in made:
                line.protocol.turns.is_attentive = True
                pieces = deque([ASKED["one"], ASKED["a number"], ASKED["one"]])
                line.protocol.reader._pause(pieces)  # noqa: SLF001 - as above
                line.protocol.turns.leave(line.protocol.reader)
                line.protocol.reader.run_turn(is_overdue=False)
            await settle()
            assert statuses(made) == [b"202"] * 6
            machine.is_active = False


def _fails(*_: object) -> NoReturn:
    message = "on purpose"
    raise RuntimeError(message)


@pytest.mark.anyio
@pytest.mark.parametrize(
    "anyio_backend", [("asyncio", {"use_uvloop": each}) for each in (False, True)], ids=["asyncio", "uvloop"]
)
async def test_connections_on_sockets_share_puts_and_get_their_own_answers(groups: list[int]):
    transport = kinesis()
    names = ["one", "other", "two in a line", "metered", "one", "no key"]

    async def client(server: Any, number: int) -> list[bytes]:
        reader, writer = await asyncio.open_connection(*address_of(server))
        said = []
        try:
            for name in ("one", *names, "one"):
                writer.write(ASKED[name] if number % 5 or name != "one" else ASKED["one"] + ASKED["other"])
                await reader.readuntil(b"\r\n\r\n")
                said.append(name.encode())
                await asyncio.sleep(0.002)
            if number % 3 == 0:
                writer.write(ASKED["one"])
                writer.transport.abort()
                return said
            writer.write(LAST)
            said.append(await reader.read())
            return said
        finally:
            writer.close()

    async with served(gateway_of(transport, tenants())) as server:
        await client(server, 1)
        await asyncio.gather(*(client(server, number) for number in range(40)))
        counted = server._gateway.tally.answers  # noqa: SLF001
        assert counted[202] >= 40 * 5
    assert max(groups) > 1
    assert len(stored(transport, STREAM)) == counted[202]
