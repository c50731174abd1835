"""What a worker does beside serving: it tells its totals, and keeps its tenants within its part of their rates."""

from collections.abc import Callable
from contextlib import AsyncExitStack
from types import TracebackType
from typing import Self

import anyio

from kpl_integrations.ingest.open_gateway import OpenGateway
from kpl_integrations.ingest.stats.totals import SingleProcessStats
from kpl_integrations.ingest.workers.asking import Asking
from kpl_integrations.ingest.workers.company import Company
from kpl_integrations.ingest.workers.seat import Seat
from kpl_integrations.ingest.workers.shared_quotas import SharedQuotas

__all__ = ["Membership"]


class Membership:
    """One worker's part in the company, from before its door opens until its producer is closed."""

    def __init__(
        self, seat: Seat, opened: OpenGateway, alone: SingleProcessStats, *, chance: Callable[[], float]
    ) -> None:
        from kpl_core.coordination.stores.file import FileStore  # noqa: PLC0415 - fcntl is not everywhere

        self._asking = Asking(seat.place_of("asking"), seat.name)
        self.company = Company(
            alone,
            FileStore(seat.place_of("totals")),
            seat,
            inherited=opened.producer.report().accepted,
            ask=self._asking.ask,
        )
        self._quotas = SharedQuotas(FileStore(seat.place_of("quotas")), seat, clock=opened.admission.now, chance=chance)
        self._accounts = opened.accounts
        self._exits = AsyncExitStack()

    async def __aenter__(self) -> Self:
        """Be there before the first request is."""
        async with AsyncExitStack() as stack:
            share = await stack.enter_async_context(self._quotas.taking_part())
            self._accounts.opened = self._quotas.opened
            await stack.enter_async_context(self._asking)
            await self.company.tell()
            tasks = await stack.enter_async_context(anyio.create_task_group())
            stack.callback(tasks.cancel_scope.cancel)
            tasks.start_soon(share)
            tasks.start_soon(self.company.run)
            tasks.start_soon(self._asking.run, self.company.tell)
            self._exits = stack.pop_all()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> bool | None:
        """Give the leases back."""
        return await self._exits.__aexit__(kind, error, traceback)

    async def last_word(self) -> None:
        """Tell the totals that hold for good."""
        await self.company.tell()
