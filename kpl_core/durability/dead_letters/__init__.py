"""Dead letters: store them, redrive them, read and export them, hand them to a sink.

`SqsSink` and `S3Sink` are imported from `aws_sinks`, which needs botocore.
"""

from kpl_core.durability.dead_letters.dead_letter_queue import (
    AlarmChange,
    DeadLetterQueue,
    DepthAlarm,
    Escalation,
    RedrivePolicy,
)
from kpl_core.durability.dead_letters.dead_letter_sink import (
    CallableSink,
    DeadLetterSink,
    JsonLinesSink,
    QueueSink,
    RefusedLetter,
    SinkReport,
)
from kpl_core.durability.dead_letters.operations import ExportReport, LetterReader, RedriveProgress, Redriver, purge

__all__ = [
    "AlarmChange",
    "CallableSink",
    "DeadLetterQueue",
    "DeadLetterSink",
    "DepthAlarm",
    "Escalation",
    "ExportReport",
    "JsonLinesSink",
    "LetterReader",
    "QueueSink",
    "RedrivePolicy",
    "RedriveProgress",
    "Redriver",
    "RefusedLetter",
    "SinkReport",
    "purge",
]
