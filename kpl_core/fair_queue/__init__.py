from kpl_core.fair_queue.bounds import QueueBounds, Refusal
from kpl_core.fair_queue.queue import FairQueue
from kpl_core.fair_queue.statistics import FairQueueStatistics, FlowBacklog

__all__ = ["FairQueue", "FairQueueStatistics", "FlowBacklog", "QueueBounds", "Refusal"]
