"""The embedded Kinesis for synchronous code: the same server on a loop and thread of its own."""

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Self, TypeVar

from kpl_core.testing import FakeKinesis
from kpl_integrations.local_kinesis.server import LocalKinesis

__all__ = ["ThreadedLocalKinesis"]

_Result = TypeVar("_Result")


class ThreadedLocalKinesis:
    """Runs a LocalKinesis from `with` to the end of its block.

        with ThreadedLocalKinesis(LocalKinesis({"orders": 2})) as kinesis:
            client = boto3.client("kinesis", endpoint_url=kinesis.endpoint_url, ...)

    Its state belongs to the server's thread: `call` runs a function of it there.
    """

    def __init__(self, server: LocalKinesis | None = None) -> None:
        self._server = server or LocalKinesis()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._endpoint_url = ""

    @property
    def endpoint_url(self) -> str:
        """Return where it listens."""
        return self._endpoint_url

    def __enter__(self) -> Self:
        """Start it; OSError if its port is taken, KinesisError if a stream cannot be made, or what else fails."""
        started: Future[str] = Future()
        self._thread = threading.Thread(
            target=lambda: asyncio.run(self._run(started)), name="local-kinesis", daemon=True
        )
        self._thread.start()
        self._endpoint_url = started.result()
        return self

    def __exit__(self, *_exc_info: object) -> None:
        loop, self._loop = self._loop, None
        thread, self._thread = self._thread, None
        if loop is not None and thread is not None:
            loop.call_soon_threadsafe(self._left.set)
            thread.join()

    def call(self, function: Callable[[FakeKinesis, float], _Result]) -> _Result:
        """Run `function(fake, now)` between two requests and return its result."""
        if self._loop is None:
            message = "the server is not running; use it inside its `with` block"
            raise RuntimeError(message)

        async def called() -> _Result:
            return function(self._server.fake, self._server.now)

        return asyncio.run_coroutine_threadsafe(called(), self._loop).result()

    async def _run(self, started: "Future[str]") -> None:
        self._left = asyncio.Event()
        try:
            await self._server.__aenter__()
        except Exception as error:  # noqa: BLE001 - raised again in the thread that entered, which waits for an answer
            started.set_exception(error)
            return
        self._loop = asyncio.get_running_loop()
        started.set_result(self._server.endpoint_url)
        await self._left.wait()
        # Here, and not by whoever leaves the block: the loop ends with this coroutine.
        await self._server.aclose()
