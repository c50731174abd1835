"""Read connections in turns while the event loop is late, so that tenants share its CPU time fairly.

`kpl_core.fairness.CpuTurns` decides. This module measures the delay of the loop and the CPU time of requests, and
pauses the reading of connections, so that TCP pushes back on their clients. Until the loop has a standing delay
nothing is measured for a request, and only the rest of pipelined requests waits.

- A connection belongs to the tenant of its last verified request. All connections without one are one flow, in which
  their peers' addresses take turns. A request that is not verified is charged to this flow, and refused above its
  share.
- A connection that has carried two verified tenants (a proxy's) is never paused. Requests above a share are refused,
  each before its body is decoded.
- A connection that has waited for the longest time gets its turn, and what begins in this turn is refused.
- Probes (`/livez`, `/readyz`, `/metrics`) do not wait, up to 200 a second. More of them wait as any other request.
- A pause stops the time limits of a head, a body and an idle connection. A client that has closed or reset its
  connection on both sides is noticed where the platform can tell (poll(2)).
- Of long pipelined requests only the first is answered at once, also without turns. The others wait for later
  iterations of the loop, so that none is long.
- All pauses end when the gateway drains.
"""

import asyncio
import logging
import re
import select
import time
from collections import deque
from collections.abc import Callable, Hashable
from functools import partial
from typing import Any, Final, Protocol

import anyio

from kpl_core.fairness import CpuTurns
from kpl_integrations.ingest.admission.clients import network_of
from kpl_integrations.ingest.http.cpu_charges import CpuCharges
from kpl_integrations.ingest.tenants import Tenant

_log: Final = logging.getLogger(__name__)

LONGEST_PAUSE_SECONDS: Final = 1.0
# Received bytes of all paused connections. Above this, a connection that would be paused is closed.
MOST_PAUSED_BYTES: Final = 32 * 1024 * 1024
_TICK_SECONDS: Final = 0.02
# The same after an iteration of the loop that took less time than this.
_CALM_TICK_SECONDS: Final = 0.1
_CALM_DELAY_SECONDS: Final = 0.002
_TICKS_BETWEEN_CHECKS: Final = 12
# The pieces into which pipelined requests are cut.
SLICE_BYTES: Final = 4_096
# One turn.
_TURN_SECONDS: Final = 0.001
_ROUND_SECONDS: Final = 0.005
# A body's time limit is moved by this at the start of a pause, and moved back by the rest at its end.
_MARGIN_SECONDS: Final = 2 * LONGEST_PAUSE_SECONDS
_MOST_PROBE_BYTES: Final = 4_096
# In one tick.
_MOST_PROBES: Final = 4
_PROBE: Final = re.compile(rb"(?:GET|HEAD) /(?:livez|readyz|metrics)[ ?]")
_CREDENTIALS: Final = re.compile(rb"\r\nauthorization:[ \t]*([^\r\n]+)", re.IGNORECASE)
_START: Final = b"POST /"
_END: Final = b"\r\n\r\n"
_NO_CREDENTIALS_YET: Final = object()


# The flow of all clients that are not verified: a tuple, so that it differs from every tenant's.
UNVERIFIED: Final[Hashable] = ("unverified",)


def is_probe(data: bytes) -> bool:
    """Return True if this is the head of one request for a probe (HTTP/1.1), and nothing else."""
    return (
        _PROBE.match(data) is not None and len(data) <= _MOST_PROBE_BYTES and data.find(_END) == len(data) - len(_END)
    )


def _slices(data: bytes) -> list[bytes]:
    """Cut pipelined requests, preferably where one begins: the rest of a request costs more than a whole one."""
    # The first request alone, so that a connection learns its head.
    start = max(data.find(_START, 1, SLICE_BYTES), 0)
    slices = [data[:start]] if start else []
    while start < len(data):
        end = start + SLICE_BYTES
        if end < len(data):
            found = data.rfind(_START, start + 1, end)
            end = end if found < 0 else found
        slices.append(data[start:end])
        start = end
    return slices


class PausableConnection(Protocol):
    """What a `ConnectionReader` needs of its connection."""

    transport: asyncio.Transport
    flow: Any

    def feed(self, data: bytes) -> None:
        """Parse received bytes, and answer the requests in them."""

    def may_be_cut(self, data: bytes) -> bool:
        """Return True if these may be many bytes of pipelined requests."""

    def takes_more(self) -> bool:
        """Return False if a request waits for the answer to another. `ConnectionReader.go_on` is called later."""

    def may_be_probe(self, data: bytes) -> bool:
        """Return True if these may be one request for a probe."""

    def stop_timers(self) -> None:
        """Stop the time limits of a head and of an idle connection."""

    def restart_timers(self) -> None:
        """Continue them with the time that was left."""

    def refuse_busy(self) -> None:
        """Answer 503 and close the connection."""


class ReadTurns:
    """The turns of all connections of one gateway. `pauses` counts from the start on."""

    def __init__(
        self,
        tenant_of: Callable[[str | None], Tenant | None] = lambda _: None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        # Returns the tenant whose valid credentials the value of an Authorization field has.
        self.tenant_of = tenant_of
        self.now = clock
        # Whether received bytes must go through `ConnectionReader.receive`: turns are taken, or no delay is measured.
        self.is_attentive = True
        self.pauses = 0
        self.paused_bytes = 0
        self._turns: CpuTurns[ConnectionReader] = CpuTurns(
            round_seconds=_ROUND_SECONDS, longest_wait_seconds=LONGEST_PAUSE_SECONDS
        )
        self.charges = CpuCharges(self._turns)
        self._is_ticking = self._has_round = self._has_ended = False
        self._due = self._used = 0.0
        self._requests: Callable[[], int] = int
        self._ticks, self._seen_requests = 0, -1
        self._probes_left = _MOST_PROBES
        # The paused connections while no turns are taken: in the order of their arrival.
        self._in_order: deque[ConnectionReader] = deque()

    @property
    def is_active(self) -> bool:
        """Whether connections take turns."""
        return self._turns.is_active

    @property
    def paused_connections(self) -> int:
        """Return how many connections are paused now."""
        return len(self._turns) + len(self._in_order)

    def wake(self, requests: Callable[[], int]) -> None:
        """Measure the delay of the loop as long as `requests`, a count, grows. Call this in the loop."""
        if not (self._is_ticking or self._has_ended):
            self._requests = requests
            self._is_ticking = True
            self._plan_tick(self.now(), _TICK_SECONDS)
            self._refresh()

    def may_run(self, flow: Hashable) -> bool:
        """Return True if this flow has used no more than its share of CPU time."""
        return not self._turns.is_active or self._turns.may_run(flow, self.now())

    def try_take_probe(self) -> bool:
        """Return True if a probe need not wait. A flood of probes has to."""
        self._probes_left -= 1
        return self._probes_left >= 0

    def wait(self, reader: "ConnectionReader") -> None:
        """Let a connection wait for its turn."""
        self.is_attentive = True
        if self._has_ended or not self._turns.is_active:
            self._in_order.append(reader)
        else:
            flow, weight = reader.owner
            part = reader.address if flow is UNVERIFIED else None
            self._turns.wait(reader, flow, self.now(), part=part, weight=weight)
        self._plan_round()

    def leave(self, reader: "ConnectionReader") -> None:
        """Forget a paused connection."""
        if not self._turns.leave(reader) and reader in self._in_order:
            self._in_order.remove(reader)

    def end(self) -> None:
        """End all pauses, and begin none from now on."""
        self._has_ended = True
        self._in_order.extend(self._turns.take_all())
        if self._in_order:
            self._plan_round()
        self._refresh()

    def _refresh(self) -> None:
        is_asleep = not (self._is_ticking or self._has_ended)
        self.is_attentive = self._turns.is_active or is_asleep or bool(self._in_order)

    def _plan_tick(self, now: float, seconds: float) -> None:
        self._due, self._used = now + seconds, time.thread_time()
        asyncio.get_running_loop().call_later(seconds, self._tick)

    def _tick(self) -> None:
        self._ticks += 1
        self._probes_left = _MOST_PROBES
        if self._turns.is_active:
            self._observe(self._due, self._used)
        else:
            # A timer may be due at the end of a long iteration of the loop. So a whole one is measured.
            asyncio.get_running_loop().call_soon(self._begin_iteration)

    def _begin_iteration(self) -> None:
        """Measure the next iteration: the loop runs what it is given now after it has read all connections."""
        asyncio.get_running_loop().call_soon(self._observe, self.now(), time.thread_time())

    def _observe(self, since: float, used: float) -> None:
        """Note how late the loop is: since the instant `since`, when the thread had used `used` seconds of CPU."""
        now = self.now()
        # A delay in which this thread did not run is the machine's, and no tenant's.
        delay = min(now - since, time.thread_time() - used)
        if not self._has_ended:
            self._turns.observe_delay(delay, now)
        while self._turns.is_active and self._in_order:
            self.wait(self._in_order.popleft())
        if len(self._turns) and not self._ticks % _TICKS_BETWEEN_CHECKS:
            self._abort_closed()
        is_calm = delay < _CALM_DELAY_SECONDS and not self._turns.is_active
        if is_calm:
            requests, before = self._requests(), self._seen_requests
            self._seen_requests = requests
            self._is_ticking = self._is_ticking and requests != before
        self._is_ticking = self._is_ticking and not self._has_ended
        if self._is_ticking:
            self._plan_tick(now, _CALM_TICK_SECONDS if is_calm else _TICK_SECONDS)
        self._refresh()

    def _plan_round(self) -> None:
        if not self._has_round:
            self._has_round = True
            asyncio.get_running_loop().call_soon(self._round)

    def _round(self) -> None:
        self._has_round = False
        now = self.now()
        until = now + _ROUND_SECONDS
        try:
            self._turns.begin_round(now)
            while (turn := self._turns.next_turn(self.now())) is not None:
                _run_turn(turn.item, is_overdue=turn.is_overdue)
            while self._in_order and self.now() < until:
                _run_turn(self._in_order.popleft(), is_overdue=False)
        finally:
            if self.paused_connections:
                self._plan_round()
            else:
                self._refresh()

    def _abort_closed(self) -> None:
        """Close the paused connections whose clients have closed them on both sides."""
        if not hasattr(select, "poll"):
            return
        readers = {}
        poll = select.poll()
        for reader in self._turns:
            sock = reader.connection.transport.get_extra_info("socket")
            if sock is not None and sock.fileno() >= 0:
                readers[sock.fileno()] = reader
                poll.register(sock.fileno(), 0)
        for descriptor, _ in poll.poll(0):
            readers[descriptor].connection.transport.abort()


def _run_turn(reader: "ConnectionReader", *, is_overdue: bool) -> None:
    """Run the turn of a connection. Close the connection if this fails, and let the others continue."""
    try:
        reader.run_turn(is_overdue=is_overdue)
    except Exception:  # noqa: BLE001 - an application's directory may raise anything
        _log.exception("a connection is closed, because its turn failed")
        reader.connection.transport.abort()


class ConnectionReader:
    """One connection: its tenant, and the received bytes that wait for its turn."""

    __slots__ = ("_body_timers", "_has_tenant", "_has_turn", "_is_known", "_is_stopped", "_paused", "_paused_at",
                 "address", "authorization", "connection", "flow", "is_refusing", "is_shared", "owner", "started",
                 "turns", "weight")  # fmt: skip

    def __init__(self, connection: PausableConnection, turns: ReadTurns, address: str) -> None:
        self.connection = connection
        self.turns = turns
        # The part of its flow to which the connection belongs.
        self.address = network_of(address) if ":" in address else address
        # The flow of the current request, which is charged, and that of the connection, which waits.
        self.flow: Hashable = UNVERIFIED
        self.weight = 1.0
        self.owner = self.flow, self.weight
        self._is_known = self._has_tenant = False
        self.is_shared = False
        # The credentials of the last request of the fast path, if `claim` has seen them.
        self.authorization: object = _NO_CREDENTIALS_YET
        self._paused: deque[bytes] | None = None
        self._paused_at = 0.0
        # While received bytes are fed: the time since which CPU time is not charged yet.
        self.started: float | None = None
        # Its kept bytes are no request's turn while one waits for the answer to another.
        self._is_stopped = False
        self.is_refusing = self._has_turn = False
        # HTTP/2 has several bodies at a time.
        self._body_timers: set[anyio.CancelScope] = set()

    def claim(self, tenant: Tenant | None) -> None:
        """Note the tenant of a request; None: it has no verified credentials."""
        flow: Hashable = UNVERIFIED if tenant is None else tenant.id
        if flow != self.flow:
            self.turns.charges.settle(self, time.thread_time())
        self.flow, self.weight = flow, 1.0 if tenant is None else tenant.weight
        self.authorization = _NO_CREDENTIALS_YET
        self._is_known = True
        if tenant is not None:
            self.is_shared = self.is_shared or (self._has_tenant and flow != self.owner[0])
            self._has_tenant = True
            self.owner = flow, self.weight

    @property
    def may_wait(self) -> bool:
        """Whether the request whose tenant was claimed last may wait for those of other connections.

        While connections take turns, one may that has waited for its turn. One that runs at once is of a tenant with
        little load: it would wait for a whole round.
        """
        return not self.turns.is_active or (self._has_turn and not self.is_refusing and not self._cannot_wait)

    @property
    def _cannot_wait(self) -> bool:
        return self.is_shared or self.flow != self.owner[0]

    def refuses(self) -> bool:
        """Return True if the request whose tenant was claimed last is above its tenant's share and cannot wait."""
        return self.is_refusing or (self._cannot_wait and not self.turns.may_run(self.flow))

    def receive(self, data: bytes) -> None:
        """Feed received bytes to the connection, or keep them until its turn."""
        if self._paused is not None:
            # A TLS transport may deliver what it has already decrypted.
            self._add(data)
            return
        if not self.turns.is_active:
            if not self.connection.may_be_cut(data):
                self.connection.feed(data)
            elif self._may_pause(data):
                self._run(deque((data,)), 0.0)
            return
        if not self._is_known:
            self._recognize(data)
        if self.is_shared:
            with self.turns.charges.fed(self):
                self.connection.feed(data)
        elif self.turns.may_run(self.owner[0]) or (self.connection.may_be_probe(data) and self.turns.try_take_probe()):
            self._run(deque((data,)), _ROUND_SECONDS)
        elif self._may_pause(data):
            self._pause(deque((data,)))

    def run_turn(self, *, is_overdue: bool) -> None:
        """Feed some of the kept bytes. Pause again if some are left, else resume reading."""
        pieces = self._end_pause()
        self.is_refusing = is_overdue and self._is_known
        self._has_turn = True
        try:
            self._run(pieces, 0.0 if is_overdue else _TURN_SECONDS)
        finally:
            self.is_refusing = self._has_turn = False

    def close(self) -> None:
        """Forget a lost connection and its kept bytes. It receives nothing any more."""
        if self._paused is not None:
            self.turns.leave(self)
            self.turns.paused_bytes -= sum(map(len, self._paused))
            self._paused = None
        del self.connection

    def watch_body(self, timer: anyio.CancelScope) -> Callable[[], object]:
        """Do not count pauses towards the deadline of `timer`, the time limit of a body, until the result is called."""
        self._body_timers.add(timer)
        if self._paused is not None:
            timer.deadline += _MARGIN_SECONDS
        return partial(self._body_timers.discard, timer)

    def _recognize(self, data: bytes) -> None:
        """Find the tenant of a new connection before its first request is parsed."""
        found = _CREDENTIALS.search(data, 0, _MOST_PROBE_BYTES)
        tenant = None if found is None else self.turns.tenant_of(found[1].decode("latin-1"))
        if tenant is not None:
            self.claim(tenant)

    def _may_pause(self, data: bytes) -> bool:
        """Close the connection and return False if the paused ones would have too many bytes."""
        has_room = self.turns.paused_bytes + len(data) <= MOST_PAUSED_BYTES
        if not has_room:
            self.connection.refuse_busy()
        return has_room

    def _run(self, pieces: deque[bytes], seconds: float) -> None:
        """Feed pieces for about so many seconds. Then pause if some are left."""
        now = self.turns.now
        until = now() + seconds
        with self.turns.charges.fed(self):
            while pieces:
                piece = pieces.popleft()
                if self.connection.may_be_cut(piece):
                    pieces.extendleft(reversed(_slices(piece)))
                    piece = pieces.popleft()
                self.connection.feed(piece)
                if self.connection.transport.is_closing():
                    pieces.clear()
                elif now() >= until or not self.connection.takes_more():
                    break
        if pieces:
            self._pause(pieces)
        else:
            self.connection.flow.release()

    def _pause(self, pieces: deque[bytes]) -> None:
        if not self.connection.flow.is_held:
            self.turns.pauses += 1
            self.connection.flow.hold()
        self._paused = pieces
        self._paused_at = self.turns.now()
        self.turns.paused_bytes += sum(map(len, pieces))
        self.connection.stop_timers()
        for timer in self._body_timers:
            timer.deadline += _MARGIN_SECONDS
        self._is_stopped = not self.connection.takes_more()
        if not self._is_stopped:
            self.turns.wait(self)

    def go_on(self) -> None:
        """Let the kept bytes wait for a turn: the request that waited for an answer has begun."""
        if self._is_stopped:
            self._is_stopped = False
            self.turns.wait(self)

    def _add(self, data: bytes) -> None:
        assert self._paused is not None  # noqa: S101 - the caller checked
        self._paused.append(data)
        self.turns.paused_bytes += len(data)

    def _end_pause(self) -> deque[bytes]:
        assert self._paused is not None  # noqa: S101 - it had a turn, so it waited
        pieces, self._paused = self._paused, None
        self.turns.paused_bytes -= sum(map(len, pieces))
        for timer in self._body_timers:
            timer.deadline -= _MARGIN_SECONDS - (self.turns.now() - self._paused_at)
        self.connection.restart_timers()
        return pieces
