"""One rate budget for many processes. They share state in a store; there is no leader."""

from kpl_core.coordination.demand import Usage
from kpl_core.coordination.store import ABSENT, CoordinationStore, Listing, MemoryStore, Reading, StoreFailed, Written

__all__ = [
    "ABSENT",
    "CoordinationStore",
    "Listing",
    "MemoryStore",
    "Reading",
    "StoreFailed",
    "Usage",
    "Written",
]
