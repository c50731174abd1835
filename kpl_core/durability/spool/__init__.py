"""A spool on disk (SQLite) for records that must survive the process, and for dead letters."""

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
from kpl_core.durability.spool.spool import Spool, SpoolStatistics
from kpl_core.durability.spool.spool_error import (
    SpoolClosed,
    SpoolCorrupt,
    SpoolError,
    SpoolFull,
    SpoolLocked,
    SpoolUnavailable,
)
from kpl_core.durability.spool.spool_reader import NumberedRecord, SpoolReader
from kpl_core.durability.spool.tables import LetterFilter, StoredLetter
from kpl_core.options.reliability import SpoolOptions

__all__ = [
    "AsyncSpool",
    "Claimed",
    "DeadLetter",
    "LetterFilter",
    "NumberedRecord",
    "SharedPut",
    "Spool",
    "SpoolClosed",
    "SpoolCorrupt",
    "SpoolError",
    "SpoolFull",
    "SpoolLocked",
    "SpoolOptions",
    "SpoolReader",
    "SpoolStatistics",
    "SpoolUnavailable",
    "SpooledPut",
    "SpooledRecord",
    "StoredLetter",
    "letter_to_json",
    "record_to_json",
]
