"""The sink's Kinesis: a stream that never throttles, answers at once and stores every request.

PutRecords reads only what the answer needs (keys, to name the shards); bodies are stored and checked
later by the ledger. JSON 1.1 always, CBOR 1.1 where cbor2 is installed.
"""

import json
from collections.abc import Iterable
from typing import Any

import msgspec

from benchmarks.ledger import Ledger, ShardRanges, Verdict
from benchmarks.workload import Workload

__all__ = ["KinesisAnswers", "UnknownOperationError"]

_TARGET_PREFIX = b"kinesis_20131202."
# 56 digits in all, like the service's.
_SEQUENCE_NUMBER_PREFIX = "4959033827149025660855969253836157109592"


class UnknownOperationError(ValueError):
    """The sink does not implement this operation."""


class _Routing(msgspec.Struct, gc=False):
    """The fields of an entry needed to route it; msgspec skips the data."""

    PartitionKey: str
    ExplicitHashKey: str | None = None


class _RoutingRequest(msgspec.Struct, gc=False):
    Records: list[_Routing]


class _Entry(msgspec.Struct, gc=False):
    Data: bytes  # msgspec decodes the base64
    PartitionKey: str
    ExplicitHashKey: str | None = None


class _EntryRequest(msgspec.Struct, gc=False):
    Records: list[_Entry]


_ROUTING = msgspec.json.Decoder(_RoutingRequest)
_ENTRIES = msgspec.json.Decoder(_EntryRequest)


class KinesisAnswers:
    """One stream and the records put into it since `start`."""

    def __init__(self) -> None:
        self.request_count = 0
        self._put_count = 0
        self._stored: list[tuple[bool, bytes]] = []
        self.open(Workload())

    def open(self, workload: Workload) -> None:
        """Reset to an empty stream with the workload's shards that expects its records."""
        self.workload = workload
        self._ranges = ShardRanges(workload.shard_count)
        self._result_of_shard = [
            f'{{"SequenceNumber":"{_SEQUENCE_NUMBER_PREFIX}%016d","ShardId":"{_shard_id(number)}"}}'
            for number in range(workload.shard_count)
        ]
        self.start()

    def start(self) -> None:
        """Discard the records put so far, which are the warm-up."""
        self._stored.clear()
        self.request_count = 0

    def answer(self, target: bytes, *, is_cbor: bool, body: bytes) -> bytes:
        """Return the body of the answer to one request.

        Raises:
            UnknownOperationError: the target is not one of PutRecords, ListShards, DescribeStream and
                DescribeStreamSummary.
        """
        operation = target.lower().removeprefix(_TARGET_PREFIX)
        if operation == b"putrecords":
            return self._put_records(is_cbor, body)
        answers = {
            b"listshards": self._list_shards,
            b"describestream": self._describe_stream,
            b"describestreamsummary": self._describe_stream_summary,
        }
        if operation not in answers:
            message = f"the sink has no operation {target!r}; it has PutRecords and {sorted(answers)}"
            raise UnknownOperationError(message)
        return _dump(answers[operation](), is_cbor=is_cbor)

    def verdict(self) -> Verdict:
        """Check all records put since `start`, and discard them."""
        ledger = Ledger(self.workload, self._ranges)
        for is_cbor, body in self._stored:
            for entry in _entries(body, is_cbor=is_cbor):
                shard = self._ranges.shard_of(entry.PartitionKey, entry.ExplicitHashKey)
                ledger.enter(shard, entry.PartitionKey, entry.ExplicitHashKey, entry.Data)
        self._stored.clear()
        return ledger.verdict()

    def _put_records(self, is_cbor: bool, body: bytes) -> bytes:  # noqa: FBT001 - two of a kind would need names
        self.request_count += 1
        self._stored.append((is_cbor, body))
        number = self._put_count
        shard_of, result_of_shard = self._ranges.shard_of, self._result_of_shard
        results: list[str] = []
        routings: Iterable[_Routing | _Entry] = (
            _entries(body, is_cbor=True) if is_cbor else _ROUTING.decode(body).Records
        )
        for routing in routings:
            shard = shard_of(routing.PartitionKey, routing.ExplicitHashKey)
            results.append(result_of_shard[shard] % number)
            number += 1
        self._put_count = number
        answer = f'{{"EncryptionType":"NONE","FailedRecordCount":0,"Records":[{",".join(results)}]}}'
        return _dump(json.loads(answer), is_cbor=True) if is_cbor else answer.encode()

    def _shards(self) -> list[dict[str, Any]]:
        return [
            {
                "ShardId": _shard_id(number),
                "HashKeyRange": {"StartingHashKey": str(start), "EndingHashKey": str(end)},
                "SequenceNumberRange": {"StartingSequenceNumber": f"{_SEQUENCE_NUMBER_PREFIX}{0:016d}"},
            }
            for number, (start, end) in enumerate(self._ranges.ranges)
        ]

    def _list_shards(self) -> dict[str, Any]:
        return {"Shards": self._shards()}

    def _describe_stream(self) -> dict[str, Any]:
        return {"StreamDescription": {**_DESCRIPTION, "Shards": self._shards(), "HasMoreShards": False}}

    def _describe_stream_summary(self) -> dict[str, Any]:
        count = {"OpenShardCount": self.workload.shard_count, "ConsumerCount": 0}
        return {"StreamDescriptionSummary": {**_DESCRIPTION, **count}}


_DESCRIPTION = {
    "StreamName": "bench",
    "StreamARN": "arn:aws:kinesis:us-east-1:000000000000:stream/bench",
    "StreamStatus": "ACTIVE",
    "StreamModeDetails": {"StreamMode": "PROVISIONED"},
    "RetentionPeriodHours": 24,
    "StreamCreationTimestamp": 1_700_000_000.0,
    "EnhancedMonitoring": [{"ShardLevelMetrics": []}],
    "EncryptionType": "NONE",
    "MaxRecordSizeInKiB": 1024,
}


def _shard_id(number: int) -> str:
    return f"shardId-{number:012d}"


def _entries(body: bytes, *, is_cbor: bool) -> list[_Entry]:
    if not is_cbor:
        return _ENTRIES.decode(body).Records
    import cbor2  # noqa: PLC0415 - only the opt-in wire path needs it

    return msgspec.convert(cbor2.loads(body), _EntryRequest).Records


def _dump(answer: dict[str, Any], *, is_cbor: bool) -> bytes:
    if not is_cbor:
        return json.dumps(answer).encode()
    import cbor2  # noqa: PLC0415 - only the opt-in wire path needs it

    return cbor2.dumps(answer)
