"""`kpl coordinate`: compute the summary for a fleet of producers, as a process of its own."""

import json
import sys
from functools import partial
from typing import Final

import anyio

from kpl_core import ConfigError, CoordinationOptions
from kpl_core.coordination import StoreFailed
from kpl_core.coordination.stores import open_store
from kpl_core.coordination.worker import Coordinator
from kpl_integrations.cli.exit_code import ExitCode
from kpl_integrations.cli.failure import CommandFailure
from kpl_integrations.cli.signals import until_signal
from kpl_integrations.cli.terminal import note

__all__ = ["Coordinate"]

# Of an interval, between two summaries.
_SPACING: Final = 0.4


class Coordinate:
    """Computes until SIGINT or SIGTERM, or once."""

    def __init__(
        self,
        store: str,
        *,
        policy: str,
        interval_seconds: float,
        staleness_seconds: float,
        max_workers: int,
        once: bool,
        as_json: bool,
    ) -> None:
        self._options_of = partial(
            CoordinationOptions,
            store=store,
            policy=policy,  # type: ignore[arg-type]
            interval_seconds=interval_seconds,
            staleness_seconds=staleness_seconds,
            max_workers=max_workers,
        )
        self._once = once
        self._as_json = as_json
        self._said: object = None

    async def run(self) -> ExitCode:
        """Compute; status 0 when it is stopped, 3 if the first round fails.

        Raises:
            CommandFailure: an option or the store's URL is wrong, or the store cannot be used.
        """
        try:
            self._options = self._options_of()
            _require_meeting_place(self._options.store)
            store = await open_store(self._options.store)
        except ConfigError as error:
            lacks_package = isinstance(error.__cause__, ImportError)
            status = ExitCode.UNUSABLE if lacks_package else ExitCode.WRONG_USAGE
            raise CommandFailure(str(error), exit_code=status) from error
        coordinator = Coordinator(
            store,
            policy=self._options.policy,
            interval_seconds=self._options.interval_seconds,
            max_workers=self._options.max_workers,
            staleness_seconds=self._options.staleness_seconds,
            on_problem=lambda _, sentence: note(sentence),
        )
        try:
            if self._once:
                await self._round(coordinator)
                return ExitCode.DONE
            await until_signal(lambda: self._rounds(coordinator))
            note("stopped; workers compute by themselves within two intervals")
            return ExitCode.DONE
        except StoreFailed as error:
            raise CommandFailure(str(error)) from error
        finally:
            await store.aclose()

    async def _rounds(self, coordinator: Coordinator) -> ExitCode:
        await self._round(coordinator)
        is_well = True
        while True:
            await anyio.sleep(_SPACING * self._options.interval_seconds)
            try:
                await self._round(coordinator)
                is_well = True
            except StoreFailed as error:
                if is_well:
                    note(f"{error}; trying again")
                is_well = False

    async def _round(self, coordinator: Coordinator) -> None:
        workers, outcome = await coordinator.compute_once()
        if (workers, outcome) == self._said and not self._once:
            return
        self._said = (workers, outcome)
        if self._as_json:
            line = json.dumps({"workers": workers, "outcome": outcome})
        else:
            what = "summary written" if outcome == "computed" else "somebody else computes"
            line = f"{self._options.shown_store}: {workers} workers, {what}"
        sys.stdout.write(f"{line}\n")
        sys.stdout.flush()


def _require_meeting_place(store: str) -> None:
    if store.startswith("memory:"):
        message = (
            f"store is {store!r}, which is one process' own, and no producer is in this one; name where they meet, as "
            f"in file:///run/kpl/orders"
        )
        raise ConfigError(message)
