"""An event loop that still connects while the interpreter exits, when the last lines and spans leave.

From Python 3.9 on asyncio's executor refuses work by then; and its threads are joined at exit, however long
a name server takes. From Python 3.12 on no thread at all can be started so late. So there is no executor: the
loop is its thread's own, and what aiobotocore hands over to one (a service's model, a TLS context) takes
milliseconds in place.
"""

import asyncio
import contextlib
import socket
import threading
from collections.abc import Callable
from concurrent.futures import Executor
from typing import Any, TypeVar, TypeVarTuple, Unpack

__all__ = ["ExitSafeLoop"]

Addresses = list[Any]
Result = TypeVar("Result")
Arguments = TypeVarTuple("Arguments")


class ExitSafeLoop(asyncio.SelectorEventLoop):
    """A selector loop for a thread of one's own: `run_in_executor` runs in place, `getaddrinfo` in a daemon thread."""

    def entering_thread(self) -> None:
        """Take note, in the thread that resolves, that it begins."""

    def leaving_thread(self) -> None:
        """Take note, in the thread that resolves, that it ends."""

    def run_in_executor(
        self, executor: Executor | None, func: Callable[[Unpack[Arguments]], Result], *args: *Arguments
    ) -> "asyncio.Future[Result]":
        """Run it now, unless an executor is named; `asyncio.to_thread` names none."""
        if executor is not None:
            return super().run_in_executor(executor, func, *args)
        answer: asyncio.Future[Result] = self.create_future()
        try:
            answer.set_result(func(*args))
        except Exception as error:  # noqa: BLE001 - raised where the future is awaited
            answer.set_exception(error)
        return answer

    async def getaddrinfo(
        self,
        host: bytes | str | None,
        port: bytes | str | int | None,
        *,
        family: int = 0,
        type: int = 0,  # noqa: A002 - the socket module's word
        proto: int = 0,
        flags: int = 0,
    ) -> Addresses:
        """Resolve a name; raises OSError as `socket.getaddrinfo` does."""
        answer: asyncio.Future[Addresses] = self.create_future()

        def resolve() -> None:
            self.entering_thread()
            try:
                found = socket.getaddrinfo(host, port, family, type, proto, flags)
                self._tell(lambda: None if answer.done() else answer.set_result(found))
            except (OSError, UnicodeError) as error:
                failure = error
                self._tell(lambda: None if answer.done() else answer.set_exception(failure))
            finally:
                self.leaving_thread()

        try:
            threading.Thread(target=resolve, name="kpl-resolver", daemon=True).start()
        except RuntimeError:
            # So late in the life of the process nothing else waits for this loop.
            return socket.getaddrinfo(host, port, family, type, proto, flags)
        return await answer

    def _tell(self, callback: Callable[[], object]) -> None:
        # A loop that is closed has nobody left who waits.
        with contextlib.suppress(RuntimeError):
            self.call_soon_threadsafe(callback)
