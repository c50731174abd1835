"""How many user records a task may put before it lets other tasks run.

A loop of `await producer.put(...)` that yields every time pays more for the yield than for the put. One that never
yields keeps the requests from leaving that make room. So a task puts some records in a row. But the event loop runs
all ready tasks before it looks at its sockets again. With a thousand tasks, as many puts each as a single one may make
would fill the whole buffer in one turn of the loop; then each put would wait for room, which costs ten times a put. So
the tasks share one turn's budget.
"""

import asyncio
import types
from collections.abc import Generator
from typing import Final

import anyio.lowlevel

# By one task, in a row: 0.2 ms.
PUTS_IN_A_ROW: Final = 100
# By all tasks, in one turn of the loop: about 5 ms.
PUTS_IN_A_TURN: Final = 5_000


@types.coroutine
def _next_turn() -> Generator[None, None, None]:
    """Let the other tasks of asyncio run: `asyncio.sleep(0)` without its checks."""
    yield


class YieldBudget:
    """The budget of one producer. `left` says how many puts are left until the next `let_others_run`."""

    def __init__(self, loop: asyncio.AbstractEventLoop | None = None) -> None:
        # None: trio, whose turns cannot be counted.
        self._loop = loop
        self.left = PUTS_IN_A_ROW
        # How many tasks came here in the last turn of the loop, and in this one.
        self._at_once = 0
        self._yielded = 0
        self._is_counting = False

    async def let_others_run(self) -> None:
        """Let the other tasks run, then start a new budget for the next puts of any task."""
        loop = self._loop
        if loop is None:
            self.left = PUTS_IN_A_ROW
            await anyio.lowlevel.checkpoint()
            return
        if not self._is_counting:
            self._is_counting = True
            loop.call_soon(self._turn)
        self._yielded += 1
        self._share()
        await _next_turn()

    def _turn(self) -> None:
        self._is_counting = False
        self._at_once, self._yielded = self._yielded, 0
        self._share()

    def _share(self) -> None:
        self.left = min(PUTS_IN_A_ROW, max(1, PUTS_IN_A_TURN // max(1, self._at_once, self._yielded)))
