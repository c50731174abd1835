"""Replay: puts the records of a spool again, in order and at a limited pace."""

from kpl_core.durability.delivery_pace import DeliveryPace
from kpl_core.durability.replay.replayer import Replayer

__all__ = [
    "DeliveryPace",
    "Replayer",
]
