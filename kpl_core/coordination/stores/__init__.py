"""Opens the store that the URL in `CoordinationOptions.store` names.

To add a store: one file here, one case in `open_store`, and its scheme in `options/coordination_options.py`.

    memory://name
    file:///run/kpl/orders      ?shared=true: for processes of several users in one group
    s3://bucket/prefix/?region=eu-central-1&endpoint_url=http://127.0.0.1:5000
    dynamodb://table/group?region=...
    redis://[user:password@]host:6379/0?group=orders        rediss:// with TLS, unix:///run/redis.sock

Only the packages that the URL needs are imported.
"""

from pathlib import Path
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import parse_qsl, unquote, urlencode, urlsplit, urlunsplit

from kpl_core.coordination.store import CoordinationStore, MemoryStore
from kpl_core.errors import ConfigError

if TYPE_CHECKING:
    from aiobotocore.session import AioSession

__all__ = ["open_store"]

DEFAULT_GROUP: Final = "default"
# A sync must fail within seconds; it is retried anyway.
_CONNECT_SECONDS: Final = 2.0
_ATTEMPTS: Final = 2


async def open_store(
    url: str, *, session: "AioSession | None" = None, client_options: dict[str, Any] | None = None
) -> CoordinationStore:
    """Open the store that a URL names; close it with `aclose`.

    Args:
        url: see the module.
        session: for S3 and DynamoDB; None: botocore's default credentials.
        client_options: options of their clients, such as credentials and region; those in the URL take precedence.

    Raises:
        ConfigError: the URL is incomplete, or a package is not installed.
    """
    parts = urlsplit(url)
    query = dict(parse_qsl(parts.query))
    match parts.scheme:
        case "memory":
            return MemoryStore.named(parts.netloc + parts.path)
        case "file":
            return _file_store(parts.netloc, unquote(parts.path), query)
        case "s3" | "dynamodb":
            options = {**(client_options or {})}
            if "region" in query:
                options["region_name"] = query["region"]
            if "endpoint_url" in query:
                options["endpoint_url"] = query["endpoint_url"]
            return await _aws_store(parts.scheme, parts.netloc, parts.path.removeprefix("/"), session, options)
        case "redis" | "rediss" | "unix":
            group = query.pop("group", DEFAULT_GROUP)
            return _redis_store(urlunsplit(parts._replace(query=urlencode(query))), group)
    message = "store is not a URL of a known kind; see docs/howto/coordination.md"
    raise ConfigError(message)


def _file_store(host: str, path: str, query: dict[str, str]) -> CoordinationStore:
    from kpl_core.coordination.stores.file import FileStore  # noqa: PLC0415 - fcntl is not everywhere

    if host or len(path) <= 1:
        message = f"store is 'file://{host}{path}'; give the full path of a folder, as in file:///run/kpl/orders"
        raise ConfigError(message)
    shared = query.pop("shared", "false")
    if query or shared not in {"true", "false"}:
        message = f"store is the folder {path} with an unknown parameter; it may have ?shared=true"
        raise ConfigError(message)
    return FileStore(Path(path), shared=shared == "true")


async def _aws_store(
    service: str, place: str, rest: str, session: "AioSession | None", options: dict[str, Any]
) -> CoordinationStore:
    from aiobotocore.config import AioConfig  # noqa: PLC0415 - slow to import
    from aiobotocore.session import get_session  # noqa: PLC0415

    from kpl_core.coordination.stores.dynamodb import DynamoDbStore  # noqa: PLC0415
    from kpl_core.coordination.stores.s3 import S3Store  # noqa: PLC0415

    if not place:
        what = "s3://bucket/prefix/" if service == "s3" else "dynamodb://table/group"
        message = f"store names no {'bucket' if service == 's3' else 'table'}; write it as {what}"
        raise ConfigError(message)
    config = AioConfig(
        connect_timeout=_CONNECT_SECONDS,
        read_timeout=_CONNECT_SECONDS,
        retries={"total_max_attempts": _ATTEMPTS, "mode": "standard"},
    )
    context = (session or get_session()).create_client(service, config=config, **options)
    client = await context.__aenter__()

    async def close() -> None:
        await context.__aexit__(None, None, None)

    if service == "s3":
        return S3Store(client, place, rest, close=close)
    return DynamoDbStore(client, place, rest.strip("/") or DEFAULT_GROUP, close=close)


def _redis_store(url: str, group: str) -> CoordinationStore:
    try:
        from redis import asyncio as redis_asyncio  # noqa: PLC0415 - an extra

        from kpl_core.coordination.stores.redis import RedisStore  # noqa: PLC0415
    except ImportError as error:
        message = "store is in Redis and the package redis is not installed; pip install 'kpl-integrations[redis]'"
        raise ConfigError(message) from error
    client = redis_asyncio.Redis.from_url(url, socket_connect_timeout=_CONNECT_SECONDS, socket_timeout=_CONNECT_SECONDS)
    return RedisStore(client, group, owns_client=True)
