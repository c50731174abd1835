from kpl_core.fairness.bounds import QueueBounds, Refusal
from kpl_core.fairness.queue import FairQueue
from kpl_core.fairness.statistics import FairQueueStatistics, FlowBacklog

__all__ = ["FairQueue", "FairQueueStatistics", "FlowBacklog", "QueueBounds", "Refusal"]
