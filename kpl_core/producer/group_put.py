"""Put a large group of user records in slices, so that other work of the event loop runs between them.

Room for the whole group is taken first. So the group is accepted as a whole or not at all, and a later slice cannot be
refused. The caller must call `finish`, also if it is cancelled. A producer that closes finishes its open groups first.
"""

from collections.abc import Callable, Sequence
from operator import add
from typing import Any, Final

from kpl_core.errors import InvalidUserRecord
from kpl_core.options.kinesis_limits import PARTITION_KEY_CHARACTERS
from kpl_core.pipeline.open_record import PAIR, require_alike
from kpl_core.pipeline.pipeline import StreamPipeline
from kpl_core.pipeline.stages import GroupTerms
from kpl_core.producer.delivery import Delivery
from kpl_core.records.hash_key import are_explicit_hash_keys, parse_explicit_hash_key
from kpl_core.records.user_record import (
    UserRecord,
    as_bytes,
    encode_partition_key,
    require_notes,
    require_size,
    with_bytes,
)

# Partition key and data of user records, without a flow of their own; all or none with an explicit hash key.
Pairs = Sequence[tuple[str, bytes]] | Sequence[tuple[str, bytes, str]]

# What a slice has at most, if it has several records: about a millisecond of work.
SLICE_RECORDS: Final = 250
SLICE_BYTES: Final = 262_144


class GroupPut:
    """User records of one flow that have room. `step` puts the next ones, `finish` all that are left."""

    __slots__ = (
        "_clock",
        "_open_groups",
        "_pairs",
        "_pipeline",
        "_put_count",
        "_records",
        "_sizes",
        "_terms",
        "_wake",
        "deliveries",
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
        self._pipeline = pipeline
        self._pairs = bool(records) and type(records[0]) is tuple
        self._clock = clock
        self._wake = wake
        self._put_count = 0
        # The deliveries so far; pairs have none.
        self.deliveries: list[Delivery] = []
        require_notes(terms.flow, None)
        items: Any = records
        if not self._pairs:
            items = [(each.partition_key, each.data, each.explicit_hash_key) for each in items]
        else:
            require_alike(items)
        if not {type(each[1]) for each in items} <= {bytes}:
            items = [(each[0], as_bytes(each[1]), *each[2:]) for each in items]
            records = items if self._pairs else [with_bytes(each) for each in records]  # type: ignore[arg-type]
        if items and len(items[0]) > PAIR:
            _check_explicit([each[2] for each in items], may_be_none=not self._pairs)
        sizes = list(map(add, _key_sizes([each[0] for each in items]), [len(each[1]) for each in items]))
        if max(sizes, default=0) > (most := pipeline.max_record_bytes):
            key, data, *_ = items[sizes.index(max(sizes))]
            require_size(len(key.encode()), len(data), max_record_bytes=most)
        fair.reserve(sum(sizes), len(records), terms.flow, terms.tier)
        self._terms = terms._replace(has_room=True)
        self._records: Any = records
        self._sizes = sizes
        # The producer's groups with records that are not put yet.
        self._open_groups = open_groups
        open_groups.add(self)

    def step(self) -> bool:
        """Put the next records; return True if there are more."""
        start, size_bytes = self._put_count, 0
        for size in self._sizes[start : start + SLICE_RECORDS]:
            size_bytes += size
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
        records = self._records[start : self._put_count]
        if self._put_count == len(self._records):
            self._open_groups.discard(self)
        if not records:
            return
        pipeline, now = self._pipeline, self._clock()
        if self._pairs:
            pipeline.put_pairs_together(records, now, self._terms)
        else:
            self.deliveries += pipeline.put_together(records, now, self._terms)  # type: ignore[arg-type]
        if pipeline.attention:
            self._wake()


def _check_explicit(hash_keys: list[Any], *, may_be_none: bool) -> None:
    """Check explicit hash keys together. If that fails, look at each one, to say which is wrong."""
    if set(map(type, hash_keys)) == {str} and are_explicit_hash_keys(hash_keys):
        return
    for index, each in enumerate(hash_keys):
        if each is None and may_be_none:
            continue
        try:
            parse_explicit_hash_key(each)
        except (TypeError, InvalidUserRecord) as error:
            message = f"records[{index}]: {error}"
            raise type(error)(message) from error


def _key_sizes(keys: list[Any]) -> list[int]:
    """Return how many bytes the valid partition keys have; raises as `encode_partition_key`."""
    if set(map(type, keys)) == {str}:
        sizes = list(map(len, keys))
        if min(sizes) and max(sizes) <= PARTITION_KEY_CHARACTERS and "".join(keys).isascii():
            return sizes
    return [len(encode_partition_key(key)) for key in keys]
