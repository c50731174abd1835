"""A store in Redis 5 or later: one hash, and three short Lua scripts that Redis runs one at a time.

Only this file imports the redis package (the extra `redis`). Every answer carries Redis's own clock. The hash expires a
day after the last write.
"""

import re
from collections.abc import Awaitable
from typing import Any, Final, NamedTuple, cast
from urllib.parse import urlencode, urlunsplit

from redis import asyncio as redis_asyncio, exceptions

from kpl_core.coordination.store import (
    ABSENT,
    CONNECT_SECONDS,
    DEFAULT_GROUP,
    Listing,
    Reading,
    StoreAddress,
    StoreFailed,
    Written,
)

EXPIRES_AFTER_SECONDS: Final = 86_400
# A value is its version, a colon and the body. A version is the server's time in microseconds, or the latest version
# plus one if that is more. The latest version is in the hash under a name that no object has, so no version repeats,
# not even after a flush, a restart or a failover to a stale replica.
_COUNTER: Final = ":versions"
_NOW: Final = "local t = redis.call('TIME'); local now = t[1] .. '.' .. string.format('%06d', t[2])\n"
_READ: Final = _NOW + "return {redis.call('HGET', KEYS[1], ARGV[1]), now}"
_WRITE: Final = (
    _NOW
    + """
if ARGV[3] == 'if' then
  local old = redis.call('HGET', KEYS[1], ARGV[1])
  local version = old and (string.match(old, '^(%d+):') or '?') or ''
  if version ~= ARGV[4] then return {'', now} end
end
local latest = tonumber(redis.call('HGET', KEYS[1], ARGV[5]) or '') or 0
local version = string.format('%.0f', math.max(latest + 1, t[1] * 1000000 + t[2]))
redis.call('HSET', KEYS[1], ARGV[5], version, ARGV[1], version .. ':' .. ARGV[2])
redis.call('EXPIRE', KEYS[1], ARGV[6])
return {version, now}
"""
)
_READ_ALL: Final = _NOW + "return {redis.call('HGETALL', KEYS[1]), now}"


class _Row(NamedTuple):
    """An error of the server: its code, redis-py's exception for it, and what a script's error says in its place."""

    code: str
    reason: str
    remedy: str
    own_exception: type[Exception] | None = None
    in_scripts: str | None = None

    def matches(self, error: exceptions.ResponseError) -> bool:
        # redis-py takes the code from the text of its own exceptions.
        if self.own_exception is not None and isinstance(error, self.own_exception):
            return True
        return re.search(rf"\b({self.in_scripts or self.code})\b", str(error)) is not None


_CREDENTIALS: Final = "check user, password and rights"
_ROWS: Final = (
    _Row("NOPERM", "denied", _CREDENTIALS, exceptions.NoPermissionError, "ACL failure|user executing the script"),
    _Row("NOAUTH", "denied", _CREDENTIALS),
    _Row("WRONGPASS", "denied", _CREDENTIALS),
    _Row("READONLY", "down", "name the primary, this is a replica", exceptions.ReadOnlyError),
    _Row("OOM", "limit", "give the server more memory", exceptions.OutOfMemoryError),
    _Row("WRONGTYPE", "garbage", "use another group, another program uses this key"),
)


async def open_store(address: StoreAddress) -> "RedisStore":
    """Open `redis://host:6379/0?group=...`; the rest of the query is for the client."""
    group = address.query.pop("group", DEFAULT_GROUP)
    url = urlunsplit(address.parts._replace(query=urlencode(address.query)))
    client = redis_asyncio.Redis.from_url(url, socket_connect_timeout=CONNECT_SECONDS, socket_timeout=CONNECT_SECONDS)
    return RedisStore(client, group, owns_client=True)


class RedisStore:
    """Objects of one group. asyncio only, like its client.

    Args:
        client: created with `decode_responses=False`, the default.
        group: the name of the hash; workers that share streams use the same group.
        owns_client: whether `aclose` closes the client.
    """

    def __init__(self, client: "redis_asyncio.Redis", group: str, *, owns_client: bool = False) -> None:
        self._client = client
        self._owns_client = owns_client
        self._hash = f"kpl:coordination:{group}"
        self._place = f"redis group {group}"

    async def _run(self, script: str, *arguments: str | bytes | int) -> list[Any]:
        try:
            # redis-py has one type for the sync and the async client.
            answer = cast("Awaitable[list[Any]]", self._client.eval(script, 1, self._hash, *arguments))
            return await answer
        except (exceptions.RedisError, OSError, TimeoutError) as error:
            raise _failed(self._place, error) from error

    async def read(self, name: str) -> Reading:
        """Return one object: one EVAL."""
        value, now = await self._run(_READ, name)
        if value is None:
            return Reading(None, ABSENT, float(now))
        version, body = _parted(value, self._place)
        return Reading(body, version, float(now))

    async def write(self, name: str, body: bytes, *, expected: str | None = None) -> Written:
        """Write an object if it has the expected version: one EVAL."""
        condition = ("any", "") if expected is None else ("if", expected)
        version, now = await self._run(_WRITE, name, body, *condition, _COUNTER, EXPIRES_AFTER_SECONDS)
        return Written(version.decode() or None, float(now))

    async def read_all(self, prefix: str) -> Listing:
        """Return all objects whose names begin with `prefix`: one EVAL."""
        flat, now = await self._run(_READ_ALL)
        bodies: dict[str, bytes] = {}
        for name, value in zip(flat[::2], flat[1::2], strict=True):
            if name.startswith(prefix.encode()) and name != _COUNTER.encode():
                # Objects of another program fail later, where they are decoded and reported.
                bodies[name.decode(errors="replace")] = value.partition(b":")[2]
        return Listing(bodies, float(now))

    async def delete(self, name: str) -> None:
        """Remove an object: one HDEL."""
        await self._run("return {redis.call('HDEL', KEYS[1], ARGV[1])}", name)

    async def aclose(self) -> None:
        """Close the client if it is this store's own."""
        if self._owns_client:
            await self._client.aclose()


def _parted(value: bytes, place: str) -> tuple[str, bytes]:
    version, colon, body = value.partition(b":")
    if not colon or not version.isdigit():
        message = f"{place}: another program writes to its hash; use another group"
        raise StoreFailed(message, reason="garbage")
    return version.decode(), body


def _failed(place: str, error: BaseException) -> StoreFailed:
    if isinstance(error, exceptions.AuthenticationError | exceptions.AuthorizationError):
        return StoreFailed(f"{place}: {type(error).__name__}; {_CREDENTIALS}", reason="denied")
    for row in _ROWS:
        if isinstance(error, exceptions.ResponseError) and row.matches(error):
            return StoreFailed(f"{place}: {row.code}; {row.remedy}", reason=row.reason)
    return StoreFailed(f"{place}: {type(error).__name__}; check the server and the network", reason="down")
