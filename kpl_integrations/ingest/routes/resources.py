"""The resources for GET: health, metrics, statistics and the OpenAPI description. None of them calls AWS."""

import math
import re
import time
from collections.abc import Awaitable, Callable
from typing import Final

import anyio
import msgspec

from kpl_integrations.asgi.protocol import Scope
from kpl_integrations.ingest.http.answers import Headers
from kpl_integrations.ingest.http.request_head import header_fields
from kpl_integrations.ingest.open_gateway import OpenGateway
from kpl_integrations.ingest.stats import EXPOSITION_TYPE, GatewayStats, exposition

Resource = Callable[[Scope], Awaitable[tuple[int, Headers, bytes]]]

# As Kubernetes' own servers: the member counts, whatever its value.
_VERBOSE: Final = re.compile(rb"(?:^|&)verbose(?:[=&]|$)")
_JSON: Final = (b"content-type", b"application/json")
# Collected metrics are sent again for so many times as long as collecting them took. So clients that ask for them all
# the time use about a tenth of the CPU time. The measured time includes other work of the event loop while the metrics
# of other workers arrive, so the reuse has a bound.
_REUSE_FACTOR: Final = 9.0
_MOST_REUSE_SECONDS: Final = 1.0


class Resources:
    """The handlers of one open gateway, by path. `description` is its OpenAPI document in JSON."""

    def __init__(self, opened: OpenGateway, stats: GatewayStats, description: bytes) -> None:
        self._opened = opened
        self._stats = stats
        self._description = description
        # The last collected metrics, and from when on the next request collects new ones.
        self._collected, self._collect_at = b"", -math.inf
        self._collecting = anyio.Lock()
        self.by_path: dict[str, Resource] = {
            "/livez": self._livez,
            "/readyz": self._readyz,
            "/metrics": self._metrics,
            "/v1/stats": self._statistics,
            "/openapi.json": self._openapi,
        }

    async def _livez(self, _scope: Scope) -> tuple[int, Headers, bytes]:
        return 200, [_JSON], b'{"status":"alive"}'

    async def _readyz(self, scope: Scope) -> tuple[int, Headers, bytes]:
        status, document = self._opened.parts.readiness(verbose=_VERBOSE.search(scope["query_string"]) is not None)
        return status, [_JSON], msgspec.json.encode(document)

    async def _metrics(self, _scope: Scope) -> tuple[int, Headers, bytes]:
        async with self._collecting:
            if time.monotonic() >= self._collect_at:
                started = time.thread_time()
                self._collected = exposition((await self._stats.totals()).families)
                reuse_seconds = min(_REUSE_FACTOR * (time.thread_time() - started), _MOST_REUSE_SECONDS)
                self._collect_at = time.monotonic() + reuse_seconds
        return 200, [(b"content-type", EXPOSITION_TYPE.encode())], self._collected

    async def _statistics(self, scope: Scope) -> tuple[int, Headers, bytes]:
        opened = self._opened
        headers = header_fields(scope["headers"])
        if not opened.directory.verifies or opened.is_administrator(scope, headers):
            document: object = (await self._stats.totals()).stats.with_busiest_tenants()
        else:
            account = opened.account_of(scope, headers)
            document = (await self._stats.tenant_stats(account)).document_for(account.tenant.id)
        return 200, [_JSON, (b"cache-control", b"no-store")], msgspec.json.encode(document)

    async def _openapi(self, _scope: Scope) -> tuple[int, Headers, bytes]:
        return 200, [_JSON], self._description
