"""The demo's records: made from a seed, so that each can be made again and compared with what came back."""

import random
from collections import Counter
from collections.abc import Sequence
from math import exp, log
from typing import Final

from kpl_core.options.kinesis_limits import KIB, MIB
from kpl_integrations.cli.tail.consumer_view import ReadRecord

__all__ = ["DemoRecords", "Inventory"]

KEY_COUNT: Final = 10_000
SMALLEST_BYTES: Final = 20
LARGEST_BYTES: Final = 2 * KIB
# A record's number stands at its beginning, so that it can be told from all others.
_NUMBER_BYTES: Final = 8
_SIZES: Final = 4_096
# A prime, so that keys, sizes and content come round one after the other, never in the order they were made.
_STRIDE: Final = 7_919


class DemoRecords:
    """`count` pairs of partition key and data; small ones are as frequent as it takes to be typical of events.

    Sizes are log-uniform: as many from 20 to 200 bytes as from 200 to 2,000.
    """

    def __init__(self, count: int, *, seed: int) -> None:
        chance = random.Random(seed)  # noqa: S311 - content, not secrets
        self.count = count
        self._content = chance.randbytes(MIB)
        low, high = log(SMALLEST_BYTES), log(LARGEST_BYTES)
        self._sizes = [round(exp(chance.uniform(low, high))) for _ in range(_SIZES)]
        self._keys = [f"customer-{number}" for number in range(KEY_COUNT)]
        chance.shuffle(self._keys)

    def record(self, number: int) -> tuple[str, bytes]:
        """Return partition key and data of a record, the same each time."""
        step = number * _STRIDE
        begin = step % (MIB - LARGEST_BYTES)
        content = self._content[begin : begin + self._sizes[step % _SIZES] - _NUMBER_BYTES]
        return self._keys[step % KEY_COUNT], number.to_bytes(_NUMBER_BYTES, "big") + content

    def number_of(self, data: bytes) -> int:
        """Return the number that `data` claims to be."""
        return int.from_bytes(data[:_NUMBER_BYTES], "big")


class Inventory:
    """Compares what was read with what was put."""

    def __init__(self, expected: DemoRecords) -> None:
        self._expected = expected
        self._seen: Counter[int] = Counter()
        # Neither a record that was put nor the copy of one.
        self.altered = 0

    def add(self, records: Sequence[ReadRecord]) -> None:
        """Take note of records that were read."""
        expected = self._expected
        for record in records:
            number = expected.number_of(record.data)
            if number < expected.count and expected.record(number) == (record.partition_key, record.data):
                self._seen[number] += 1
            else:
                self.altered += 1

    @property
    def found(self) -> int:
        """Return how many of the records put were read at least once."""
        return len(self._seen)

    @property
    def lost(self) -> int:
        """Return how many of the records put were never read."""
        return self._expected.count - len(self._seen)

    @property
    def duplicated(self) -> int:
        """Return how many records were read beyond the first copy of each."""
        return self._seen.total() - len(self._seen)
