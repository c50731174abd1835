"""`kpl coordinate`: computes the summary for a fleet of producers in a separate process."""

import sys
from dataclasses import dataclass, field
from typing import Final

import anyio

from kpl_core import ConfigError, CoordinationOptions
from kpl_core.coordination import StoreFailed
from kpl_core.coordination.stores import open_store
from kpl_core.coordination.worker import Coordinator
from kpl_integrations.cli.exit_code import CommandFailure, ExitCode, until_signal
from kpl_integrations.cli.terminal import note, print_json

# The pause between two summaries, as a share of the interval.
_PAUSE_SHARE: Final = 0.4


@dataclass
class CoordinateCommand:
    """Computes summaries until SIGINT or SIGTERM, or once."""

    store: str
    interval_seconds: float
    max_workers: int
    once: bool
    as_json: bool
    _printed: object = field(init=False, default=None)

    async def run(self) -> ExitCode:
        """Compute; the status is 0 after a signal, and 3 if the first round fails.

        Raises:
            CommandFailure: an option or the store's URL is wrong, or the store cannot be used.
        """
        try:
            self._options = CoordinationOptions(
                store=self.store,
                interval_seconds=self.interval_seconds,
                max_workers=self.max_workers,
            )
            _require_shared_store(self.store)
            store = await open_store(self.store)
        except ConfigError as error:
            lacks_package = isinstance(error.__cause__, ImportError)
            status = ExitCode.UNUSABLE if lacks_package else ExitCode.WRONG_USAGE
            raise CommandFailure(str(error), exit_code=status) from error
        coordinator = Coordinator(
            store,
            interval_seconds=self.interval_seconds,
            max_workers=self.max_workers,
            on_problem=lambda _, sentence: note(sentence),
        )
        try:
            if self.once:
                await self._round(coordinator)
            else:
                await until_signal(lambda: self._rounds(coordinator))
                note("stopped; within two intervals the workers compute summaries themselves")
            return ExitCode.DONE
        except StoreFailed as error:
            raise CommandFailure(str(error)) from error
        finally:
            await store.aclose()

    async def _rounds(self, coordinator: Coordinator) -> None:
        await self._round(coordinator)
        is_ok = True
        while True:
            await anyio.sleep(_PAUSE_SHARE * self.interval_seconds)
            try:
                await self._round(coordinator)
                is_ok = True
            except StoreFailed as error:
                if is_ok:
                    note(f"{error}; retrying")
                is_ok = False

    async def _round(self, coordinator: Coordinator) -> None:
        workers, outcome = await coordinator.compute_once()
        if (workers, outcome) == self._printed and not self.once:
            return
        self._printed = (workers, outcome)
        if self.as_json:
            print_json({"workers": workers, "outcome": outcome})
            return
        result = "summary written" if outcome == "computed" else "another process computes"
        sys.stdout.write(f"{self._options.shown_store}: {workers} workers, {result}\n")
        sys.stdout.flush()


def _require_shared_store(store: str) -> None:
    if store.startswith("memory:"):
        message = (
            f"store is {store!r}, which is in the memory of one process, and no producer is in this one; name a shared "
            f"store, such as file:///run/kpl/orders"
        )
        raise ConfigError(message)
