"""Watches a spool that cannot store: tries it again, and says in the log when it stops and when it stores again."""

import logging
from collections.abc import Callable
from typing import Final

import anyio

from kpl_core.durability.spool import AsyncSpool, SpoolError, SpoolFull
from kpl_core.pipeline.intake.write_ahead import PROBE_SECONDS, SpoolState

_log: Final = logging.getLogger("kpl_core")
# The keys in the spool are read again after so many times as long as reading them took.
_REREAD_FACTOR: Final = 10.0
_MEANWHILE: Final = {
    "fail": "puts fail with NotSpooled",
    "bypass": "records go straight to Kinesis, and those that must be in the spool are refused",
    "refuse": "puts are refused",
}
_MEANWHILE_OVERFLOW: Final = "records that are not delivered in time fail, unless dead letters take them"


class SpoolWatch:
    """The driver of a `SpoolState`, in the producer's loop."""

    def __init__(self, state: SpoolState, *, in_order: bool) -> None:
        self._state = state
        self._in_order = in_order
        self._failing = anyio.Event()

    def refused(self, why: BaseException | str, now: float) -> None:
        """Note that the spool did not store."""
        if self._state.refused(str(why), now, is_full=isinstance(why, SpoolFull)):
            meanwhile = _MEANWHILE[self._state.failure] if self._state.writes_ahead else _MEANWHILE_OVERFLOW
            _log.error("the spool cannot store; until it can, %s: %s", meanwhile, why)
            self._failing.set()

    def stored(self, now: float) -> None:
        """Note that the spool has stored."""
        since = self._state.since
        if self._state.stored():
            _log.warning(
                "the spool stores again, after %.1f s; %d records went straight to Kinesis so far",
                now - since,
                self._state.bypassed,
            )

    async def run(self, spool: AsyncSpool, *, clock: Callable[[], float]) -> None:
        """Try a spool that cannot store again and again, until cancelled."""
        state = self._state
        while True:
            await self._failing.wait()
            read_at = clock()
            while not state.can_store:
                # What is on its way to the disk is in no key that can be read. Nothing joins it while the spool fails.
                if self._in_order and not state.waiting and (state.keys is None or clock() >= read_at):
                    started_at = clock()
                    await self._read_keys(spool)
                    read_at = clock() + _REREAD_FACTOR * (clock() - started_at)
                await anyio.sleep(PROBE_SECONDS)
                try:
                    await spool.mailbox.wait_for(spool.spool.probe_nowait())
                except SpoolError as error:
                    self.refused(error, clock())
                else:
                    self.stored(clock())
            self._failing = anyio.Event()

    async def _read_keys(self, spool: AsyncSpool) -> None:
        keys: set[tuple[str, str]] = set()
        after = -1
        last = 0
        try:
            while after != last:
                after = last
                found, last = await spool.mailbox.wait_for(spool.spool.keys_after_nowait(after))
                keys |= found
        except SpoolError:
            # Unknown keys are refused, so no order is broken.
            self._state.keys = None
        else:
            self._state.keys = frozenset(keys)
