"""What the spool needs of a producer: somewhere to put a stored record, and to hear its result."""

from collections.abc import Callable
from typing import Protocol, TypeVar, runtime_checkable

from kpl_core.durability.spool.envelope import SpooledRecord
from kpl_core.records.record_result import RecordResult

__all__ = ["Put", "SharedPut"]

_Ticket = TypeVar("_Ticket")


class Put(Protocol):
    """Puts a record and says later, once, on the same loop, what became of it.

    A callback and no awaitable, because an awaitable would cost a task per record.
    """

    def __call__(self, record: SpooledRecord, finished: Callable[[RecordResult], None], /) -> object:
        """Put `record`; what is returned does not matter here.

        Raises:
            BufferFull: there is no room now; `finished` will not be called.
            InvalidUserRecord: the record can never be put; `finished` will not be called.
            ProducerClosed: nothing can be put any more; `finished` will not be called.
        """


@runtime_checkable
class SharedPut(Protocol[_Ticket]):
    """A `Put` that knows which records travel together: all of them are delivered, or none.

    It is what lets more than one record of a key be on its way, and still arrive in order.
    """

    def __call__(self, record: SpooledRecord, finished: Callable[[RecordResult], None], /) -> _Ticket:
        """Put `record`; return the ticket by which others may join it. Raises as `Put`."""

    def joins(self, record: SpooledRecord, ticket: _Ticket, /) -> bool:
        """Say whether `record`, put now by `beside`, shares the fate of the one that got `ticket`."""

    def beside(self, record: SpooledRecord, ticket: _Ticket, finished: Callable[[RecordResult], None], /) -> _Ticket:
        """Put `record`, of which `joins` has just said that it shares a fate; return its ticket. Raises as `Put`."""

    def hurry(self) -> None:
        """Let what was put wait for no more company: nothing comes to join it before it has its result."""
