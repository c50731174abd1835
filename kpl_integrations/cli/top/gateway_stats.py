"""What a gateway says of itself at `/v1/stats`, asked over HTTP; what is in the way is said in one sentence."""

from collections.abc import Mapping
from typing import Final
from urllib.parse import urlsplit

import aiohttp
import msgspec

from kpl_integrations.cli.exit_code import CommandFailure, ExitCode
from kpl_integrations.gateway_figures import RecordStats, Room, StreamStats, TenantStats

__all__ = ["GatewayStats", "ask", "require_url"]

_SECONDS: Final = 5.0
_KEY_VARIABLE: Final = "KPL_GATEWAY_KEY"
_LARGEST_ANSWER: Final = 16 * 1024 * 1024


class GatewayStats(msgspec.Struct, frozen=True, kw_only=True):
    """The document; with a tenant's key it has that tenant alone, and `records` is None."""

    state: str
    tenants: Mapping[str, TenantStats] = {}
    records: RecordStats | None = None
    room: Room | None = None
    answers: Mapping[str, int] = {}
    refusals: Mapping[str, int] = {}
    streams: Mapping[str, StreamStats] = {}


async def ask(session: aiohttp.ClientSession, url: str, key: str | None) -> GatewayStats:
    """Return what the gateway at `url` says now.

    Raises:
        CommandFailure: it cannot be reached, wants another key, or is no gateway.
    """
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    try:
        async with session.get(
            f"{url}/v1/stats", headers=headers, timeout=aiohttp.ClientTimeout(_SECONDS), allow_redirects=False
        ) as answer:
            body = await answer.content.read(_LARGEST_ANSWER)
            status = answer.status
    except (aiohttp.ClientError, TimeoutError) as error:
        message = f"no gateway answers at {url}; check the address, or start one with `kpl serve`"
        raise CommandFailure(message) from error
    if status in {401, 403}:
        message = f"the gateway at {url} wants a key; set {_KEY_VARIABLE} to its admin key, or to a tenant's own"
        raise CommandFailure(message)
    try:
        return msgspec.json.decode(body, type=GatewayStats)
    except msgspec.DecodeError as error:
        message = f"what answers at {url} (status {status}) is no gateway; give the address that `kpl serve` printed"
        raise CommandFailure(message) from error


def require_url(url: str) -> None:
    """Check that it can be the address of a gateway.

    Raises:
        CommandFailure: it is no URL.
    """
    try:
        parts = urlsplit(url)
        is_url = parts.scheme in {"http", "https"} and bool(parts.hostname) and parts.port != 0
    except ValueError:
        is_url = False
    if not is_url:
        message = f"{url!r} is no address of a gateway; write it like http://127.0.0.1:8080"
        raise CommandFailure(message, exit_code=ExitCode.WRONG_USAGE)
