"""A spool on disk (SQLite) for records that must survive the process, and the dead letters in it."""

from kpl_core.durability.spool.async_spool import AsyncSpool
from kpl_core.durability.spool.dead_letter_table import LetterFilter, StoredLetter
from kpl_core.durability.spool.depth_alarm import AlarmChange, DepthAlarm, Escalation
from kpl_core.durability.spool.envelope import REASONS, DeadLetter, Reason, SpooledRecord, letter_to_json, reason_of
from kpl_core.durability.spool.ledger import Claimed
from kpl_core.durability.spool.put import Put, SharedPut
from kpl_core.durability.spool.spool import Spool, SpoolStatistics
from kpl_core.durability.spool.spool_error import (
    SpoolClosed,
    SpoolCorrupt,
    SpoolError,
    SpoolFull,
    SpoolLocked,
    SpoolUnavailable,
)
from kpl_core.options.reliability import SpoolOptions

__all__ = [
    "REASONS",
    "AlarmChange",
    "AsyncSpool",
    "Claimed",
    "DeadLetter",
    "DepthAlarm",
    "Escalation",
    "LetterFilter",
    "Put",
    "Reason",
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
    "SpooledRecord",
    "StoredLetter",
    "letter_to_json",
    "reason_of",
]
