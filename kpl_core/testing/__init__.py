"""For tests of what uses Kinesis: a service without I/O, its fault switches, a transport to it, a hook."""

from kpl_core.testing.fake_kinesis import FakeKinesis
from kpl_core.testing.fake_transport import FakeTransport
from kpl_core.testing.fault_effects import (
    BadBody,
    Effect,
    ErrorAnswer,
    Hang,
    Latency,
    MergeDuringRequest,
    RecordError,
    RequestPlan,
    ResetAfterCommit,
    ResetBeforeCommit,
    SplitDuringRequest,
    WrongCount,
)
from kpl_core.testing.faults import EVERY_TIME, Fault, Faults, When
from kpl_core.testing.kinesis_answers import (
    ChildShard,
    PutRecordsEntry,
    RecordsPage,
    ShardCountChange,
    ShardDescription,
    ShardPage,
    StoredRecord,
    StreamDescription,
    StreamPage,
    StreamStatistics,
    StreamSummary,
)
from kpl_core.testing.kinesis_error import SERVICE_ERRORS, KinesisError, ServiceError
from kpl_core.testing.put_validation import PutRecord
from kpl_core.testing.recording_hook import RecordingHook
from kpl_core.testing.service_limits import ServiceDurations, ServiceLimits
from kpl_core.testing.shard_filter import ShardFilter

__all__ = [
    "EVERY_TIME",
    "SERVICE_ERRORS",
    "BadBody",
    "ChildShard",
    "Effect",
    "ErrorAnswer",
    "FakeKinesis",
    "FakeTransport",
    "Fault",
    "Faults",
    "Hang",
    "KinesisError",
    "Latency",
    "MergeDuringRequest",
    "PutRecord",
    "PutRecordsEntry",
    "RecordError",
    "RecordingHook",
    "RecordsPage",
    "RequestPlan",
    "ResetAfterCommit",
    "ResetBeforeCommit",
    "ServiceDurations",
    "ServiceError",
    "ServiceLimits",
    "ShardCountChange",
    "ShardDescription",
    "ShardFilter",
    "ShardPage",
    "SplitDuringRequest",
    "StoredRecord",
    "StreamDescription",
    "StreamPage",
    "StreamStatistics",
    "StreamSummary",
    "When",
    "WrongCount",
]
