"""The policy "leases" for the rates of a session limiter: the leases of the producers, with two rates of one resource.

A worker reports the units that its calls ask for, refused calls included, and the calls that the table refused. It gets
a part of both rates. See `kpl_core.coordination.lease_table`.
"""

import asyncio
import contextlib
import os
import threading
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import Any, Final

import anyio
import anyio.to_thread

from kpl_core import CoordinationOptions
from kpl_core.coordination import CoordinationStore, Usage
from kpl_core.coordination.worker import CoordinationWorker
from kpl_integrations.dynamodb_limits.proportional import Rates
from kpl_integrations.dynamodb_limits.session_limiter import SessionLimiter

_Call = Callable[..., Awaitable[Mapping[str, Any]]]
_RESOURCE: Final = "dynamodb/capacity"


def leased_worker(
    limiter: SessionLimiter,
    store: CoordinationStore,
    options: CoordinationOptions,
    *,
    total: Rates,
    worker_max: Rates,
    clock: Callable[[], float],
    wall_clock: Callable[[], float],
    chance: Callable[[], float],
) -> CoordinationWorker:
    """Return a worker that keeps a limiter within its leases of the `total` read and write units a second."""

    def usages() -> Mapping[str, Usage]:
        offered, waiting = limiter.demand()
        # At its own maximum a worker could not use more of the total.
        reads, writes = (
            0.0 if rate >= most else units for rate, most, units in zip(limiter.rates, worker_max, waiting, strict=True)
        )
        return {
            _RESOURCE: Usage(total, offered, (reads, writes), float(limiter.call_count), float(limiter.refused_count))
        }

    def apply_shares(shares: Mapping[str, Rates]) -> None:
        reads, writes = shares[_RESOURCE]
        limiter.set_rates(min(reads, worker_max[0]), min(writes, worker_max[1]))

    worker = CoordinationWorker(
        store,
        options,
        usages=usages,
        apply_shares=apply_shares,
        clock=clock,
        wall_clock=wall_clock,
        chance=chance,
    )
    apply_shares({_RESOURCE: worker.share(_RESOURCE, total)})
    return worker


class LeaseThread:
    """Runs a worker on an event loop in a daemon thread."""

    def __init__(self, worker: CoordinationWorker, limiter: SessionLimiter) -> None:
        self._worker = worker
        self._limiter = limiter
        self._thread: threading.Thread | None = None
        self._process_id = os.getpid()

    def start(self) -> None:
        """Start the thread if it does not run; works again after `stop`."""
        if self._thread is None:
            running = threading.Event()
            self._process_id = os.getpid()
            self._thread = threading.Thread(
                target=anyio.run, args=(self._run, running), name="kpl-rate-worker", daemon=True
            )
            self._thread.start()
            while not running.wait(0.1):
                if not self._thread.is_alive():
                    message = "the thread that shares the rates could not start its event loop; the log says why"
                    raise RuntimeError(message)

    def stop(self) -> None:
        """End the thread, and give the leases back. The limiter keeps the rate of a newcomer."""
        thread, self._thread = self._thread, None
        if thread is not None:
            # The loop may have ended by an error.
            with contextlib.suppress(RuntimeError):
                self._loop.call_soon_threadsafe(self._stopping.set)
            thread.join()

    async def _run(self, running: threading.Event) -> None:
        self._loop, self._stopping = asyncio.get_running_loop(), anyio.Event()
        self._limiter.on_waiting = self._call_waits
        running.set()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._worker.run)
            await self._stopping.wait()
            tasks.cancel_scope.cancel()
        self._limiter.on_waiting = lambda: None
        await self._worker.leave()

    def _call_waits(self) -> None:
        if self._process_id != os.getpid():
            # A fork has no such thread.
            return
        try:
            self._loop.call_soon_threadsafe(self._worker.units_wait)
        except RuntimeError:
            # The loop has just been closed.
            return


class ThreadedS3Client:
    """The calls of `S3StoreClient` with a boto3 client, each in a thread."""

    def __init__(self, client: Any) -> None:  # noqa: ANN401 - boto3 brings no types of its own
        self._client = client
        self.put_object: _Call = partial(self._call, "put_object")
        self.delete_object: _Call = partial(self._call, "delete_object")
        self.list_objects_v2: _Call = partial(self._call, "list_objects_v2")
        self.get_object: _Call = self._get_object

    async def _get_object(self, **options: Any) -> Mapping[str, Any]:  # noqa: ANN401
        """Return the answer, with a body that is read already."""
        answer = await self._call("get_object", **options)
        body = await anyio.to_thread.run_sync(answer["Body"].read, abandon_on_cancel=True)
        return {**answer, "Body": _ReadBody(body)}

    async def _call(self, name: str, **options: Any) -> Mapping[str, Any]:  # noqa: ANN401
        call = partial(getattr(self._client, name), **options)
        answer: Mapping[str, Any] = await anyio.to_thread.run_sync(call, abandon_on_cancel=True)
        return answer


class _ReadBody:
    def __init__(self, body: bytes) -> None:
        self._body = body

    async def read(self) -> bytes:
        return self._body
