"""The Kinesis wire protocol, server side: requests in, answers and errors out, in JSON or CBOR.

Pure: bytes to values and back. Who listens, who authenticates and who answers stands elsewhere.
"""

from kpl_integrations.kinesis_protocol.constraints import CONSTRAINTS, Member, check_constraints
from kpl_integrations.kinesis_protocol.json_wire import JSON_CONTENT_TYPE, JsonWire
from kpl_integrations.kinesis_protocol.put_results import PutResult
from kpl_integrations.kinesis_protocol.refusal import RequestRefused
from kpl_integrations.kinesis_protocol.requests import (
    REQUEST_TYPES,
    CreateStream,
    DeleteStream,
    DescribeStream,
    DescribeStreamSummary,
    GetRecords,
    GetShardIterator,
    ListShards,
    ListStreams,
    MergeShards,
    PutRecord,
    PutRecords,
    PutRecordsRequestEntry,
    ShardFilter,
    SplitShard,
    StreamModeDetails,
    StreamRequest,
    UpdateMaxRecordSize,
    UpdateShardCount,
)
from kpl_integrations.kinesis_protocol.sigv4 import (
    ALLOWED_SKEW_SECONDS,
    REFUSED_CREDENTIALS,
    Credential,
    SignedRequest,
    SigningKey,
    named_credential,
    require_signature,
)
from kpl_integrations.kinesis_protocol.timestamp import Timestamp
from kpl_integrations.kinesis_protocol.wire import (
    TARGET_PREFIX,
    Wire,
    error_body,
    operation_of,
    request_of,
    wire_of,
)

__all__ = [
    "ALLOWED_SKEW_SECONDS",
    "CONSTRAINTS",
    "JSON_CONTENT_TYPE",
    "REFUSED_CREDENTIALS",
    "REQUEST_TYPES",
    "TARGET_PREFIX",
    "CreateStream",
    "Credential",
    "DeleteStream",
    "DescribeStream",
    "DescribeStreamSummary",
    "GetRecords",
    "GetShardIterator",
    "JsonWire",
    "ListShards",
    "ListStreams",
    "Member",
    "MergeShards",
    "PutRecord",
    "PutRecords",
    "PutRecordsRequestEntry",
    "PutResult",
    "RequestRefused",
    "ShardFilter",
    "SignedRequest",
    "SigningKey",
    "SplitShard",
    "StreamModeDetails",
    "StreamRequest",
    "Timestamp",
    "UpdateMaxRecordSize",
    "UpdateShardCount",
    "Wire",
    "check_constraints",
    "error_body",
    "named_credential",
    "operation_of",
    "request_of",
    "require_signature",
    "wire_of",
]
