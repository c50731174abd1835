from kpl_integrations.ingest.dashboard.dashboard import Dashboard

__all__ = ["Dashboard"]
