"""Each tenant's weight, and whether it wants aggregates: always what its settings say now."""

from collections.abc import Hashable

from kpl_core import FairnessPolicy
from kpl_integrations.ingest.tenants import Tenant, TenantDirectory

__all__ = ["TenantFairness"]


class TenantFairness(FairnessPolicy):
    """A policy whose flows are tenants."""

    __slots__ = ("_directory",)

    def __init__(self, directory: TenantDirectory) -> None:
        super().__init__()
        object.__setattr__(self, "_directory", directory)

    def weight_of(self, flow: Hashable) -> float:
        """Return the weight of the tenant with this id; of one that is gone, the default."""
        tenant = self._tenant(flow)
        return self.default_weight if tenant is None else tenant.weight

    def aggregates(self, flow: Hashable) -> bool:
        """Say whether this tenant's records may be aggregated; those of one that is gone may."""
        tenant = self._tenant(flow)
        return tenant is None or tenant.aggregation

    def _tenant(self, flow: Hashable) -> Tenant | None:
        directory: TenantDirectory = self._directory  # type: ignore[attr-defined]
        tenant = directory.by_id(flow) if isinstance(flow, str) else None
        if tenant is None and directory.unknown is not None and flow == directory.unknown.id:
            tenant = directory.unknown
        return tenant
