"""An open gateway: the parts that its routes share, created together when the producer is open."""

from collections.abc import Callable
from dataclasses import dataclass

import anyio

from kpl_core import Producer
from kpl_core.transport import KinesisTransport
from kpl_integrations.asgi.protocol import Scope
from kpl_integrations.ingest.admission.admission import Admission
from kpl_integrations.ingest.admission.clients import (
    AddressBudgets,
    ClientRoom,
    LoginAttempts,
    SharedRoom,
    network_of,
)
from kpl_integrations.ingest.admission.refusals import Refusal, Refused
from kpl_integrations.ingest.admission.tenant_account import TenantAccount, TenantAccounts
from kpl_integrations.ingest.http.answers import Tally
from kpl_integrations.ingest.http.correlation import RequestSpans
from kpl_integrations.ingest.http.large_bodies import LargeBodies
from kpl_integrations.ingest.http.read_turns import ReadTurns
from kpl_integrations.ingest.http.request_head import FieldsByName, Server, authorization_of, server_of
from kpl_integrations.ingest.readiness.readyz import PartsWatch
from kpl_integrations.ingest.settings import IngestSettings
from kpl_integrations.ingest.streams.stream_directory import StreamDirectory
from kpl_integrations.ingest.tenants import TenantDirectory
from kpl_integrations.ingest.tenants.credentials import AdminKey, bearer_key


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenGateway:
    """The parts of a gateway from the opening of its producer to its report.

    Unfinished bodies of verified tenants use `verified_room`, those of all others `anonymous_room`. `addresses` bounds
    the refused requests that were not verified. `closing` is set when admission closes; long answers such as event
    streams end then. `large_bodies` decodes those that take long. `spans` starts the spans of requests,
    if there are any. `wall_clock` returns seconds since 1970.
    """

    settings: IngestSettings
    directory: TenantDirectory
    transport: KinesisTransport
    producer: Producer
    accounts: TenantAccounts
    streams: StreamDirectory
    admission: Admission
    verified_room: SharedRoom
    anonymous_room: SharedRoom
    addresses: AddressBudgets
    large_bodies: LargeBodies
    tally: Tally
    admin_key: AdminKey
    login_attempts: LoginAttempts
    read_turns: ReadTurns
    parts: PartsWatch
    closing: anyio.Event
    spans: RequestSpans | None
    wall_clock: Callable[[], float]

    def account_of(self, scope: Scope, headers: FieldsByName) -> TenantAccount:
        """Return the account of the tenant that sent this request with these header fields.

        Raises:
            Refused: credentials are missing or wrong, or the tenant has used more than its share of CPU time.
        """
        account = self.account_shown(authorization_of(headers))
        self.require_cpu_share(account, server_of(scope))
        return account

    def require_cpu_share(self, account: TenantAccount, server: Server | None) -> None:
        """Tell the server whose request this is.

        Raises:
            Refused: the tenant has used more than its share of CPU time, and the request cannot wait.
        """
        if server is not None:
            tenant = account.tenant if self.is_verified(account) else None
            if not server.claim(tenant):
                raise self.admission.over_cpu_share(tenant)

    def is_verified(self, account: TenantAccount) -> bool:
        """Return True if requests of this account have credentials that were checked."""
        return self.directory.verifies and account.tenant is not self.directory.unknown

    def is_administrator(self, scope: Scope, headers: FieldsByName) -> bool:
        """Return True for the admin key. A key that is neither this one nor a tenant's counts as a guess.

        Raises:
            Refused: the client's address has sent too many wrong keys.
        """
        authorization = authorization_of(headers)
        if self.settings.admin_key is None or authorization is None:
            return False
        address, now = client_of(scope), self.admission.now()
        wait = self.login_attempts.wait_seconds(address, now)
        if not wait and self.admin_key.is_shown(headers):
            server = server_of(scope)
            if server is not None:
                server.verified()
            return True
        if self.directory.authenticate(authorization) in {None, self.directory.unknown}:
            if wait:
                detail = f"too many wrong keys came from this address; send the right one after {wait:.0f} s"
                raise Refused(Refusal.WRONG_KEYS, detail, retry_after=wait)
            self.login_attempts.failed(address, now)
        return False

    def room_of(self, account: TenantAccount | None, client: str, server: Server | None) -> ClientRoom:
        """Return the room for the body of a request of this tenant; clients without credentials count by address."""
        watch = None if server is None else server.watch_body
        if account is not None and self.is_verified(account):
            return ClientRoom(self.verified_room, account.flow, watch)
        return ClientRoom(self.anonymous_room, network_of(client), watch)

    def account_shown(self, authorization: str | None) -> TenantAccount:
        """Return the account for the value of an Authorization header; raises as `account_of`."""
        tenant = self.directory.authenticate(authorization)
        if tenant is None:
            if authorization is None:
                detail = "send Authorization: Bearer and the tenant's API key"
                raise Refused(Refusal.NO_CREDENTIALS, detail)
            detail = "no tenant has these credentials"
            if bearer_key(authorization) is None:
                detail += "; send an API key as Authorization: Bearer KEY"
            raise Refused(Refusal.BAD_CREDENTIALS, detail)
        return self.accounts.of(tenant)


def client_of(scope: Scope) -> str:
    """Return the address of the client; empty for a Unix socket."""
    return (scope.get("client") or ("",))[0]
