"""A PutRecords request, its answer, and the fact that hooks receive about both."""

from collections.abc import Mapping, Sequence

import msgspec

from kpl_core.hooks import RequestCompleted
from kpl_core.records.kinesis_record import KinesisRecord
from kpl_core.records.record_result import RECORD_COUNT_MISMATCH


class PutRecordsRequest:
    """One PutRecords call to make: at most 500 Kinesis records of one stream."""

    __slots__ = ("records", "size_bytes", "started_at", "stream")

    def __init__(self, stream: str, records: list[KinesisRecord], *, started_at: float) -> None:
        self.stream = stream
        self.records = records
        self.size_bytes = sum([record.size_bytes for record in records])
        self.started_at = started_at

    def __repr__(self) -> str:
        return f"<PutRecordsRequest {self.stream!r}, {len(self.records)} records, {self.size_bytes} bytes>"


class PutRecordsEntry(msgspec.Struct, frozen=True, rename="pascal", gc=False):
    """The service's answer for one Kinesis record: where it is stored, or the error.

    A success has a sequence number and a falsy error code (some endpoints send `null`).
    """

    sequence_number: str | None = None
    shard_id: str | None = None
    error_code: str | None = None
    error_message: str | None = None


class RequestFailure(msgspec.Struct, frozen=True):
    """The failure of a whole request: an error code of the service or of the producer, and its message."""

    code: str
    message: str


# One entry for each record of the request, in the same order, or the failure of the whole request.
PutRecordsAnswer = Sequence[PutRecordsEntry] | RequestFailure


def completed_fact(
    request: PutRecordsRequest, answer: PutRecordsAnswer, *, throttled: Mapping[str | None, int], now: float
) -> RequestCompleted:
    """Return the fact about an answered request. `throttled` counts Kinesis records by predicted shard."""
    records = request.records
    if not isinstance(answer, RequestFailure) and len(answer) != len(records):
        answer = RequestFailure(RECORD_COUNT_MISMATCH, "")
    failure = answer if isinstance(answer, RequestFailure) else None
    codes = [answer.code] * len(records) if isinstance(answer, RequestFailure) else [each.error_code for each in answer]
    errors: dict[str, int] = {}
    by_shard: dict[tuple[str, str], int] = {}
    for record, code in zip(records, codes, strict=True):
        if code:
            if failure is None:
                errors[code] = errors.get(code, 0) + 1
            place = record.predicted_shard or "", code
            by_shard[place] = by_shard.get(place, 0) + 1
    return RequestCompleted(
        stream=request.stream,
        started_at=request.started_at,
        ended_at=now,
        kinesis_records=len(request.records),
        user_records=sum(len(record.arrivals) for record in request.records),
        size_bytes=request.size_bytes,
        error_code=None if failure is None else failure.code,
        record_errors=errors,
        errors_by_shard=by_shard,
        throttled_by_shard={shard_id or "": count for shard_id, count in throttled.items() if count},
        # Arrivals are in order, except for retried records. A search of all would cost time per user record.
        queue_wait=request.started_at - min(record.arrivals[0] for record in request.records),
        opened_in=tuple(
            [record.outcome.opened_in for record in request.records if record.outcome.opened_in is not None]
        ),
        error_message=None if failure is None else failure.message,
    )
