"""The HTTP ingest gateway: many tenants send records, and one producer ships them to Kinesis."""

from kpl_integrations.ingest.admission.refusals import REFUSALS, Refusal, RefusalAnswer, Refused
from kpl_integrations.ingest.gateway import IngestGateway
from kpl_integrations.ingest.settings import IngestSettings
from kpl_integrations.ingest.settings_sources import load_settings

__all__ = ["REFUSALS", "IngestGateway", "IngestSettings", "Refusal", "RefusalAnswer", "Refused", "load_settings"]
