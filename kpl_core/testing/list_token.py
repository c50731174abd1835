"""Continuation tokens and shard iterators: opaque to the client, readable here.

Each is the URL-safe base64 of a JSON array whose first member names its kind, so that a token of
another kind, or one made up, is refused.
"""

from base64 import urlsafe_b64decode, urlsafe_b64encode
from typing import Final, NamedTuple, TypeVar

import msgspec

__all__ = ["LIFETIME_MS", "ShardIterator", "ShardListToken", "StreamListToken", "decode_token", "encode_token"]

# API_ListShards and API_GetShardIterator: both expire after 300 seconds.
LIFETIME_MS: Final = 300_000


class ShardListToken(NamedTuple):
    """Where a listing of shards goes on: the filter it began with and the last shard it named."""

    stream_name: str
    filter_type: str
    filter_shard_id: str | None
    filter_timestamp_ms: int | None
    after_index: int
    page: int
    issued_ms: int


class StreamListToken(NamedTuple):
    """Where a listing of streams goes on."""

    after_stream_name: str
    issued_ms: int


class ShardIterator(NamedTuple):
    """Where a reader stands in a shard: before the record at `position`."""

    stream_name: str
    shard_index: int
    position: int
    issued_ms: int


_Token = TypeVar("_Token", ShardListToken, StreamListToken, ShardIterator)


def encode_token(token: ShardListToken | StreamListToken | ShardIterator) -> str:
    """Return the opaque text of a token."""
    return urlsafe_b64encode(msgspec.json.encode([type(token).__name__, token])).decode()


def decode_token(text: str, kind: type[_Token]) -> _Token | None:
    """Return the token, None when it is no token of that kind."""
    try:
        named = msgspec.json.decode(urlsafe_b64decode(text), type=tuple[str, msgspec.Raw])
        return msgspec.json.decode(named[1], type=kind) if named[0] == kind.__name__ else None
    except (ValueError, msgspec.DecodeError):
        return None
