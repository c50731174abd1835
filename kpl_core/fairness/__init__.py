from kpl_core.fairness.bounds import ExceededBound, FairQueueStatistics, QueueBounds
from kpl_core.fairness.queue import FairQueue

__all__ = ["ExceededBound", "FairQueue", "FairQueueStatistics", "QueueBounds"]
