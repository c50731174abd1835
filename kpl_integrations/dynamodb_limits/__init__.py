"""Read and write rate limits for the DynamoDB clients of a session, for one process or shared by many."""

from kpl_integrations.dynamodb_limits.distributed_rate import (
    AsyncDistributedRateAggregator,
    AsyncDistributedRateWorker,
    DistributedRateAggregator,
    DistributedRateWorker,
)
from kpl_integrations.dynamodb_limits.session_limiter import SessionLimiter

__all__ = [
    "AsyncDistributedRateAggregator",
    "AsyncDistributedRateWorker",
    "DistributedRateAggregator",
    "DistributedRateWorker",
    "SessionLimiter",
]
