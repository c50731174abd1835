"""A spool on disk (SQLite) for records that must survive the process, and for dead letters.

`Spool` (`spool.py`) has the life of a record: `append_nowait` stores it, `claim_backlog_nowait` reads it back,
`confirm` removes it once Kinesis has it, `release` returns it to the backlog. All of them run on the thread of
`group_commit.py`.
"""

from kpl_core.durability.spool.async_spool import AsyncSpool
from kpl_core.durability.spool.claims import Claimed
from kpl_core.durability.spool.envelope import (
    DeadLetter,
    SharedPut,
    SpooledPut,
    SpooledRecord,
    letter_to_json,
    record_to_json,
)
from kpl_core.durability.spool.read_only_spool import NumberedRecord, ReadOnlySpool
from kpl_core.durability.spool.spool import Spool, SpoolStatistics
from kpl_core.durability.spool.spool_error import (
    SpoolClosed,
    SpoolCorrupt,
    SpoolError,
    SpoolFull,
    SpoolLocked,
    SpoolUnavailable,
)
from kpl_core.durability.spool.tables import LetterFilter, StoredLetter
from kpl_core.options.reliability import SpoolOptions

__all__ = [
    "AsyncSpool",
    "Claimed",
    "DeadLetter",
    "LetterFilter",
    "NumberedRecord",
    "ReadOnlySpool",
    "SharedPut",
    "Spool",
    "SpoolClosed",
    "SpoolCorrupt",
    "SpoolError",
    "SpoolFull",
    "SpoolLocked",
    "SpoolOptions",
    "SpoolStatistics",
    "SpoolUnavailable",
    "SpooledPut",
    "SpooledRecord",
    "StoredLetter",
    "letter_to_json",
    "record_to_json",
]
