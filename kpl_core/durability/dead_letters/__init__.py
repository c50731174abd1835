"""Dead letters: read them, send them again, hand them to a sink.

`sqs_sink` and `s3_sink` are imported from their own files.
"""

from kpl_core.durability.dead_letters.dead_letter_queue import DeadLetterQueue
from kpl_core.durability.dead_letters.dead_letter_sink import (
    CallableSink,
    DeadLetterSink,
    QueueSink,
    Refusal,
    SinkReport,
)
from kpl_core.durability.dead_letters.json_lines_sink import JsonLinesSink
from kpl_core.durability.dead_letters.operations import Exported, LetterReader, purge
from kpl_core.durability.dead_letters.redrive_policy import RedrivePolicy
from kpl_core.durability.dead_letters.redriver import RedriveProgress, Redriver

__all__ = [
    "CallableSink",
    "DeadLetterQueue",
    "DeadLetterSink",
    "Exported",
    "JsonLinesSink",
    "LetterReader",
    "QueueSink",
    "RedrivePolicy",
    "RedriveProgress",
    "Redriver",
    "Refusal",
    "SinkReport",
    "purge",
]
