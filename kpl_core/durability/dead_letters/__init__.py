"""Dead letters: store them, redrive them, read and export them, hand them to a sink.

`SqsSink` and `S3Sink` are imported from `aws_sinks`, which needs botocore.
"""

from kpl_core.durability.dead_letters.dead_letter_queue import (
    DeadLetterQueue,
    DepthAlarm,
    LetterReader,
    new_letter,
    purge,
)
from kpl_core.durability.dead_letters.dead_letter_sink import (
    CallableSink,
    DeadLetterSink,
    JsonLinesSink,
    QueueSink,
    RefusedLetter,
    SinkReport,
)
from kpl_core.durability.dead_letters.redriver import RedriveProgress, Redriver
from kpl_core.durability.spool.read_only_spool import ExportReport

__all__ = [
    "CallableSink",
    "DeadLetterQueue",
    "DeadLetterSink",
    "DepthAlarm",
    "ExportReport",
    "JsonLinesSink",
    "LetterReader",
    "QueueSink",
    "RedriveProgress",
    "Redriver",
    "RefusedLetter",
    "SinkReport",
    "new_letter",
    "purge",
]
