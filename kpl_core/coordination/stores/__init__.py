"""Opens the store that the URL in `CoordinationOptions.store` names.

    memory://name
    file:///run/kpl/orders      ?shared=true: for processes of several users in one group
    s3://bucket/prefix/?region=eu-central-1&endpoint_url=http://127.0.0.1:5000
    dynamodb://table/group?region=...
    redis://[user:password@]host:6379/0?group=orders        rediss:// with TLS, unix:///run/redis.sock

To add a store: one file here with a store and its `open_store`, and a row of `STORE_MODULES` in
`options/coordination_options.py`. Only the packages that the URL needs are imported.
"""

import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qsl, urlencode, urlsplit

from kpl_core.coordination.store import DEFAULT_GROUP, CoordinationStore, StoreAddress
from kpl_core.errors import ConfigError
from kpl_core.options.coordination_options import STORE_MODULES

if TYPE_CHECKING:
    from aiobotocore.session import AioSession

__all__ = ["open_store", "part_of_store"]


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
    name = STORE_MODULES.get(parts.scheme)
    if name is None:
        message = "store is not a URL of a known kind; see docs/howto/coordination.md"
        raise ConfigError(message)
    try:
        module = import_module(f"kpl_core.coordination.{name}")
    except ModuleNotFoundError as error:
        if error.name in sys.stdlib_module_names:
            message = (
                f"store is a {parts.scheme}:// URL, which needs Python's module {error.name}, and this Python on "
                f"{sys.platform} does not have it; use redis://, s3:// or dynamodb://"
            )
        else:
            message = (
                f"store is a {parts.scheme}:// URL and the package {error.name} is not installed; "
                f"pip install 'kpl-integrations[{error.name}]'"
            )
        raise ConfigError(message) from error
    store: CoordinationStore = await module.open_store(
        StoreAddress(parts, dict(parse_qsl(parts.query)), session, client_options or {})
    )
    return store


def part_of_store(url: str, purpose: str) -> str:
    """Return the URL of a store of its own for one purpose, beside those for others.

    It is a folder below the path (`file`, `s3`), or another group with the purpose at its end.
    """
    parts = urlsplit(url)
    query, host, path = dict(parse_qsl(parts.query, keep_blank_values=True)), parts.netloc, parts.path.rstrip("/")
    match parts.scheme:
        case "file" | "s3":
            path += f"/{purpose}"
        case "dynamodb":
            path = f"{path or f'/{DEFAULT_GROUP}'}-{purpose}"
        case "memory":
            host += f"-{purpose}"
        case _:
            path, query["group"] = parts.path, f"{query.get('group', DEFAULT_GROUP)}-{purpose}"
    return f"{parts.scheme}://{host}{path}{'?' if query else ''}{urlencode(query)}"
