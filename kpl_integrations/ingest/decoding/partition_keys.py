"""Partition keys for records that have none: random, and shared by neighbours.

A key of its own for each record would scatter one request over all shards, in as many aggregates as
there are shards, and cost its bytes each time. So up to 100 successive records of a request share
one: they stay together and in order, and requests still spread evenly.
"""

import secrets
from collections.abc import Callable
from typing import Final

__all__ = ["RECORDS_PER_KEY", "NeighbourKeys", "random_partition_key"]

RECORDS_PER_KEY: Final = 100


def random_partition_key() -> str:
    """Return 64 random bits as 16 hexadecimal digits."""
    return secrets.token_hex(8)


class NeighbourKeys:
    """Deals keys to the records of one request that have none."""

    __slots__ = ("_dealt", "_key", "_new_key")

    def __init__(self, new_key: Callable[[], str]) -> None:
        self._new_key = new_key
        self._key = ""
        self._dealt = 0

    def deal(self) -> str:
        """Return the key of the next record without one."""
        if self._dealt % RECORDS_PER_KEY == 0:
            self._key = self._new_key()
        self._dealt += 1
        return self._key
