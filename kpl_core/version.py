"""The version of this distribution, for dead letters and for the user agent of requests."""

from functools import cache
from importlib.metadata import PackageNotFoundError, version


@cache
def producer_version() -> str:
    """Return the version of this distribution, "unknown" if it is not installed."""
    try:
        return version("kpl-integrations")
    except PackageNotFoundError:
        return "unknown"
