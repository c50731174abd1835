"""Read and write units a second, kept by every DynamoDB client of a session, alone or with other processes."""

from kpl_integrations.dynamodb_limits.aggregator import AsyncDistributedRateAggregator, DistributedRateAggregator
from kpl_integrations.dynamodb_limits.session_limiter import SessionLimiter
from kpl_integrations.dynamodb_limits.worker import AsyncDistributedRateWorker, DistributedRateWorker

__all__ = [
    "AsyncDistributedRateAggregator",
    "AsyncDistributedRateWorker",
    "DistributedRateAggregator",
    "DistributedRateWorker",
    "SessionLimiter",
]
