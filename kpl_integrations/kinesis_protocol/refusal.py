"""A request the wire protocol itself refuses, in the service's words."""

from typing import Final

__all__ = ["SERIALIZATION", "UNKNOWN_OPERATION", "VALIDATION", "RequestRefused"]

SERIALIZATION: Final = "SerializationException"
UNKNOWN_OPERATION: Final = "UnknownOperationException"
VALIDATION: Final = "ValidationException"


class RequestRefused(Exception):  # noqa: N818 - reads as a sentence where it is raised
    """The request cannot be understood or violates a constraint; answer `code`, `message` with HTTP `status`."""

    def __init__(self, code: str, message: str, *, status: int = 400) -> None:
        super().__init__(f"{code}: {message}")
        self.code = code
        self.message = message
        self.status = status
