"""A task group wraps what its tasks raise; for a command the first of it is the whole story."""

from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["raises_first"]


@contextmanager
def raises_first() -> Iterator[None]:
    """Raise the first exception of a group instead of the group."""
    try:
        yield
    except ExceptionGroup as group:
        error: Exception = group
        while isinstance(error, ExceptionGroup):
            error = error.exceptions[0]
        raise error from group
