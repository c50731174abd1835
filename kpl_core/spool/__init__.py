"""A spool on disk (SQLite) for records that must survive the process, and the dead-letter queue in it.

The sinks that speak to AWS are imported from their own files (`sqs_sink`, `s3_sink`).
"""

from kpl_core.reliability import SpoolOptions
from kpl_core.spool.async_spool import AsyncSpool
from kpl_core.spool.dead_letter_queue import DeadLetterQueue
from kpl_core.spool.dead_letter_sink import CallableSink, DeadLetterSink, QueueSink, Refusal, SinkReport
from kpl_core.spool.dead_letter_table import LetterFilter, StoredLetter
from kpl_core.spool.delivery_pace import DeliveryPace
from kpl_core.spool.depth_alarm import AlarmChange, DepthAlarm, Escalation
from kpl_core.spool.envelope import REASONS, DeadLetter, Reason, SpooledRecord, letter_to_json, reason_of
from kpl_core.spool.json_lines_sink import JsonLinesSink
from kpl_core.spool.ledger import Claimed
from kpl_core.spool.operations import Exported, LetterReader, purge
from kpl_core.spool.put import Put, SharedPut
from kpl_core.spool.redrive_policy import RedrivePolicy
from kpl_core.spool.redriver import RedriveProgress, Redriver
from kpl_core.spool.replayer import Replayer
from kpl_core.spool.spool import Spool, SpoolStatistics
from kpl_core.spool.spool_error import (
    SpoolClosed,
    SpoolCorrupt,
    SpoolError,
    SpoolFull,
    SpoolLocked,
    SpoolUnavailable,
)

__all__ = [
    "REASONS",
    "AlarmChange",
    "AsyncSpool",
    "CallableSink",
    "Claimed",
    "DeadLetter",
    "DeadLetterQueue",
    "DeadLetterSink",
    "DeliveryPace",
    "DepthAlarm",
    "Escalation",
    "Exported",
    "JsonLinesSink",
    "LetterFilter",
    "LetterReader",
    "Put",
    "QueueSink",
    "Reason",
    "RedrivePolicy",
    "RedriveProgress",
    "Redriver",
    "Refusal",
    "Replayer",
    "SharedPut",
    "SinkReport",
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
    "purge",
    "reason_of",
]
