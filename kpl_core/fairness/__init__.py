from kpl_core.fairness.bounds import ExceededBound, FairQueueStatistics, FlowBacklog, QueueBounds
from kpl_core.fairness.queue import FairQueue

__all__ = ["ExceededBound", "FairQueue", "FairQueueStatistics", "FlowBacklog", "QueueBounds"]
