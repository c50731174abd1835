"""The HTTP ingest gateway: many tenants, one fair and truthful door to Kinesis."""

from kpl_integrations.ingest.admission.admission import ADMISSION, Answer, Refusal, Refused
from kpl_integrations.ingest.gateway import IngestGateway
from kpl_integrations.ingest.settings import IngestSettings, load_settings

__all__ = ["ADMISSION", "Answer", "IngestGateway", "IngestSettings", "Refusal", "Refused", "load_settings"]
