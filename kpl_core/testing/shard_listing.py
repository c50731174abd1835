"""ListShards: which shards a listing includes, its pages, and the tokens that continue it.

A token is opaque to the client: the URL-safe base64 of a JSON array whose first member names the kind of token.
A token of another kind, or one that a client invented, is rejected. Shard iterators are encoded in the same way.
"""

from base64 import urlsafe_b64decode, urlsafe_b64encode
from collections.abc import Callable
from typing import Final, NamedTuple, TypeVar

import msgspec

from kpl_core.options.kinesis_limits import SHARDS_PER_PAGE
from kpl_core.testing.fake_shard import FakeShard
from kpl_core.testing.fake_stream import FakeStream
from kpl_core.testing.kinesis_api import INVALID_ARGUMENT, KinesisError, ShardDescription, ShardPage

# API_ListShards and API_GetShardIterator: both expire after 300 seconds.
LIFETIME_MS: Final = 300_000


class ShardListToken(NamedTuple):
    """Where a listing of shards continues: the filter it started with and the last shard it returned."""

    stream_name: str
    filter_type: str
    filter_shard_id: str | None
    filter_timestamp_ms: int | None
    after_index: int
    page: int
    issued_ms: int


class StreamListToken(NamedTuple):
    """Where a listing of streams continues."""

    after_stream_name: str
    issued_ms: int


class ShardIterator(NamedTuple):
    """The place of a reader in a shard: before the record at `position`."""

    stream_name: str
    shard_index: int
    position: int
    issued_ms: int


_Token = TypeVar("_Token", ShardListToken, StreamListToken, ShardIterator)


def encode_token(token: ShardListToken | StreamListToken | ShardIterator) -> str:
    """Return the opaque text of a token."""
    return urlsafe_b64encode(msgspec.json.encode([type(token).__name__, token])).decode()


def decode_token(text: str, kind: type[_Token]) -> _Token | None:
    """Return the token, or None if the text is not a token of that kind."""
    try:
        named = msgspec.json.decode(urlsafe_b64decode(text), type=tuple[str, msgspec.Raw])
        return msgspec.json.decode(named[1], type=kind) if named[0] == kind.__name__ else None
    except (ValueError, msgspec.DecodeError):
        return None


FROM_TRIM_HORIZON: Final = "FROM_TRIM_HORIZON"


class ShardListingFilter(NamedTuple):
    """ListShards' filter (AWS, API_ShardFilter): its type and the argument that this type needs.

    Timestamps are milliseconds since 1970.
    """

    type: str = FROM_TRIM_HORIZON
    shard_id: str | None = None
    timestamp_ms: int | None = None

    def check(self) -> None:
        """Check that the filter has the argument that its type needs, and no other.

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
    """What a predicate reads besides the shard."""

    timestamp_ms: int
    horizon_ms: int
    after_index: int


def _open_at(shard: FakeShard, instant_ms: int) -> bool:
    return shard.opened_ms <= instant_ms and (shard.closed_ms is None or shard.closed_ms >= instant_ms)


# Filter type -> predicate. A listing only contains shards that may still have records.
SHARD_FILTERS: Final[dict[str, Callable[[FakeShard, _Moment], bool]]] = {
    "AFTER_SHARD_ID": lambda shard, moment: shard.index > moment.after_index,
    "AT_LATEST": lambda shard, _: shard.closed_ms is None,
    # Open at the horizon, or without a parent: no shard of a young stream is as old as the horizon.
    "AT_TRIM_HORIZON": lambda shard, moment: shard.parent_shard_id is None or _open_at(shard, moment.horizon_ms),
    "FROM_TRIM_HORIZON": lambda _shard, _moment: True,
    "AT_TIMESTAMP": lambda shard, moment: _open_at(shard, moment.timestamp_ms),
    "FROM_TIMESTAMP": lambda shard, moment: shard.closed_ms is None or shard.closed_ms >= moment.timestamp_ms,
}


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
    stream: FakeStream, *, shard_filter: ShardListingFilter | None, exclusive_start_shard_id: str | None, now_ms: int
) -> ShardListToken:
    """Return the token of a listing's first page.

    Raises:
        KinesisError: the filter lacks its argument, or the start shard does not exist.
    """
    wanted = shard_filter or ShardListingFilter()
    wanted.check()
    after = -1 if exclusive_start_shard_id is None else stream.shard(exclusive_start_shard_id).index
    return ShardListToken(stream.name, wanted.type, wanted.shard_id, wanted.timestamp_ms, after, 1, now_ms)


def continued_listing(next_token: str, **beside: object) -> ShardListToken:
    """Return the listing that a token continues. `beside` names the arguments that a token excludes.

    Raises:
        KinesisError: InvalidArgumentException, if one of them is not None or the token is invalid.
    """
    for member, value in beside.items():
        if value is not None:
            raise KinesisError(INVALID_ARGUMENT, f"NextToken and {member} cannot be provided together.")
    token = decode_token(next_token, ShardListToken)
    if token is None:
        raise KinesisError(INVALID_ARGUMENT, "NextToken is invalid.")
    return token


def listing_of(next_token: str | None) -> tuple[str | None, int]:
    """Return the stream of a token and the page that it continues with, counted from 1."""
    token = None if next_token is None else decode_token(next_token, ShardListToken)
    return (None, 1) if token is None else (token.stream_name, token.page)


def shard_page(stream: FakeStream, listing: ShardListToken, *, max_results: int, now_ms: int) -> ShardPage:
    """Return the next page of a listing: at most `max_results` shards, and at most 1,000."""
    after_filter = -1 if listing.filter_shard_id is None else stream.shard(listing.filter_shard_id).index
    horizon_ms = stream.horizon_ms(now_ms)
    moment = _Moment(max(listing.filter_timestamp_ms or 0, horizon_ms), horizon_ms, after_filter)
    is_included = SHARD_FILTERS[listing.filter_type]
    shards = [
        shard
        for shard in stream.shards.listed(horizon_ms)
        if shard.index > listing.after_index and is_included(shard, moment)
    ]
    page = shards[: min(max_results, SHARDS_PER_PAGE)]
    described = tuple(describe_shard(shard) for shard in page)
    if len(page) == len(shards):
        return ShardPage(described, None)
    following = listing._replace(after_index=page[-1].index, page=listing.page + 1, issued_ms=now_ms)
    return ShardPage(described, encode_token(following))
