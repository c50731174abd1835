"""Failures of a background sender on stderr, for when logging may be what fails.

The first line comes 3 seconds after the first failure, so that it has counts. More come once a minute at most. A failed
request whose successor is answered before the line is due is not reported: that was a connection which the server had
closed.
"""

import re
import sys
import threading
from collections import Counter
from time import monotonic
from typing import Final

from kpl_core.options.validation import without_passwords

_FIRST_SECONDS: Final = 3.0
_QUIET_SECONDS: Final = 60.0
# A cause may be a whole answer of the service.
_CAUSE_CHARACTERS: Final = 300
# An endpoint may quote the request, with its signature and session token. Only these have so many characters in a row.
_SECRET: Final = re.compile(r"[A-Za-z0-9+/=]{40,}")


class StderrReport:
    """Counts failures by cause and writes them to stderr. Any thread may call it.

    `subject` begins each line. `noun` is what gets lost, in the plural.
    """

    def __init__(self, subject: str, noun: str) -> None:
        self._subject = subject
        self._noun = noun
        self._lock = threading.RLock()
        self._requests: Counter[str] = Counter()
        self._lost: Counter[str] = Counter()
        self._next_at = monotonic()
        self._timer: threading.Timer | None = None

    def request_failed(self, cause: str) -> None:
        """Count a request that failed as a whole and may be tried again."""
        with self._lock:
            self._requests[shown_cause(cause)] += 1
            self._start_timer()

    def request_answered(self) -> None:
        """Forget the failed requests that no line has reported."""
        if self._requests:
            with self._lock:
                self._requests.clear()

    def lost(self, cause: str, count: int) -> None:
        """Count what is lost permanently."""
        with self._lock:
            self._lost[shown_cause(cause)] += count
            self._start_timer()

    def write(self) -> None:
        """Write what was counted since the last line, if anything was."""
        with self._lock:
            if self._timer is not None:
                self._timer.cancel()
                self._timer = None
            failed = [f"{self._lost.total():,} {self._noun} lost: {_listed(self._lost)}"] if self._lost else []
            failed += [f"requests failed: {_listed(self._requests)}"] if self._requests else []
            self._lost.clear()
            self._requests.clear()
            if not failed:
                return
            self._next_at = monotonic() + _QUIET_SECONDS
        try:
            sys.stderr.write(f"{self._subject}: {'; '.join(failed)} (reported once a minute at most)\n")
            sys.stderr.flush()
        except Exception:  # noqa: BLE001 - stderr is closed or missing, or the application's own
            return

    def _start_timer(self) -> None:
        if self._timer is None:
            delay = max(_FIRST_SECONDS, self._next_at - monotonic())
            self._timer = threading.Timer(delay, self.write)
            self._timer.daemon = True
            try:
                self._timer.start()
            except RuntimeError:
                # The interpreter finalizes and starts no threads.
                self._timer = None
                self.write()


def shown_cause(failure: str) -> str:
    """Return the first line of a failure without secrets, at most 300 characters."""
    # The further lines of a signature error quote the request.
    return _SECRET.sub("***", without_passwords(failure.partition("\n")[0]))[:_CAUSE_CHARACTERS]


def _listed(causes: Counter[str]) -> str:
    return ", ".join(f"{count:,} x {cause}" for cause, count in causes.most_common(3))
