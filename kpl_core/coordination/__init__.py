"""One rate budget for many processes. They share state in a store; there is no leader."""

from kpl_core.coordination.demand import Usage
from kpl_core.coordination.lease_table import TableRules, next_summary
from kpl_core.coordination.leaseholder import HolderRules, Leaseholder
from kpl_core.coordination.store import ABSENT, CoordinationStore, Listing, MemoryStore, Reading, StoreFailed, Written

__all__ = [
    "ABSENT",
    "CoordinationStore",
    "HolderRules",
    "Leaseholder",
    "Listing",
    "MemoryStore",
    "Reading",
    "StoreFailed",
    "TableRules",
    "Usage",
    "Written",
    "next_summary",
]
