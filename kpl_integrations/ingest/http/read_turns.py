"""Read connections in turns while the event loop is late, so that tenants share its CPU time fairly.

`kpl_core.fairness.CpuTurns` decides. This module measures the delay of the loop and the CPU time of requests, and
pauses the reading of connections, so that TCP pushes back on their clients. Until the loop has a standing delay
nothing is measured for a request, and nothing waits.

- A connection belongs to the tenant of its last verified request, or to its peer's address until there was one. A
  request that is not verified is charged to the address, and refused above the address's share.
- A connection that has carried two verified tenants (a proxy's) is never paused. Requests above a share are refused,
  each before its body is decoded.
- A connection that has waited for the longest time gets its turn, and what begins in this turn is refused.
- Probes (`/livez`, `/readyz`, `/metrics`) never wait.
- A pause stops the time limits of a head, a body and an idle connection. A client that has closed or reset its
  connection on both sides is noticed where the platform can tell (poll(2)).
- All pauses end when the gateway drains.
"""

import asyncio
import logging
import re
import select
import time
from collections import defaultdict, deque
from collections.abc import Callable, Coroutine, Generator, Hashable
from typing import Any, Final, Protocol

import anyio
from uvicorn.protocols.http.flow_control import FlowControl

from kpl_core.fairness import CpuTurns
from kpl_integrations.asgi.protocol import Receive, Scope, Send
from kpl_integrations.ingest.admission.senders import network_of
from kpl_integrations.ingest.tenants import Tenant

_log: Final = logging.getLogger(__name__)

LONGEST_PAUSE_SECONDS: Final = 1.0
# Received bytes of all paused connections. Above this, a connection that would be paused is closed.
MOST_PAUSED_BYTES: Final = 32 * 1024 * 1024
_TICK_SECONDS: Final = 0.02
# The same while the loop uses less than a quarter of the CPU time, so that its delay cannot stand.
_CALM_TICK_SECONDS: Final = 0.1
_CALM_SHARE: Final = 0.25
_TICKS_BETWEEN_CHECKS: Final = 12
# One turn, and the pieces into which pipelined requests are cut.
_TURN_SECONDS: Final = 0.001
_ROUND_SECONDS: Final = 0.005
_SLICE_BYTES: Final = 4_096
# A body's time limit is moved by this at the start of a pause, and moved back by the rest at its end.
_MARGIN_SECONDS: Final = 2 * LONGEST_PAUSE_SECONDS
_MOST_PROBE_BYTES: Final = 4_096
_PROBE: Final = re.compile(rb"(?:GET|HEAD) /(?:livez|readyz|metrics)[ ?]")
_CREDENTIALS: Final = re.compile(rb"\r\nauthorization:[ \t]*([^\r\n]+)", re.IGNORECASE)
_VERSION: Final = b" HTTP/1."
_START: Final = b"POST /"
_END: Final = b"\r\n\r\n"
_NO_CREDENTIALS_YET: Final = object()


def _flow_of(address: str) -> Hashable:
    """Return the flow of a client that is not verified: a tuple, so that it differs from every tenant's."""
    return ("address", network_of(address) if ":" in address else address)


def _slices(data: bytes) -> list[bytes]:
    """Cut pipelined requests, preferably where one begins: the rest of a request costs more than a whole one."""
    # The first request alone, so that a connection learns its head.
    start = max(data.find(_START, 1, _SLICE_BYTES), 0)
    slices = [data[:start]] if start else []
    while start < len(data):
        end = start + _SLICE_BYTES
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

    def is_between_requests(self) -> bool:
        """Return True if no request is being received or answered."""

    def stop_timers(self) -> None:
        """Stop the time limits of a head and of an idle connection."""

    def restart_timers(self) -> None:
        """Continue them with the time that was left."""

    def refuse_busy(self) -> None:
        """Answer 503 and close the connection."""


class CombinedFlow(FlowControl):
    """uvicorn's flow control with a second reason to pause: the transport reads only if both allow it."""

    def __init__(self, transport: asyncio.Transport) -> None:
        super().__init__(transport)
        self.is_held = False

    def pause_reading(self) -> None:
        """Pause for uvicorn."""
        if not self.read_paused:
            self.read_paused = True
            if not self.is_held:
                self._transport.pause_reading()

    def resume_reading(self) -> None:
        """Resume for uvicorn."""
        if self.read_paused:
            self.read_paused = False
            if not self.is_held:
                self._transport.resume_reading()

    def hold(self) -> None:
        """Pause for a turn."""
        if not self.is_held:
            self.is_held = True
            if not self.read_paused:
                self._transport.pause_reading()

    def release(self) -> None:
        """Resume after a turn."""
        if self.is_held:
            self.is_held = False
            if not self.read_paused:
                self._transport.resume_reading()


class ReadTurns:
    """The turns of all connections of one gateway. `pauses` and `cpu_seconds`, by tenant, count from the start on."""

    def __init__(
        self, tenant_of: Callable[[str], Tenant | None] = lambda _: None, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        # Returns the tenant whose valid credentials the value of an Authorization field has.
        self.tenant_of = tenant_of
        self.now = clock
        # Whether received bytes must go through `ConnectionReader.receive`: turns are taken, or no delay is measured.
        self.is_attentive = True
        self.pauses = 0
        self.paused_bytes = 0
        self.cpu_seconds: defaultdict[str, float] = defaultdict(float)
        self._turns: CpuTurns[ConnectionReader] = CpuTurns(
            round_seconds=_ROUND_SECONDS, longest_wait_seconds=LONGEST_PAUSE_SECONDS
        )
        self._is_ticking = self._has_round = self._has_ended = False
        self._due = self._used = 0.0
        self._spacing = _TICK_SECONDS
        self._requests: Callable[[], int] = int
        self._ticks, self._seen_requests = 0, -1
        # The paused connections while all pauses end.
        self._last: deque[ConnectionReader] = deque()

    @property
    def is_active(self) -> bool:
        """Whether connections take turns."""
        return self._turns.is_active

    @property
    def paused_connections(self) -> int:
        """Return how many connections are paused now."""
        return len(self._turns) + len(self._last)

    def wake(self, requests: Callable[[], int]) -> None:
        """Measure the delay of the loop as long as `requests`, a count, grows. Call this in the loop."""
        if not (self._is_ticking or self._has_ended):
            self._requests = requests
            self._is_ticking = True
            self._spacing = _TICK_SECONDS
            self._plan_tick(self.now())
            self._refresh()

    def may_run(self, flow: Hashable) -> bool:
        """Return True if this flow has used no more than its share of CPU time."""
        return not self._turns.is_active or self._turns.may_run(flow, self.now())

    def charge(self, flow: Hashable, weight: float, seconds: float) -> None:
        """Add CPU time that a request has used."""
        if self._turns.is_active:
            self._turns.charge(flow, seconds, weight=weight)
            if isinstance(flow, str):
                self.cpu_seconds[flow] += seconds

    def wait(self, reader: "ConnectionReader") -> None:
        """Let a connection wait for its turn."""
        if self._has_ended:
            self._last.append(reader)
        else:
            flow, weight = reader.owner
            self._turns.wait(reader, flow, self.now(), weight=weight)
        self._plan_round()

    def leave(self, reader: "ConnectionReader") -> None:
        """Forget a paused connection."""
        if not self._turns.leave(reader) and reader in self._last:
            self._last.remove(reader)

    def end(self) -> None:
        """End all pauses, and begin none from now on."""
        self._has_ended = True
        self._last.extend(self._turns.take_all())
        if self._last:
            self._plan_round()
        self._refresh()

    def _refresh(self) -> None:
        is_asleep = not (self._is_ticking or self._has_ended)
        self.is_attentive = self._turns.is_active or is_asleep or bool(self._last)

    def _plan_tick(self, now: float) -> None:
        self._due = now + self._spacing
        asyncio.get_running_loop().call_later(self._spacing, self._tick)

    def _tick(self) -> None:
        now, used = self.now(), time.thread_time()
        self._ticks += 1
        if not self._has_ended:
            # A delay in which this thread did not run is the machine's, and no tenant's.
            self._turns.observe_delay(min(now - self._due, used - self._used), now)
        is_calm = used - self._used < _CALM_SHARE * (now - self._due + self._spacing) and not self._turns.is_active
        self._used, self._spacing = used, _CALM_TICK_SECONDS if is_calm else _TICK_SECONDS
        if len(self._turns) and not self._ticks % _TICKS_BETWEEN_CHECKS:
            self._abort_closed()
        if is_calm:
            requests, before = self._requests(), self._seen_requests
            self._seen_requests = requests
            self._is_ticking = requests != before
        if self._has_ended:
            self._is_ticking = False
        if self._is_ticking:
            self._plan_tick(now)
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
            while self._last and self.now() < until:
                _run_turn(self._last.popleft(), is_overdue=False)
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

    __slots__ = ("_address", "_body_timer", "_has_tenant", "_is_known", "_is_refusing", "_paused", "_paused_at",
                 "_started", "authorization", "connection", "flow", "is_shared", "owner", "turns",
                 "weight")  # fmt: skip

    def __init__(self, connection: PausableConnection, turns: ReadTurns, address: str) -> None:
        self.connection = connection
        self.turns = turns
        self._address = address
        # The flow of the current request, which is charged, and that of the connection, which waits.
        self.flow: Hashable = _flow_of(address)
        self.weight = 1.0
        self.owner = self.flow, self.weight
        self._is_known = self._has_tenant = False
        self.is_shared = False
        # The credentials of the last request of the fast path, if `claim` has seen them.
        self.authorization: object = _NO_CREDENTIALS_YET
        self._paused: deque[bytes] | None = None
        self._paused_at = 0.0
        # While received bytes are fed: the time since which CPU time is not charged yet.
        self._started: float | None = None
        self._is_refusing = False
        self._body_timer: anyio.CancelScope | None = None

    def claim(self, tenant: Tenant | None) -> None:
        """Note the tenant of a request; None: it has no verified credentials."""
        flow = _flow_of(self._address) if tenant is None else tenant.id
        if flow != self.flow:
            self._settle()
        self.flow, self.weight = flow, 1.0 if tenant is None else tenant.weight
        self.authorization = _NO_CREDENTIALS_YET
        self._is_known = True
        if tenant is not None:
            self.is_shared = self.is_shared or (self._has_tenant and flow != self.owner[0])
            self._has_tenant = True
            self.owner = flow, self.weight

    def refuses(self) -> bool:
        """Return True if the request whose tenant was claimed last is above its tenant's share and cannot wait."""
        cannot_wait = self.is_shared or self.flow != self.owner[0]
        return self._is_refusing or (cannot_wait and not self.turns.may_run(self.flow))

    def receive(self, data: bytes) -> None:
        """Feed received bytes to the connection, or keep them until its turn."""
        if self._paused is not None:
            # A TLS transport may deliver what it has already decrypted.
            self._add(data)
            return
        if not self.turns.is_active:
            self.connection.feed(data)
            return
        if not self._is_known:
            self._recognize(data)
        if self.is_shared:
            self._started = time.thread_time()
            try:
                self.connection.feed(data)
            finally:
                self._settle(is_last=True)
        elif self.turns.may_run(self.owner[0]) or self._is_probe(data):
            self._run(deque((data,)), _ROUND_SECONDS)
        elif self.turns.paused_bytes + len(data) > MOST_PAUSED_BYTES:
            self.connection.refuse_busy()
        else:
            self._pause(deque((data,)))

    def run_turn(self, *, is_overdue: bool) -> None:
        """Feed some of the kept bytes. Pause again if some are left, else resume reading."""
        pieces = self._end_pause()
        self._is_refusing = is_overdue and self._is_known
        try:
            self._run(pieces, 0.0 if is_overdue else _TURN_SECONDS)
        finally:
            self._is_refusing = False

    def close(self) -> None:
        """Forget the kept bytes of a lost connection."""
        if self._paused is not None:
            self.turns.leave(self)
            self.turns.paused_bytes -= sum(map(len, self._paused))
            self._paused = None

    def watch_body(self, timer: anyio.CancelScope | None) -> None:
        """Do not count pauses towards the deadline of `timer`, the time limit of the current body."""
        self._body_timer = timer
        if timer is not None and self._paused is not None:
            timer.deadline += _MARGIN_SECONDS

    def timed(self, application: Any) -> "TimedRequest":  # noqa: ANN401 - an ASGI application
        """Return the application for the request that begins now."""
        return TimedRequest(self, application, is_refused=self._is_refusing)

    def _recognize(self, data: bytes) -> None:
        """Find the tenant of a new connection before its first request is parsed."""
        found = _CREDENTIALS.search(data, 0, _MOST_PROBE_BYTES)
        tenant = None if found is None else self.turns.tenant_of(found[1].decode("latin-1"))
        if tenant is not None:
            self.claim(tenant)

    def _is_probe(self, data: bytes) -> bool:
        return (
            _PROBE.match(data) is not None
            and len(data) <= _MOST_PROBE_BYTES
            and data.find(_END) == len(data) - len(_END)
            and self.connection.is_between_requests()
        )

    def _run(self, pieces: deque[bytes], seconds: float) -> None:
        """Feed pieces for about so many seconds. Then pause if some are left."""
        now = self.turns.now
        until = now() + seconds
        self._started = time.thread_time()
        try:
            while pieces:
                piece = pieces.popleft()
                if len(piece) > _SLICE_BYTES and piece.count(_VERSION) > 1:
                    pieces.extendleft(reversed(_slices(piece)))
                    piece = pieces.popleft()
                self.connection.feed(piece)
                if self.connection.transport.is_closing():
                    pieces.clear()
                elif now() >= until:
                    break
        finally:
            self._settle(is_last=True)
        if pieces:
            self._pause(pieces)
        else:
            self.connection.flow.release()

    def _settle(self, *, is_last: bool = False) -> None:
        """Charge the time since bytes were fed, or since the last call, to the flow."""
        if self._started is not None:
            now = time.thread_time()
            self.turns.charge(self.flow, self.weight, now - self._started)
            self._started = None if is_last else now

    def _pause(self, pieces: deque[bytes]) -> None:
        if not self.connection.flow.is_held:
            self.turns.pauses += 1
            self.connection.flow.hold()
        self._paused = pieces
        self._paused_at = self.turns.now()
        self.turns.paused_bytes += sum(map(len, pieces))
        self.connection.stop_timers()
        if self._body_timer is not None:
            self._body_timer.deadline += _MARGIN_SECONDS
        self.turns.wait(self)

    def _add(self, data: bytes) -> None:
        assert self._paused is not None  # noqa: S101 - the caller checked
        self._paused.append(data)
        self.turns.paused_bytes += len(data)

    def _end_pause(self) -> deque[bytes]:
        assert self._paused is not None  # noqa: S101 - it had a turn, so it waited
        pieces, self._paused = self._paused, None
        self.turns.paused_bytes -= sum(map(len, pieces))
        if self._body_timer is not None:
            self._body_timer.deadline -= _MARGIN_SECONDS - (self.turns.now() - self._paused_at)
        self.connection.restart_timers()
        return pieces


class TimedRequest:
    """An ASGI application for one request. It charges the CPU time of the request's task to its tenant."""

    def __init__(self, reader: ConnectionReader, application: Any, *, is_refused: bool) -> None:  # noqa: ANN401 - ASGI
        self._reader = reader
        self._application = application
        self._is_refused = is_refused
        self._flow, self._weight = reader.flow, reader.weight

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Call the application."""
        await _TimedSteps(self._application(scope, receive, send), self._charge)

    def claim(self, tenant: Tenant | None) -> bool:
        """Note the tenant. Return False if the request is to be refused."""
        self._reader.claim(tenant)
        self._flow, self._weight = self._reader.flow, self._reader.weight
        return not (self._is_refused or self._reader.refuses())

    def _charge(self, started: float) -> None:
        turns = self._reader.turns
        turns.charge(self._flow, self._weight, time.thread_time() - started)


class _TimedSteps:
    """A coroutine whose steps, from one wait to the next, are timed."""

    __slots__ = ("_charge", "_coroutine")

    def __init__(self, coroutine: Coroutine[Any, Any, None], charge: Callable[[float], None]) -> None:
        self._coroutine = coroutine
        self._charge = charge

    def __await__(self) -> Generator[Any, Any, None]:
        step: Callable[[Any], Any] = self._coroutine.send
        value: Any = None
        while True:
            started = time.thread_time()
            try:
                waits_for = step(value)
            except StopIteration:
                return
            finally:
                self._charge(started)
            try:
                value = yield waits_for
                step = self._coroutine.send
            except GeneratorExit:
                self._coroutine.close()
                raise
            except BaseException as error:  # noqa: BLE001 - every exception belongs to the coroutine
                value, step = error, self._coroutine.throw
