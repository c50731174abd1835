"""What a flush must wait for, counted per Kinesis record instead of per user record.

Each flush starts a new generation. An open aggregated record or a Kinesis
record holds the generation of the oldest user record in it; a flush is done
when nobody holds its generation or an earlier one.
"""

__all__ = ["Generations"]


class Generations:
    """Who still holds which generation."""

    __slots__ = ("_holders", "current")

    def __init__(self) -> None:
        self.current = 0
        self._holders: dict[int, int] = {}

    def hold(self, generation: int, count: int = 1) -> None:
        """So many more Kinesis records, open or closed, belong to `generation`."""
        self._holders[generation] = self._holders.get(generation, 0) + count

    def release(self, generation: int, count: int = 1) -> None:
        """So many of them are final, or their user records moved on."""
        if not count:
            return
        left = self._holders[generation] - count
        if left:
            self._holders[generation] = left
        else:
            del self._holders[generation]

    def advance(self) -> int:
        """Start the next generation; return the one that ends."""
        self.current += 1
        return self.current - 1

    @property
    def has_earlier(self) -> bool:
        """Say whether anybody holds a generation that a flush has ended."""
        return len(self._holders) > 1 or (bool(self._holders) and self.current not in self._holders)

    def is_finished(self, generation: int) -> bool:
        """Say whether nothing of `generation`, or of one before it, is left."""
        return not any(held <= generation for held in self._holders)
