"""An open gateway: the parts that its routes share, created together when the producer is open."""

from dataclasses import dataclass

import anyio

from kpl_core import KinesisTransport, Producer
from kpl_integrations.ingest.admission.admission import Admission
from kpl_integrations.ingest.admission.refusals import Refusal, Refused
from kpl_integrations.ingest.admission.tenant_account import TenantAccount, TenantAccounts
from kpl_integrations.ingest.http.answers import Tally
from kpl_integrations.ingest.http.bodies import BodyBudget, ReadBody
from kpl_integrations.ingest.http.request_head import FieldsByName
from kpl_integrations.ingest.settings import IngestSettings
from kpl_integrations.ingest.streams.stream_directory import StreamDirectory
from kpl_integrations.ingest.tenants import TenantDirectory
from kpl_integrations.ingest.tenants.credentials import AdminKey


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenGateway:
    """The parts of a gateway from the opening of its producer to its report.

    `closing` is set when admission closes; long answers such as event streams end then. `read_body` is how the
    records route reads a body.
    """

    settings: IngestSettings
    directory: TenantDirectory
    transport: KinesisTransport
    producer: Producer
    accounts: TenantAccounts
    streams: StreamDirectory
    admission: Admission
    body_budget: BodyBudget
    read_body: ReadBody
    tally: Tally
    admin_key: AdminKey
    closing: anyio.Event

    def account_of(self, headers: FieldsByName) -> TenantAccount:
        """Return the account of the tenant that sent these header fields.

        Raises:
            Refused: credentials are missing or wrong.
        """
        authorization = headers.get(b"authorization")
        return self.account_shown(None if authorization is None else authorization.decode("latin-1"))

    def account_shown(self, authorization: str | None) -> TenantAccount:
        """Return the account for the value of an Authorization header; raises as `account_of`."""
        tenant = self.directory.authenticate(authorization)
        if tenant is None:
            if authorization is None:
                detail = "send Authorization: Bearer and the tenant's API key"
                raise Refused(Refusal.NO_CREDENTIALS, detail)
            detail = "no tenant has these credentials"
            raise Refused(Refusal.BAD_CREDENTIALS, detail)
        return self.accounts.of(tenant)
