"""What an answer of PutRecords needs to know about each record."""

from typing import Protocol

__all__ = ["PutResult"]


class PutResult(Protocol):
    """One record's result: shard and sequence number, or error code and message."""

    @property
    def shard_id(self) -> str | None:
        """Return the shard that stored it, None for an error."""

    @property
    def sequence_number(self) -> str | None:
        """Return its sequence number, None for an error."""

    @property
    def error_code(self) -> str | None:
        """Return the error it got, None for a stored one."""

    @property
    def error_message(self) -> str | None:
        """Return the words of the error, None for a stored one."""
