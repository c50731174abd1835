"""One connection's turns, without a socket: which of its bytes wait, and what ends its pause."""

import itertools
from typing import Any

import anyio
import pytest

from kpl_integrations.ingest.http.connection_flow import ConnectionFlow
from kpl_integrations.ingest.http.read_turns import SLICE_BYTES, UNVERIFIED, ConnectionReader, ReadTurns, is_probe
from kpl_integrations.ingest.tenants import Tenant

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend() -> str:
    """The rounds are planned in the running loop."""
    return "asyncio"


class Transport:
    """The reading side of a transport. It refuses to pause or resume twice, as some do."""

    def __init__(self) -> None:
        self.is_reading = True
        self.is_aborted = False

    def is_closing(self) -> bool:
        return self.is_aborted

    def abort(self) -> None:
        self.is_aborted = True

    def get_extra_info(self, _: str) -> None:
        """It has no socket."""

    def pause_reading(self) -> None:
        assert self.is_reading
        self.is_reading = False

    def resume_reading(self) -> None:
        assert not self.is_reading
        self.is_reading = True


def test_the_transport_reads_only_if_the_request_and_the_turns_allow_it():
    for calls in itertools.product(["pause_reading", "resume_reading", "hold", "release"], repeat=5):
        transport: Any = Transport()
        flow = ConnectionFlow(transport)
        allowed = {"request": True, "turns": True}
        for call in calls:
            getattr(flow, call)()
            allowed["request" if call.endswith("reading") else "turns"] = call in {"resume_reading", "release"}
            assert transport.is_reading is all(allowed.values())
            assert flow.read_paused is not allowed["request"]


class StagedConnection:
    """A connection whose `feed` counts, or fails."""

    def __init__(self, *, fails: bool = False) -> None:
        transport: Any = Transport()
        self.transport, self.flow = transport, ConnectionFlow(transport)
        self.fails = fails
        self.fed = 0

    def feed(self, _: bytes) -> None:
        self.fed += 1
        if self.fails:
            raise LookupError

    def may_be_cut(self, data: bytes) -> bool:
        return len(data) > SLICE_BYTES

    def may_be_probe(self, data: bytes) -> bool:
        return is_probe(data)

    def takes_more(self) -> bool:
        return True

    def stop_timers(self) -> None:
        pass

    restart_timers = refuse_busy = stop_timers


def late_turns() -> ReadTurns:
    turns = ReadTurns()
    turns._turns.is_active = True  # noqa: SLF001 - the delay of the loop is staged
    return turns


@pytest.mark.parametrize("tenants", [[None, "flood"], ["flood", None], ["flood", None, "flood"], [None, "flood", None]])
async def test_a_request_with_a_wrong_key_exempts_no_connection_from_pauses(tenants):
    turns = late_turns()
    turns.charges.add("flood", 1.0, 1e4)
    reader = ConnectionReader(staged := StagedConnection(), turns, "192.0.2.1")
    for tenant in tenants:
        reader.claim(None if tenant is None else Tenant(id=tenant))
    reader.receive(b"x")
    assert (reader.is_shared, staged.fed, turns.pauses) == (False, 0, 1)
    reader.close()


async def test_a_pause_counts_for_no_body_of_its_connection():
    turns = late_turns()
    turns.charges.add("flood", 1.0, 1e4)
    reader = ConnectionReader(StagedConnection(), turns, "192.0.2.1")
    reader.claim(Tenant(id="flood"))
    first, second, ended = (anyio.CancelScope(deadline=10.0) for _ in range(3))
    reader.watch_body(first)
    reader.watch_body(ended)()
    reader.receive(b"x")
    # One that begins to wait for its body during the pause, too.
    reader.watch_body(second)
    assert (ended.deadline, turns.pauses) == (10.0, 1)
    assert first.deadline == second.deadline > 11.0
    reader.run_turn(is_overdue=True)
    assert [first.deadline, second.deadline] == pytest.approx([10.0, 10.0], abs=0.5)
    reader.close()


async def test_a_wrong_key_on_a_tenants_connection_is_refused_above_the_share_of_all_unverified_clients():
    turns = late_turns()
    turns.charges.add(UNVERIFIED, 1.0, 1e4)
    reader = ConnectionReader(StagedConnection(), turns, "192.0.2.1")
    reader.claim(Tenant(id="quiet"))
    assert not reader.refuses()
    reader.claim(None)
    assert reader.refuses()
    reader.receive(b"x")
    assert turns.pauses == 0


async def test_a_connection_whose_turn_fails_is_closed_and_the_others_get_theirs(caplog):
    turns = late_turns()
    turns.charges.add("flood", 1.0, 0.1)
    stages = [StagedConnection(fails=number == 0) for number in range(3)]
    for staged in stages:
        reader = ConnectionReader(staged, turns, "192.0.2.1")
        reader.claim(Tenant(id="flood"))
        reader.receive(b"x")
    for _ in range(50):
        turns._round()  # noqa: SLF001 - the rounds are staged
    assert [staged.fed for staged in stages] == [1, 1, 1]
    assert [staged.transport.is_aborted for staged in stages] == [True, False, False]
    assert turns.paused_connections == turns.paused_bytes == 0
    assert "its turn failed" in caplog.text


async def test_connections_that_wait_in_order_take_turns_as_soon_as_there_are_turns():
    turns = ReadTurns()
    stages = [StagedConnection() for _ in range(3)]
    for staged in stages:
        reader = ConnectionReader(staged, turns, "192.0.2.1")
        reader.claim(Tenant(id="flood"))
        reader.receive(b"POST / HTTP/1.1\r\n\r\n" * 300)
    assert turns.paused_connections == 3
    turns._turns.observe_delay(1.0, turns.now() - 1.0)  # noqa: SLF001 - the delay of the loop is staged
    turns._observe(turns.now() - 1.0, -1.0)  # noqa: SLF001 - as the timer does
    assert turns.is_active
    assert len(turns._turns) == turns.paused_connections == 3  # noqa: SLF001 - they wait with their tenant
    turns.end()
