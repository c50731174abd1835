"""The handle of one user record, awaitable on asyncio and trio.

A delivery that no task awaits costs nothing more. A task that awaits one early waits for the Kinesis record in which
the user record travels, and looks again when that record is final or when its user records move to other ones.
`add_done_callback` calls a function of the caller. `call_when_finished` is the product's own, cheaper form of it: it
calls in the middle of the pipeline's work.
"""

import asyncio
import contextlib
import logging
import math
import threading
from array import array
from asyncio import _get_running_loop
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence, Set as AbstractSet
from contextvars import copy_context
from functools import partial
from itertools import chain
from time import monotonic
from typing import Any, Final, Self, overload

import anyio
import anyio.lowlevel
import msgspec

from kpl_core.errors import NotSpooled, ResultPending, WrongEventLoop
from kpl_core.event_loop import run_soon
from kpl_core.pipeline.open_record import await_method
from kpl_core.records.outcome import Outcome, ResultHandle, ResultHandles, Waiter
from kpl_core.records.record_result import NOT_SPOOLED, RecordResult

_logger: Final = logging.getLogger("kpl_core")
# So many results that are known are read within 4 ms.
_RESULTS_PER_CHECKPOINT: Final = 50_000


# Compared and hashed by identity: `asyncio.gather` and `wait` keep what they are given in sets and dicts.
class Delivery(ResultHandle, gc=False, eq=False):
    """What `put` returns: `await` it, any number of times, for the `RecordResult`."""

    def result(self) -> RecordResult:
        """Return the result.

        Raises:
            ResultPending: it is not known yet.
        """
        result = self.peek()
        if result is None:
            message = "this user record has no result yet; await the delivery, or flush the producer first"
            raise ResultPending(message)
        return result

    def wait(self, timeout: float | None = None) -> RecordResult:
        """Wait in this thread for the result, up to `timeout` seconds (None: forever).

        Raises:
            TimeoutError: the result is not known yet.
            WrongEventLoop: an event loop runs in this thread; await the delivery there.
        """
        if _get_running_loop() is not None:
            message = "this call blocks its thread, in which an event loop runs; await the delivery instead"
            raise WrongEventLoop(message)
        if not wait_for_result(self, timeout):
            message = f"this user record has no result after {timeout} s; wait longer, or flush the producer"
            raise TimeoutError(message)
        return self.result()

    def add_done_callback(self, function: Callable[["Delivery"], object]) -> None:
        """Call `function(delivery)` once, when the result is known.

        If it is known already, the call happens now, in this thread. Otherwise it happens in the producer's event loop,
        soon after the result: on asyncio in one order with the tasks that await the delivery, first come, first served;
        on trio the order is undefined. The function sees the context variables of this call. An exception that it
        raises is logged. Thread-safe.
        """
        call_when_done(self, partial(function, self))

    @await_method
    def __await__(self) -> Generator[Any, Any, RecordResult]:
        """Wait for the result. A failed put is a value too, never an exception."""
        if self.outcome.batch_runner is not None:
            put_batch_of(self)
        current = self.outcome
        while not current.settled or current.moved is not None:
            current = self.follow()
            if current.settled:
                break
            alarm = _alarm()
            waiters = wait_with(current, alarm)
            try:
                # The producer's loop may run in another thread. So look again whether the outcome is settled, and
                # whether the user record has moved on: that wakes only the waiters that were there before.
                stays = self.outcome is current and (current.moved is None or self.follow() is current)
                if stays and current.waiters is waiters and not current.settled:
                    yield from alarm.wait().__await__()
            finally:
                if not alarm.is_set():
                    # Cancelled. The list belongs to the outcome, which may live much longer.
                    waiters.remove(alarm)
        result = current.shared_result
        return current.result_of(self.index) if result is None else result


class Deliveries(ResultHandles, Sequence[Delivery]):
    """What `put_many` returns: a delivery for each record, made when it is asked for.

    So each access makes a new `Delivery` of the same result: keep it if it is a key or has to be found again. A program
    that puts many records asks for `failures` or `results`, which costs a fifth of an `await` for each delivery.
    """

    __slots__ = ()
    # Deliveries are compared by identity, so these could only find nothing.
    __contains__ = index = count = None  # type: ignore[assignment]

    @classmethod
    def of(cls, handles: Sequence[ResultHandle]) -> Self:
        """Return these deliveries."""
        made = cls(len(handles))
        made.set_all(0, handles)
        return made

    def __len__(self) -> int:
        return len(self.places) // 2

    @overload
    def __getitem__(self, position: int) -> Delivery: ...
    @overload
    def __getitem__(self, position: slice) -> "Deliveries": ...
    def __getitem__(self, position: int | slice) -> "Delivery | Deliveries":
        if isinstance(position, slice):
            numbers, indices = self.places[::2][position], self.places[1::2][position]
            used = {number: place for place, number in enumerate(dict.fromkeys(numbers))}
            part = Deliveries(0)
            part.outcomes = [self.outcomes[number] for number in used]
            part.places = array("I", chain.from_iterable(zip(map(used.__getitem__, numbers), indices, strict=True)))
            return part
        at = 2 * range(len(self))[position]
        return Delivery(self.outcomes[self.places[at]], self.places[at + 1])

    def __iter__(self) -> Iterator[Delivery]:
        return map(Delivery, map(self.outcomes.__getitem__, self.places[::2]), self.places[1::2])

    def __repr__(self) -> str:
        return f"<Deliveries of {len(self)} user records>"

    def known_results(self) -> list[RecordResult] | None:
        """Return the results in the order of the records, None while one is not known."""
        made: list[RecordResult] = []
        for outcome in self.outcomes:
            if not outcome.settled or outcome.moved is not None or outcome.histories is not None:
                results = [delivery.peek() for delivery in self]
                return None if None in results else results  # type: ignore[return-value] # none is None
            made.append(outcome.result_of(0))
        return [made[number] for number in self.places[::2]]

    def known_failures(self) -> dict[int, RecordResult]:
        """Return the results of failed puts, all of which are known, by the position of their records."""
        if all(each.moved is None and each.sequence_number is not None for each in self.outcomes):
            return {}
        results = self.known_results()
        assert results is not None  # noqa: S101 - the caller has waited
        return {position: result for position, result in enumerate(results) if not result.successful}

    def open_outcomes(self) -> list[Outcome]:
        """Return the outcomes that these records wait for, each once."""
        waiting: dict[Outcome, None] = {}
        for outcome in self.outcomes:
            if outcome.moved is not None:
                current = dict.fromkeys([delivery.follow() for delivery in self])
                return [each for each in current if not each.settled]
            if not outcome.settled:
                waiting[outcome] = None
        return [*waiting]

    async def results(self) -> list[RecordResult]:
        """Wait for all results; return them in the order of the records. A failed put is a value too."""
        results: list[RecordResult] = []
        for position, number in enumerate(self.places[::2]):
            if position % _RESULTS_PER_CHECKPOINT == 0:
                await anyio.lowlevel.checkpoint()
            # Most user records share the result of their Kinesis record. The first of them waits for it.
            outcome = self.outcomes[number]
            result = outcome.shared_result
            is_own = result is None or outcome.moved is not None
            results.append(await self[position] if is_own else result)  # type: ignore[arg-type] # not None
        return results

    async def failures(self) -> dict[int, RecordResult]:
        """Wait for all results; return those of failed puts, by the position of their records.

        User records that share a Kinesis record are looked at together, so this costs a quarter of `results`.
        """
        await anyio.lowlevel.checkpoint()
        for number, outcome in enumerate(self.outcomes):
            if not outcome.settled and outcome.moved is None:
                await self[self.places[::2].index(number)]
            if outcome.moved is not None:
                # Some of its user records are elsewhere now, so all are looked at.
                await self.results()
                break
        return self.known_failures()

    async def all_successful(self) -> bool:
        """Wait for all results; return True if no put failed."""
        return not await self.failures()


def each_alone(deliveries: Deliveries) -> Iterator[Deliveries]:
    """Return the deliveries of each record apart, for callers that each wait for one."""
    for number, index in zip(deliveries.places[::2], deliveries.places[1::2], strict=True):
        alone = Deliveries(0)
        alone.outcomes.append(deliveries.outcomes[number])
        alone.places.extend((0, index))
        yield alone


def put_batch_of(handle: ResultHandle) -> None:
    """Put the batch in which a user record waits, if it does, before something waits for it.

    Later the outcome of the whole batch would move, and so wake all that wait for any of its records.
    """
    # No variable here refers to the outcome: only where nothing but its deliveries does is it replaced in place.
    reference = handle.outcome.batch_runner
    runner = None if reference is None else reference()
    if runner is not None:
        runner.put_batch()


def wait_with(outcome: Outcome, alarm: Waiter) -> list[Waiter]:
    """Set `alarm` when `outcome` is settled or its user records move; return the list that has it until then."""
    made: list[Waiter] = []
    # In one line without a call, so no other thread runs within it, and makes a list that would be lost. A lock would
    # stop the producer for good where a signal handler interrupts the thread that has it, and waits for a result.
    waiters = outcome.waiters = made if outcome.waiters is None else outcome.waiters
    waiters.append(alarm)
    return waiters


class _ThreadAlarm:
    """Wakes a thread.

    It has no lock that a thread holds for a moment, as an event has: a signal handler may interrupt that thread there
    and wait for the loop, which would wait for the lock.
    """

    __slots__ = ("_is_set",)

    def __init__(self) -> None:
        self._is_set = threading.Lock()
        self._is_set.acquire()

    def set(self) -> None:
        # After the present step of the loop, as for a task: then the counts are those of the result.
        run_soon(self._is_set.release)

    def wait(self, seconds: float) -> bool:
        return self._is_set.acquire(timeout=min(max(0.0, seconds), threading.TIMEOUT_MAX))


def wait_for_result(handle: ResultHandle, timeout: float | None) -> bool:
    """Wait in this thread for the result of a user record, as `wait_in_thread`."""

    def open_outcomes() -> list[Outcome]:
        outcome = handle.follow()
        return [] if outcome.settled else [outcome]

    return wait_in_thread(open_outcomes, lambda outcome: handle.follow() is outcome, timeout)


def wait_in_thread(
    open_outcomes: Callable[[], list[Outcome]], is_open: Callable[[Outcome], bool], timeout: float | None
) -> bool:
    """Wait up to `timeout` seconds (None: forever) until there are no open outcomes; return False if there still are.

    `open_outcomes` returns those that some user records wait for now; `is_open` is False once none waits for this one.
    """
    deadline = math.inf if timeout is None else monotonic() + timeout
    while waiting := open_outcomes():
        for outcome in waiting:
            alarm = _ThreadAlarm()
            waiters = wait_with(outcome, alarm)
            # As in `Delivery.__await__`: the loop may have settled it meanwhile, or moved its records elsewhere.
            may_wait = is_open(outcome) and outcome.waiters is waiters and not outcome.settled
            try:
                if may_wait and not alarm.wait(deadline - monotonic()):
                    return False
            finally:
                with contextlib.suppress(ValueError):
                    waiters.remove(alarm)
    return True


class _FutureAlarm:
    """Wakes a task of asyncio, at a third of the cost of an event."""

    __slots__ = ("_future",)

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._future: asyncio.Future[None] = loop.create_future()

    def set(self) -> None:
        loop = self._future.get_loop()
        if _get_running_loop() is loop:
            self._wake()
        else:
            # Awaited in another loop than the producer's. Only that loop may touch its future, and it may be closed.
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(self._wake)

    def _wake(self) -> None:
        # The future may be cancelled while its task has not run since.
        if not self._future.done():
            self._future.set_result(None)

    def is_set(self) -> bool:
        return self._future.done() and not self._future.cancelled()

    def wait(self) -> asyncio.Future[None]:
        return self._future


def _alarm() -> "_FutureAlarm | anyio.Event":
    try:
        return _FutureAlarm(asyncio.get_running_loop())
    except RuntimeError:
        return anyio.Event()


def call_when_done(delivery: ResultHandle, function: Callable[[], object]) -> None:
    """Call `function` once: now if the result is known, otherwise in the producer's event loop. Thread-safe."""
    callback = _DoneCallback(delivery, function)
    put_batch_of(delivery)
    while not (outcome := delivery.follow()).settled:
        waiters = wait_with(outcome, callback)
        # As in `__await__`: the producer's thread may have settled the outcome, or moved this record or another of it,
        # and taken the list meanwhile.
        if delivery.follow() is outcome and outcome.waiters is waiters and not outcome.settled:
            return
        with contextlib.suppress(ValueError):
            waiters.remove(callback)
    callback.call()


class _DoneCallback:
    """A waiter of the outcome that calls a function of the caller, outside of the pipeline's work."""

    __slots__ = ("_delivery", "_function")

    def __init__(self, delivery: ResultHandle, function: Callable[[], object]) -> None:
        self._delivery = delivery
        self._function: Callable[[], object] | None = partial(copy_context().run, function)

    def set(self) -> None:
        outcome = self._delivery.follow()
        if outcome.settled:
            run_soon(self.call)
        else:
            wait_with(outcome, self)

    def call(self) -> None:
        """Call the function, unless another thread has. Nothing refers to it afterwards."""
        function, self._function = self._function, None
        if function is not None:
            log_exceptions(function)


def log_exceptions(function: Callable[[], object]) -> None:
    """Call a function of the caller. Its mistake must not harm the producer."""
    try:
        function()
    except Exception:
        _logger.exception("a callback of a delivery failed")


def call_when_finished(delivery: ResultHandle, finished: Callable[[RecordResult], object]) -> None:
    """Call `finished` with the result of a delivery, once it has one; in the producer's loop.

    Deliveries of one Kinesis record with the same `finished` share a waiter. The call happens in the middle of the
    pipeline's work, so `finished` must not call a pipeline.
    """
    put_batch_of(delivery)
    outcome = delivery.follow()
    if outcome.settled:
        finished(outcome.result_of(delivery.index))
        return
    # A slice, because a waiter in another thread may remove itself meanwhile.
    latest = outcome.waiters[-1:] if outcome.waiters else ()
    if latest and isinstance(latest[0], _ResultCallback) and latest[0].finished == finished:
        latest[0].deliveries.append(delivery)
    else:
        wait_with(outcome, _ResultCallback(outcome, finished, [delivery]))


class _ResultCallback(msgspec.Struct, eq=False):
    """A waiter that calls `finished` for each of its deliveries, which share an outcome."""

    outcome: Outcome
    finished: Callable[[RecordResult], object]
    deliveries: list[ResultHandle]

    def set(self) -> None:
        outcome = self.outcome
        if outcome.settled and outcome.moved is None and outcome.histories is None:
            result = outcome.result_of(0)
            for _ in self.deliveries:
                self.finished(result)
            return
        # Some user records have moved to other outcomes, or have attempts of their own.
        for delivery in self.deliveries:
            call_when_finished(delivery, self.finished)


async def wait_for_spool(delivery: Delivery, waiting: AbstractSet[Outcome]) -> None:
    """Wait until the write-ahead spool has what was put; `waiting` has the outcomes of those that it does not have yet.

    Raises:
        NotSpooled: it did not take the user record.
    """
    first = delivery.outcome
    while first in waiting and not first.settled and first.moved is None:
        answered = anyio.Event()
        wait_with(first, answered)
        await answered.wait()
    result = delivery.peek()
    if result is not None and result.error_code == NOT_SPOOLED:
        raise NotSpooled(result.error_message)


async def wait_for_spool_of_all(deliveries: Iterable[Delivery], waiting: AbstractSet[Outcome]) -> None:
    """Wait until it is known of each user record whether the write-ahead spool has it.

    Raises:
        NotSpooled: it did not take all of them; the first reason.
    """
    problem: NotSpooled | None = None
    for delivery in deliveries:
        try:
            await wait_for_spool(delivery, waiting)
        except NotSpooled as error:
            problem = problem or error
    if problem is not None:
        raise problem
