"""Charge CPU time to tenants while connections take turns (`read_turns.py`).

Three pieces of work are charged, each to the tenant of its connection: received bytes that are fed to it (`fed`), the
put of a group of requests (`charged`), and the task of a request (`ChargedRequest`).
"""

import time
from collections import defaultdict
from collections.abc import Callable, Coroutine, Generator, Hashable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

from kpl_core.fairness import CpuTurns
from kpl_integrations.asgi.protocol import Receive, Scope, Send
from kpl_integrations.ingest.tenants import Tenant


class ChargedConnection(Protocol):
    """What is charged for a connection: the flow and the weight of its current request."""

    flow: Hashable
    weight: float
    started: float | None
    """While received bytes are fed: the time since which CPU time is not charged yet."""
    is_refusing: bool

    def refuses(self) -> bool:
        """Return True if the request whose tenant was claimed last is above its tenant's share and cannot wait."""


class CpuCharges:
    """The CPU time of one gateway's requests, in `cpu_seconds` by tenant, from the start on."""

    def __init__(self, turns: CpuTurns[Any]) -> None:
        self._turns = turns
        self.cpu_seconds: defaultdict[str, float] = defaultdict(float)
        # The connection whose received bytes are being fed.
        self._running: ChargedConnection | None = None

    def add(self, flow: Hashable, weight: float, seconds: float) -> None:
        """Add CPU time that a request has used."""
        if self._turns.is_active:
            self._turns.charge(flow, seconds, weight=weight)
            if isinstance(flow, str):
                self.cpu_seconds[flow] += seconds

    @contextmanager
    def fed(self, connection: ChargedConnection) -> Iterator[None]:
        """Charge the CPU time of this block to a connection, whose tenant may change meanwhile."""
        before, self._running = self._running, connection
        connection.started = time.thread_time()
        try:
            yield
        finally:
            self.settle(connection, time.thread_time())
            connection.started = None
            self._running = before

    def settle(self, connection: ChargedConnection, now: float) -> None:
        """Charge the CPU time of the thread until `now`, if the connection's bytes are being fed."""
        if connection.started is not None:
            self.add(connection.flow, connection.weight, now - connection.started)
            connection.started = now

    @contextmanager
    def charged(self, connection: ChargedConnection) -> Iterator[None]:
        """Charge the CPU time of this block to the tenant of a connection, and not to that of the one being fed."""
        running, started = self._running, time.thread_time()
        if running is not None:
            self.settle(running, started)
        try:
            yield
        finally:
            now = time.thread_time()
            self.add(connection.flow, connection.weight, now - started)
            if running is not None:
                running.started = now


class ChargedRequest:
    """An ASGI application for one request. It charges the CPU time of the request's task to its tenant."""

    def __init__(
        self,
        charges: CpuCharges,
        connection: ChargedConnection,
        application: Any,  # noqa: ANN401 - an ASGI application
        note: Callable[[Tenant | None], object],
    ) -> None:
        self._charges = charges
        self._connection = connection
        self._note = note
        self._application = application
        self._is_refused = connection.is_refusing
        self._flow, self._weight = connection.flow, connection.weight

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Call the application."""
        await _TimedSteps(self._application(scope, receive, send), self._charge)

    def claim(self, tenant: Tenant | None) -> bool:
        """Note the tenant. Return False if the request is to be refused."""
        self._note(tenant)
        self._flow, self._weight = self._connection.flow, self._connection.weight
        return not (self._is_refused or self._connection.refuses())

    def _charge(self, started: float) -> None:
        self._charges.add(self._flow, self._weight, time.thread_time() - started)


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
