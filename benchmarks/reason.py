"""The reason why a row has no figure, in one line that can be published."""

import re

__all__ = ["reason_in"]

_LONGEST = 160
# Addresses and paths, which could name this machine, its network or its user.
_PRIVATE = re.compile(r"https?://\S+|host='[^']*'|(?<![\w.])(?:/[\w.+-]+){2,}")


def reason_in(output: str) -> str:
    """Return the line of a program's error output that names the error, without addresses and paths.

    For an exception group it is the innermost error, for pip the last error.
    """
    lines = [line.lstrip(" |") for line in output.strip().splitlines() if line.strip()]
    line = next((line for line in reversed(lines) if "Error" in line or "ERROR" in line), lines[-1] if lines else "")
    return _PRIVATE.sub("...", line)[:_LONGEST]
