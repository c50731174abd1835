"""Replay: what a spool holds is put again, in order and at a bounded pace."""

from kpl_core.durability.delivery_pace import DeliveryPace
from kpl_core.durability.replay.replayer import Replayer

__all__ = [
    "DeliveryPace",
    "Replayer",
]
