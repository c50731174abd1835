"""ListShards: the pages of one listing, each carrying the whole listing in its token."""

from kpl_core.options.kinesis_limits import SHARDS_PER_PAGE
from kpl_core.testing.fake_shard import FakeShard
from kpl_core.testing.fake_stream import FakeStream
from kpl_core.testing.kinesis_answers import ShardDescription, ShardPage
from kpl_core.testing.kinesis_error import INVALID_ARGUMENT, KinesisError
from kpl_core.testing.list_token import ShardListToken, decode_token, encode_token
from kpl_core.testing.shard_filter import ShardFilter, selects

__all__ = ["continued_listing", "describe_shard", "listing_of", "new_listing", "shard_page"]


def describe_shard(shard: FakeShard) -> ShardDescription:
    """Return one shard as the service describes it."""
    return ShardDescription(
        shard_id=shard.shard_id,
        starting_hash_key=shard.starting_hash_key,
        ending_hash_key=shard.ending_hash_key,
        starting_sequence_number=shard.starting_sequence_number,
        ending_sequence_number=shard.ending_sequence_number,
        parent_shard_id=shard.parent_shard_id,
        adjacent_parent_shard_id=shard.adjacent_parent_shard_id,
    )


def new_listing(
    stream: FakeStream, *, shard_filter: ShardFilter | None, exclusive_start_shard_id: str | None, now_ms: int
) -> ShardListToken:
    """Return a listing before its first page.

    Raises:
        KinesisError: the filter lacks its argument, or the start is no shard.
    """
    wanted = shard_filter or ShardFilter()
    wanted.check()
    after = -1 if exclusive_start_shard_id is None else stream.shard(exclusive_start_shard_id).index
    return ShardListToken(stream.name, wanted.type, wanted.shard_id, wanted.timestamp_ms, after, 1, now_ms)


def continued_listing(next_token: str, **beside: object) -> ShardListToken:
    """Return the listing a token stands for; nothing that the token already says may stand beside it.

    Raises:
        KinesisError: InvalidArgumentException.
    """
    for member, value in beside.items():
        if value is not None:
            raise KinesisError(INVALID_ARGUMENT, f"NextToken and {member} cannot be provided together.")
    token = decode_token(next_token, ShardListToken)
    if token is None:
        raise KinesisError(INVALID_ARGUMENT, "NextToken is invalid.")
    return token


def listing_of(next_token: str | None) -> tuple[str | None, int]:
    """Return the stream a token is about and which page, counted from 1, it asks for."""
    token = None if next_token is None else decode_token(next_token, ShardListToken)
    return (None, 1) if token is None else (token.stream_name, token.page)


def shard_page(stream: FakeStream, listing: ShardListToken, *, max_results: int, now_ms: int) -> ShardPage:
    """Return the next page of a listing: at most `max_results` and 1,000 shards."""
    shard_filter = ShardFilter(listing.filter_type, listing.filter_shard_id, listing.filter_timestamp_ms)
    after_filter = -1 if shard_filter.shard_id is None else stream.shard(shard_filter.shard_id).index
    horizon_ms = stream.horizon_ms(now_ms)
    shards = [
        shard
        for shard in stream.shards.listed(horizon_ms)
        if shard.index > listing.after_index
        and selects(shard_filter, shard, horizon_ms=horizon_ms, after_index=after_filter)
    ]
    page = shards[: min(max_results, SHARDS_PER_PAGE)]
    described = tuple(describe_shard(shard) for shard in page)
    if len(page) == len(shards):
        return ShardPage(described, None)
    following = listing._replace(after_index=page[-1].index, page=listing.page + 1, issued_ms=now_ms)
    return ShardPage(described, encode_token(following))
