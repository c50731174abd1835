"""The formats `kpl put` reads."""

from enum import StrEnum

__all__ = ["InputFormat"]


class InputFormat(StrEnum):
    """What one line of the input is."""

    LINES = "lines"
    NDJSON = "ndjson"
