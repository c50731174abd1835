"""What the spool needs of a producer: somewhere to put a stored record, and to hear its result."""

from collections.abc import Callable
from typing import Protocol

from kpl_core.record_result import RecordResult
from kpl_core.spool.envelope import SpooledRecord

__all__ = ["Put"]


class Put(Protocol):
    """Puts a record and says later, once, on the same loop, what became of it.

    A callback and no awaitable, because an awaitable would cost a task per record.
    """

    def __call__(self, record: SpooledRecord, finished: Callable[[RecordResult], None], /) -> None:
        """Put `record`.

        Raises:
            BufferFull: there is no room now; `finished` will not be called.
            InvalidUserRecord: the record can never be put; `finished` will not be called.
            ProducerClosed: nothing can be put any more; `finished` will not be called.
        """
