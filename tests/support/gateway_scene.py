"""A gateway in front of a fake Kinesis, and a client that speaks ASGI to it without a socket."""

import json
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any, NamedTuple

from kpl_core import Config
from kpl_core.testing import FakeKinesis
from kpl_core.testing.fake_transport import FakeTransport
from kpl_integrations.ingest import IngestGateway, load_settings
from kpl_integrations.ingest.tenants import AccessKey, OpenTenants, Tenant, TenantDirectory

STREAM = "orders"
JSON = "application/json"
NDJSON = "application/x-ndjson"


class KnownTenants:
    """A directory whose tenants' API keys are their ids."""

    verifies = True

    def __init__(self, *tenants: Tenant, unknown: Tenant | None = None) -> None:
        self.unknown = unknown
        self._tenants = {tenant.id: tenant for tenant in tenants}

    def authenticate(self, authorization: str | None) -> Tenant | None:
        if authorization is None:
            return self.unknown
        return self._tenants.get(authorization.removeprefix("Bearer "))

    def access_key(self, access_key_id: str) -> AccessKey | None:
        return None

    def by_id(self, tenant_id: str) -> Tenant | None:
        return self._tenants.get(tenant_id)

    def tenants(self) -> Sequence[Tenant]:
        return list(self._tenants.values())

    def change(self, tenant: Tenant) -> None:
        self._tenants[tenant.id] = tenant

    def reload_if_changed(self) -> bool:
        return False


class Answer(NamedTuple):
    status: int
    headers: dict[str, str]
    body: bytes

    def json(self) -> Any:
        return json.loads(self.body)


class Client:
    """A client of one tenant, or one without credentials."""

    def __init__(self, gateway: IngestGateway, tenant: str | None = None) -> None:
        self._gateway = gateway
        self._tenant = tenant

    async def call(
        self,
        method: str,
        path: str,
        body: bytes = b"",
        *,
        headers: Mapping[str, str] | None = None,
        pieces: Sequence[bytes] | None = None,
    ) -> Answer:
        path, _, query = path.partition("?")
        fields = {"host": "gateway", "content-length": str(len(body)), **(headers or {})}
        if self._tenant is not None:
            fields.setdefault("authorization", f"Bearer {self._tenant}")
        messages = [
            {"type": "http.request", "body": piece, "more_body": index + 1 < len(pieces or [body])}
            for index, piece in enumerate(pieces or [body])
        ]
        sent: list[Any] = []

        async def receive() -> Any:
            return messages.pop(0)

        async def send(message: Any) -> None:
            sent.append(message)

        scope = {
            "type": "http",
            "method": method,
            "path": path,
            "query_string": query.encode(),
            "headers": [(name.lower().encode(), value.encode("latin-1")) for name, value in fields.items()],
        }
        await self._gateway(scope, receive, send)
        start, *rest = sent
        answered = b"".join(message.get("body", b"") for message in rest)
        fields = {name.decode(): value.decode() for name, value in start["headers"]}
        assert int(fields["content-length"]) == len(answered) or method == "HEAD"
        return Answer(start["status"], fields, answered)

    async def get(self, path: str, **headers: str) -> Answer:
        return await self.call("GET", path, headers=headers)

    async def post(self, records: Any, *, ack: str = "", stream: str = STREAM, **headers: str) -> Answer:
        """Post one record, or a list of them."""
        body = json.dumps({"records": records} if isinstance(records, list) else records).encode()
        query = f"?ack={ack}" if ack else ""
        fields = {name.replace("_", "-"): value for name, value in headers.items()}
        return await self.call(
            "POST", f"/v1/streams/{stream}/records{query}", body, headers={"content-type": JSON, **fields}
        )


def records(count: int, *, size: int = 20, first: int = 0, keys: int = 50) -> list[dict[str, str]]:
    return [
        {"partition_key": f"k{number % keys}", "data": str(number).ljust(size, ".")}
        for number in range(first, first + count)
    ]


def kinesis(shards: int = 1, *, latency_seconds: float = 0.01, **options: Any) -> FakeTransport:
    return FakeTransport(FakeKinesis({STREAM: shards}, **options), latency_seconds=latency_seconds)


def gateway_of(
    transport: FakeTransport,
    directory: TenantDirectory | None = None,
    *,
    config: Config | None = None,
    chance: Callable[[], float] = lambda: 0.0,
    **settings: Any,
) -> IngestGateway:
    """Return a gateway, without jitter unless `chance` says otherwise."""
    return IngestGateway(
        load_settings(**settings),
        OpenTenants(Tenant(id="local")) if directory is None else directory,
        transport=transport,
        config=config,
        chance=chance,
    )


@asynccontextmanager
async def open_gateway(
    transport: FakeTransport | None = None, directory: TenantDirectory | None = None, **options: Any
) -> AsyncIterator[IngestGateway]:
    async with gateway_of(kinesis() if transport is None else transport, directory, **options) as gateway:
        yield gateway
