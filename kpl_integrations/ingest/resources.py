"""What can be looked at: health, metrics, counts and the description. Nothing here calls AWS."""

from collections.abc import Awaitable, Callable
from typing import Final

import msgspec

from kpl_core import Producer
from kpl_integrations.asgi.health import ProducerHealth, ReadinessAnswer, readiness_body
from kpl_integrations.asgi.protocol import Scope
from kpl_integrations.ingest.http.header_fields import header_fields
from kpl_integrations.ingest.http.http_answer import Headers
from kpl_integrations.ingest.open_gateway import OpenGateway
from kpl_integrations.ingest.openapi.openapi import openapi_document
from kpl_integrations.ingest.routes.records_route import account_of
from kpl_integrations.ingest.stats.metrics import EXPOSITION_TYPE, exposition
from kpl_integrations.ingest.stats.totals import GatewayStats

__all__ = ["Resource", "Resources"]

Resource = Callable[[Scope], Awaitable[tuple[int, Headers, bytes]]]

_JSON: Final = (b"content-type", b"application/json")


class Resources:
    """Answers GET for one open gateway."""

    def __init__(self, opened: OpenGateway, gateway_stats: GatewayStats) -> None:
        self._opened = opened
        self._gateway_stats = gateway_stats
        self._description = msgspec.json.encode(openapi_document(opened.settings))
        self.health = ProducerHealth(opened.producer, checks={"door": self._door})
        self.by_path: dict[str, Resource] = {
            "/livez": self._livez,
            "/readyz": self._readyz,
            "/metrics": self._metrics,
            "/v1/stats": self._stats,
            "/openapi.json": self._openapi,
        }

    async def _livez(self, _scope: Scope) -> tuple[int, Headers, bytes]:
        return 200, [_JSON], b'{"status":"alive"}'

    async def _readyz(self, _scope: Scope) -> tuple[int, Headers, bytes]:
        status, document = readiness_body(self.health.readiness())
        return status, [_JSON], msgspec.json.encode(document)

    def _door(self, _producer: Producer) -> ReadinessAnswer:
        state = self._opened.intake.state
        return ReadinessAnswer(state == "open", state)

    async def _metrics(self, _scope: Scope) -> tuple[int, Headers, bytes]:
        totals = await self._gateway_stats.totals()
        return 200, [(b"content-type", EXPOSITION_TYPE.encode())], exposition(totals.families)

    async def _stats(self, scope: Scope) -> tuple[int, Headers, bytes]:
        opened = self._opened
        headers = header_fields(scope["headers"])
        if opened.admin_key.is_shown(headers) or not opened.directory.verifies:
            document = (await self._gateway_stats.totals()).stats.document()
        else:
            account = account_of(headers, opened.directory, opened.accounts)
            document = (await self._gateway_stats.stats_for(account)).document_for(account.tenant.id)
        return 200, [_JSON, (b"cache-control", b"no-store")], msgspec.json.encode(document)

    async def _openapi(self, _scope: Scope) -> tuple[int, Headers, bytes]:
        return 200, [_JSON], self._description
