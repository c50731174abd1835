"""The dashboard: one page that shows the figures of the gateway live."""

from kpl_integrations.ingest.dashboard.dashboard import Dashboard

__all__ = ["Dashboard"]
