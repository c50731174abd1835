"""Charge the CPU time of a request's task to its tenant, while tenants take turns (`read_turns.py`)."""

import time
from collections.abc import Callable, Coroutine, Generator
from typing import Any

from kpl_integrations.asgi.protocol import Receive, Scope, Send
from kpl_integrations.ingest.http.read_turns import ConnectionReader
from kpl_integrations.ingest.tenants import Tenant


class ChargedRequest:
    """An ASGI application for one request. It charges the CPU time of the request's task to its tenant."""

    def __init__(
        self,
        reader: ConnectionReader,
        application: Any,  # noqa: ANN401 - an ASGI application
        note: Callable[[Tenant | None], object],
    ) -> None:
        self._reader = reader
        self._note = note
        self._application = application
        self._is_refused = reader.is_refusing
        self._flow, self._weight = reader.flow, reader.weight

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Call the application."""
        await _TimedSteps(self._application(scope, receive, send), self._charge)

    def claim(self, tenant: Tenant | None) -> bool:
        """Note the tenant. Return False if the request is to be refused."""
        self._note(tenant)
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
