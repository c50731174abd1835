"""Wait for a condition that no event announces, with a bound: the one place where tests poll."""

import time
from collections.abc import Callable

import anyio

# Far above what anything here takes, but below the 60 s of pytest-timeout, whose report names no condition.
PATIENCE_SECONDS = 50.0
_PAUSE_SECONDS = 0.002


async def until(
    condition: Callable[[], object], *, seconds: float = PATIENCE_SECONDS, pause_seconds: float = _PAUSE_SECONDS
) -> None:
    """Wait until `condition()` is true. Another task, a thread or a socket makes it so.

    Ask a costly condition less often, by a longer pause.

    Raises:
        TimeoutError: it was not true within `seconds`.
    """
    with anyio.fail_after(seconds):
        while not condition():  # noqa: ASYNC110 - there is no event to wait for
            await anyio.sleep(pause_seconds)


def wait_until(
    condition: Callable[[], object], wanted: Callable[[], str] | str, *, seconds: float = PATIENCE_SECONDS
) -> None:
    """Wait until `condition()` is true. Another thread or process makes it so.

    Raises:
        AssertionError: it was not true within `seconds`; the text names what was wanted.
    """
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() >= deadline:
            message = f"did not happen within {seconds} s: {wanted if isinstance(wanted, str) else wanted()}"
            raise AssertionError(message)
        time.sleep(_PAUSE_SECONDS)
