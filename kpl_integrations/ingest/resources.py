"""What can be looked at: health, metrics, counts and the description. Nothing here calls AWS."""

from collections.abc import Callable
from hmac import compare_digest
from typing import TYPE_CHECKING

import msgspec

from kpl_core import Producer
from kpl_integrations.asgi.health import ProducerHealth, ReadinessAnswer, readiness_body
from kpl_integrations.asgi.protocol import Scope
from kpl_integrations.ingest.openapi import openapi_document
from kpl_integrations.ingest.records_route import account_of
from kpl_integrations.ingest.stats import stats_document

if TYPE_CHECKING:
    from kpl_integrations.ingest.gateway import IngestGateway

__all__ = ["Resource", "Resources"]

Headers = list[tuple[bytes, bytes]]
Resource = Callable[[Scope], tuple[int, Headers, bytes]]

_JSON = (b"content-type", b"application/json")


class Resources:
    """Answers GET for one open gateway."""

    def __init__(self, gateway: "IngestGateway") -> None:
        self._gateway = gateway
        self._settings = gateway.settings
        self._description = msgspec.json.encode(openapi_document(gateway.settings))
        self.health = ProducerHealth(gateway.producer, checks={"door": self._door})
        self.by_path: dict[str, Resource] = {
            "/livez": self._livez,
            "/readyz": self._readyz,
            "/metrics": self._metrics,
            "/v1/stats": self._stats,
            "/openapi.json": self._openapi,
        }

    def _livez(self, _scope: Scope) -> tuple[int, Headers, bytes]:
        return 200, [_JSON], b'{"status":"alive"}'

    def _readyz(self, _scope: Scope) -> tuple[int, Headers, bytes]:
        status, document = readiness_body(self.health.readiness())
        return status, [_JSON], msgspec.json.encode(document)

    def _door(self, _producer: Producer) -> ReadinessAnswer:
        state = self._gateway.intake.state
        return ReadinessAnswer(state == "open", state)

    def _metrics(self, _scope: Scope) -> tuple[int, Headers, bytes]:
        body, content_type = self._gateway.metrics.exposition()
        return 200, [(b"content-type", content_type.encode())], body

    def _stats(self, scope: Scope) -> tuple[int, Headers, bytes]:
        gateway = self._gateway
        headers = dict(scope["headers"])
        if self.is_admin(headers):
            document = stats_document(gateway, gateway.accounts)
        else:
            account = account_of(headers, gateway.directory, gateway.accounts)
            document = stats_document(gateway, [account], of_all=not gateway.directory.verifies)
        return 200, [_JSON, (b"cache-control", b"no-store")], msgspec.json.encode(document)

    def is_admin(self, headers: dict[bytes, bytes]) -> bool:
        """Say whether these header fields show the admin key."""
        key = self._settings.admin_key
        if key is None:
            return False
        given = headers.get(b"authorization", b"").removeprefix(b"Bearer ")
        return compare_digest(given, key.get_secret_value().encode())

    def _openapi(self, _scope: Scope) -> tuple[int, Headers, bytes]:
        return 200, [_JSON], self._description
