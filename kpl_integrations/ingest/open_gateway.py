"""A gateway while it is open: the parts that its routes share, as one value made when they are all there."""

from collections import Counter
from dataclasses import dataclass

import anyio

from kpl_core import KinesisTransport, Producer
from kpl_integrations.ingest.admission.account import TenantAccounts
from kpl_integrations.ingest.admission.admission import Refusal
from kpl_integrations.ingest.admission.intake import Intake
from kpl_integrations.ingest.http.tally import Tally
from kpl_integrations.ingest.settings import IngestSettings
from kpl_integrations.ingest.streams.stream_directory import StreamDirectory
from kpl_integrations.ingest.tenants import TenantDirectory
from kpl_integrations.ingest.tenants.credentials import AdminKey

__all__ = ["OpenGateway"]


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenGateway:
    """What a route needs, from the opening of the producer to its report.

    `closing` is set when the intake closes: whoever answers for long, such as an event stream, ends then.
    """

    settings: IngestSettings
    directory: TenantDirectory
    transport: KinesisTransport
    producer: Producer
    accounts: TenantAccounts
    streams: StreamDirectory
    intake: Intake
    tally: Tally
    admin_key: AdminKey
    closing: anyio.Event

    @property
    def answers(self) -> Counter[int]:
        """Requests answered, by status."""
        return self.tally.answers

    @property
    def refusals(self) -> Counter[Refusal]:
        """Requests refused, by row of the admission table."""
        return self.tally.refusals
