"""What a file of an earlier run still holds: who only empties it stays until nothing more leaves it by itself."""

import asyncio
import logging
from typing import Final

from kpl_core.durability.dead_letters import DeadLetterQueue

__all__ = ["holds_more"]

_logger: Final = logging.getLogger("kpl_integrations.ingest.workers")


async def holds_more(letters: DeadLetterQueue) -> bool:
    """Say whether the file holds records, or letters that are tried again by themselves; of other letters, warn.

    Raises:
        SpoolError: the file is closed or broken.
    """
    if letters.spool.statistics().records:
        return True
    due = await asyncio.wrap_future(letters.due_nowait(1))
    if due.letters or due.next_due_in is not None:
        return True
    if letters.depth:
        text = "%d dead letters are left that are not tried again by themselves; see `kpl dlq list`"
        _logger.warning(text, letters.depth)
    return False
