"""Tenants of the ingest gateway: their settings, credentials and quotas."""

from kpl_integrations.ingest.tenants.credentials import new_api_key, stored_key
from kpl_integrations.ingest.tenants.file_tenants import FileTenants
from kpl_integrations.ingest.tenants.quota import QuotaState, TenantQuota
from kpl_integrations.ingest.tenants.tenant import (
    ACKS,
    SIGNALS,
    UNKNOWN_TENANT,
    AccessKey,
    Ack,
    CallableTenants,
    OpenTenants,
    Signal,
    Tenant,
    TenantDirectory,
)
from kpl_integrations.ingest.tenants.tenants_file import MOST_TENANTS

__all__ = [
    "ACKS",
    "MOST_TENANTS",
    "SIGNALS",
    "UNKNOWN_TENANT",
    "AccessKey",
    "Ack",
    "CallableTenants",
    "FileTenants",
    "OpenTenants",
    "QuotaState",
    "Signal",
    "Tenant",
    "TenantDirectory",
    "TenantQuota",
    "new_api_key",
    "stored_key",
]
