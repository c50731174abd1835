from kpl_core.fairness.bounds import ExceededBound, FairQueueStatistics, QueueBounds
from kpl_core.fairness.cpu_turns import CpuTurn, CpuTurns, StandingDelay
from kpl_core.fairness.queue import FairQueue

__all__ = ["CpuTurn", "CpuTurns", "ExceededBound", "FairQueue", "FairQueueStatistics", "QueueBounds", "StandingDelay"]
