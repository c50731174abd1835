"""What may be given as a timeout, checked before anything is done in its time."""

import math

__all__ = ["require_timeout"]


def require_timeout(timeout: float | None) -> None:
    """Check a timeout in seconds; None stands for as long as it takes.

    Raises:
        TypeError: it is no number.
        ValueError: it is negative, or not a number (NaN).
    """
    if timeout is None:
        return
    if isinstance(timeout, bool) or not isinstance(timeout, int | float):
        message = f"timeout is of type {type(timeout).__name__}; it must be a number of seconds, or None for no end"
        raise TypeError(message)
    if math.isnan(timeout) or timeout < 0:
        message = f"timeout is {timeout!r} s; it must be 0 or more, or None for as long as it takes"
        raise ValueError(message)
