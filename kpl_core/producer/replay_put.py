"""Puts stored user records into their pipelines again: for the replay of the spool and the redrive of dead letters."""

from collections.abc import Callable

from kpl_core.durability.spool import SpooledRecord
from kpl_core.pipeline.pipeline import StreamPipeline
from kpl_core.producer.delivery import call_when_finished
from kpl_core.producer.stream_set import StreamSet
from kpl_core.records.outcome import Origin, ResultHandle
from kpl_core.records.record_result import RecordResult
from kpl_core.records.user_record import UserRecord

Finished = Callable[[RecordResult], None]


class ReplayPut:
    """Implements the spool's `Put` protocol. The ticket of a record is its delivery."""

    def __init__(self, origin: Origin, streams: StreamSet, pipeline: Callable[[str], StreamPipeline]) -> None:
        self._origin: Origin = origin
        self._streams = streams
        self._pipeline = pipeline
        self._put_to: set[str] = set()

    def __call__(self, record: SpooledRecord, finished: Finished, /) -> ResultHandle:
        """Put `record`; raises as `Put` documents."""
        return self._put(self._pipeline(record.stream), record, finished, self._streams.clock())

    def joins(self, record: SpooledRecord, ticket: ResultHandle, /) -> bool:
        """Return True if `record`, put now, would share the result of the one with this ticket."""
        return self._pipeline(record.stream).reaggregator.arrival_with(_user_record_of(record), ticket) is not None

    def beside(self, record: SpooledRecord, ticket: ResultHandle, finished: Finished, /) -> ResultHandle:
        """Put `record`, for which `joins` has just returned True; raises as `__call__`."""
        pipeline = self._pipeline(record.stream)
        arrived_at = pipeline.reaggregator.arrival_with(_user_record_of(record), ticket)
        return self._put(pipeline, record, finished, self._streams.clock() if arrived_at is None else arrived_at)

    def send_now(self) -> None:
        """Let the records that were put wait for no further records."""
        streams, self._put_to = self._put_to, set()
        for stream in streams:
            self._pipeline(stream).reaggregator.release_returned(self._streams.clock())
            self._streams.wake(stream)

    def _put(self, pipeline: StreamPipeline, record: SpooledRecord, finished: Finished, now: float) -> ResultHandle:
        delivery = pipeline.put_record(_user_record_of(record), now, self._origin)
        self._put_to.add(record.stream)
        if pipeline.attention:
            self._streams.wake(record.stream)
        call_when_finished(delivery, finished)
        return delivery


def _user_record_of(record: SpooledRecord) -> UserRecord:
    """Return the user record to put again."""
    return UserRecord(
        record.partition_key, record.data, record.explicit_hash_key, record.flow, record.tier, record.metadata
    )
