"""A hook that keeps what it is told."""

from typing import TypeVar

from kpl_core.hooks import Fact

__all__ = ["RecordingHook"]

F = TypeVar("F", bound=Fact)


class RecordingHook:
    """Pass it as `Producer(..., hooks=[hook])`, then ask it.

    `facts` holds everything in the order it was told.
    """

    def __init__(self) -> None:
        self.facts: list[Fact] = []

    def __call__(self, fact: Fact) -> None:
        """Keep one fact."""
        self.facts.append(fact)

    def of(self, kind: type[F]) -> list[F]:
        """Return the facts of one kind, such as `RequestCompleted`."""
        return [fact for fact in self.facts if isinstance(fact, kind)]
