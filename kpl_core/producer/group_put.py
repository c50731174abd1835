"""Put a large group of user records in slices, so that other work of the event loop runs between them.

Room for the whole group is taken first. So the group is accepted as a whole or not at all, and a later slice cannot be
refused. The caller must call `finish`, also if it is cancelled. A producer that closes finishes its open groups first.
"""

from collections.abc import Callable, Sequence
from typing import Any, Final

from kpl_core.pipeline.pipeline import StreamPipeline
from kpl_core.pipeline.stages import GroupTerms
from kpl_core.producer.checked_records import Pairs, checked_group, checked_pairs
from kpl_core.producer.delivery import Deliveries
from kpl_core.records.user_record import UserRecord, require_notes

# What a slice has at most, if it has several records: about a millisecond of work.
SLICE_RECORDS: Final = 250
SLICE_BYTES: Final = 262_144


def admitted_terms(pipeline: StreamPipeline, records: Sequence[UserRecord], terms: GroupTerms) -> GroupTerms:
    """Return the terms of a group that is put now: whether it goes straight to Kinesis.

    Raises:
        NotSpooled: the spool cannot store, and so the group is refused.
    """
    disk = pipeline.write_ahead
    if disk is None or disk.state.can_store or not (terms.keep or disk.state.failure == "refuse"):
        return terms
    keys = (record.partition_key for record in records)
    return terms._replace(straight=disk.goes_straight(keys, durable=terms.durable))


class GroupPut:
    """User records of one flow that have room. `step` puts the next ones, `finish` all that are left."""

    __slots__ = (
        "_are_pairs",
        "_clock",
        "_deliveries",
        "_open_groups",
        "_pipeline",
        "_put_count",
        "_records",
        "_terms",
        "_wake",
    )

    def __init__(
        self,
        pipeline: StreamPipeline,
        records: Sequence[UserRecord] | Pairs,
        terms: GroupTerms,
        clock: Callable[[], float],
        wake: Callable[[], object],
        open_groups: "set[GroupPut]",
    ) -> None:
        fair = pipeline.fair
        assert fair is not None  # noqa: S101 - the producer checked
        require_notes(terms.flow, None)
        self._are_pairs = bool(records) and type(records[0]) is tuple
        check: Any = checked_pairs if self._are_pairs else checked_group
        # A copy: the caller may change its list before the last slice is put.
        self._records, size_bytes = check([*records], max_record_bytes=pipeline.max_record_bytes)
        are_plain = terms.tier == "normal" and terms.aggregate and not pipeline.ledger.is_durable
        if self._are_pairs and not are_plain:
            # Also a durable store needs the flow of each.
            self._records = [UserRecord(*pair) for pair in self._records]
            self._are_pairs = False
        terms = admitted_terms(pipeline, self._records, terms)
        fair.reserve(size_bytes, len(self._records), terms.flow, terms.tier)
        self._pipeline = pipeline
        self._clock = clock
        self._wake = wake
        self._put_count = 0
        self._deliveries = Deliveries(len(self._records))
        self._terms = terms._replace(has_room=True)
        # The producer's groups with records that are not put yet.
        self._open_groups = open_groups
        open_groups.add(self)

    @property
    def deliveries(self) -> Deliveries:
        """Return the deliveries of the records put so far."""
        return self._deliveries[: self._put_count]

    def step(self) -> bool:
        """Put the next records; return True if there are more."""
        start, size_bytes = self._put_count, 0
        for record in self._records[start : start + SLICE_RECORDS]:
            size_bytes += len(record[1] if self._are_pairs else record.data)
            self._put_count += 1
            if size_bytes >= SLICE_BYTES:
                break
        self._put(start)
        return self._put_count < len(self._records)

    def finish(self) -> None:
        """Put all that are left at once."""
        start, self._put_count = self._put_count, len(self._records)
        self._put(start)

    def _put(self, start: int) -> None:
        """Put the records from this position on, up to those that are left."""
        stop = self._put_count
        if stop == len(self._records):
            self._open_groups.discard(self)
        if start == stop:
            return
        pipeline, now, deliveries = self._pipeline, self._clock(), self._deliveries
        if self._are_pairs:
            pipeline.put_pairs_together(self._records, (start, stop), now, self._terms, deliveries)
        else:
            deliveries.set_all(start, pipeline.put_together(self._records[start:stop], now, self._terms))
        if pipeline.attention:
            self._wake()
