"""What the service checks before it changes a stream's shards."""

from kpl_core.testing.fake_shard import FakeShard
from kpl_core.testing.fake_stream import FakeStream
from kpl_core.testing.fault_effects import MergeDuringRequest, SplitDuringRequest
from kpl_core.testing.kinesis_error import INVALID_ARGUMENT, LIMIT_EXCEEDED, KinesisError

__all__ = ["checked_merge", "checked_shard_count", "checked_split", "reshard_at_once"]


def checked_split(stream: FakeStream, shard_id: str, new_starting_hash_key: int) -> FakeShard:
    """Return the shard that SplitShard may split there.

    Raises:
        KinesisError: the shard is not open, or the hash key is not inside its range.
    """
    shard = stream.open_shard(shard_id)
    if not shard.starting_hash_key + 1 < new_starting_hash_key < shard.ending_hash_key:
        message = (
            f"NewStartingHashKey {new_starting_hash_key} used in SplitShard() on shard {shard.shard_id} in {stream} "
            f"is not both greater than one plus the shard's StartingHashKey {shard.starting_hash_key} "
            f"and less than the shard's EndingHashKey {shard.ending_hash_key}."
        )
        raise KinesisError(INVALID_ARGUMENT, message)
    return shard


def checked_merge(stream: FakeStream, shard_id: str, adjacent_shard_id: str) -> tuple[FakeShard, FakeShard]:
    """Return the two neighbours that MergeShards may merge; the first one's range comes first.

    Raises:
        KinesisError: one is not open, or the second does not follow the first.
    """
    shard, adjacent = stream.open_shard(shard_id), stream.open_shard(adjacent_shard_id)
    if stream.shards.neighbour(shard) is not adjacent:
        message = (
            f"Shards {shard.shard_id} and {adjacent.shard_id} in {stream} "
            f"are not an adjacent pair of shards eligible for merging"
        )
        raise KinesisError(INVALID_ARGUMENT, message)
    return shard, adjacent


def checked_shard_count(stream: FakeStream, target: int, *, room: int) -> None:
    """Refuse a target that UpdateShardCount would refuse; `room` is what the account may still open.

    Raises:
        KinesisError: LimitExceededException, more than double, less than half, or above the account's limit.
    """
    now_open = len(stream.shards.open)
    counts = f"Current open shard count: {now_open}, Target shard count: {target}"
    if target > now_open * 2:
        message = f"UpdateShardCount cannot scale up over double your current open shard count. {counts}"
        raise KinesisError(LIMIT_EXCEEDED, message)
    if target * 2 < now_open:
        message = f"UpdateShardCount cannot scale down below half your current open shard count. {counts}"
        raise KinesisError(LIMIT_EXCEEDED, message)
    if target - now_open > room:
        limit = now_open + room
        message = f"Target shard count or number of open shards cannot be greater than {limit}. {counts}"
        raise KinesisError(LIMIT_EXCEEDED, message)


def reshard_at_once(stream: FakeStream, effect: SplitDuringRequest | MergeDuringRequest, now_ms: int) -> None:
    """Carry out an armed split or merge between two moments of one request.

    A shard that is not open, or has no neighbour or no middle, is left as it is: the fault is
    spent, as a reshard that somebody else was faster with.
    """
    family = stream.shards
    named = next((shard for shard in family.open if shard.shard_id == effect.shard_id), None)
    if isinstance(effect, SplitDuringRequest):
        shard = family.widest() if effect.shard_id is None else named
        if shard is not None and shard.ending_hash_key > shard.starting_hash_key:
            middle = (shard.starting_hash_key + shard.ending_hash_key) // 2 + 1
            family.split(shard, middle, now_ms)
        return
    shard = family.open[0] if effect.shard_id is None else named
    neighbour = None if shard is None else family.neighbour(shard)
    if shard is not None and neighbour is not None:
        family.merge(shard, neighbour, now_ms)
