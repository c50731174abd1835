"""Each tenant's weight as the fair queue asks for it: always the one its settings say now."""

from collections.abc import Hashable

from kpl_core import FairnessPolicy
from kpl_integrations.ingest.tenants import TenantDirectory

__all__ = ["TenantFairness"]


class TenantFairness(FairnessPolicy):
    """A policy whose flows are tenants."""

    __slots__ = ("_directory",)

    def __init__(self, directory: TenantDirectory) -> None:
        super().__init__()
        object.__setattr__(self, "_directory", directory)

    def weight_of(self, flow: Hashable) -> float:
        """Return the weight of the tenant with this id; of one that is gone, the default."""
        directory: TenantDirectory = self._directory  # type: ignore[attr-defined]
        tenant = directory.by_id(flow) if isinstance(flow, str) else None
        if tenant is None and directory.unknown is not None and flow == directory.unknown.id:
            tenant = directory.unknown
        return self.default_weight if tenant is None else tenant.weight
