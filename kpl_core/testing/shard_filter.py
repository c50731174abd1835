"""ListShards' filters: which shards of a stream a listing names.

A table: filter type -> predicate (AWS, API_ShardFilter). Every type looks only at shards that
may still hold records.
"""

from collections.abc import Callable
from typing import Final, NamedTuple

from kpl_core.testing.fake_shard import FakeShard
from kpl_core.testing.kinesis_error import INVALID_ARGUMENT, KinesisError

__all__ = ["FROM_TRIM_HORIZON", "SHARD_FILTERS", "ShardFilter", "selects"]

FROM_TRIM_HORIZON: Final = "FROM_TRIM_HORIZON"


class ShardFilter(NamedTuple):
    """One filter: its type and the argument that type needs. Timestamps are milliseconds since 1970."""

    type: str = FROM_TRIM_HORIZON
    shard_id: str | None = None
    timestamp_ms: int | None = None

    def check(self) -> None:
        """Refuse a filter whose argument is missing or not wanted.

        Raises:
            KinesisError: InvalidArgumentException.
        """
        needs_shard = self.type == "AFTER_SHARD_ID"
        needs_timestamp = self.type in {"AT_TIMESTAMP", "FROM_TIMESTAMP"}
        for wanted, value, member in (
            (needs_shard, self.shard_id, "ShardId"),
            (needs_timestamp, self.timestamp_ms, "Timestamp"),
        ):
            if wanted and value is None:
                message = f"{member} must be provided when ShardFilter type is {self.type}."
                raise KinesisError(INVALID_ARGUMENT, message)
            if not wanted and value is not None:
                message = f"{member} cannot be provided when ShardFilter type is {self.type}."
                raise KinesisError(INVALID_ARGUMENT, message)


class _Moment(NamedTuple):
    """What a predicate may look at beside the shard."""

    timestamp_ms: int
    horizon_ms: int
    after_index: int


def _open_at(shard: FakeShard, instant_ms: int) -> bool:
    return shard.opened_ms <= instant_ms and (shard.closed_ms is None or shard.closed_ms >= instant_ms)


SHARD_FILTERS: Final[dict[str, Callable[[FakeShard, _Moment], bool]]] = {
    "AFTER_SHARD_ID": lambda shard, moment: shard.index > moment.after_index,
    "AT_LATEST": lambda shard, _: shard.closed_ms is None,
    # Open at the horizon, or the first of its line: a young stream has no shard as old as the horizon.
    "AT_TRIM_HORIZON": lambda shard, moment: shard.parent_shard_id is None or _open_at(shard, moment.horizon_ms),
    "FROM_TRIM_HORIZON": lambda _shard, _moment: True,
    "AT_TIMESTAMP": lambda shard, moment: _open_at(shard, moment.timestamp_ms),
    "FROM_TIMESTAMP": lambda shard, moment: shard.closed_ms is None or shard.closed_ms >= moment.timestamp_ms,
}


def selects(shard_filter: ShardFilter, shard: FakeShard, *, horizon_ms: int, after_index: int) -> bool:
    """Return whether a listing with this filter names `shard`; `after_index` is the number of its ShardId."""
    moment = _Moment(max(shard_filter.timestamp_ms or 0, horizon_ms), horizon_ms, after_index)
    return SHARD_FILTERS[shard_filter.type](shard, moment)
