"""What a request may need before it goes on. Its driver gets it, and sends the result into the request's generator.

A driver throws what it fails with (`Refused`, `RequestRefused`, `ClientGone`, `NotSpooled`) into the generator.
"""

from collections.abc import Callable, Generator, Mapping
from typing import Any, NamedTuple, TypeVar

from kpl_core import Deliveries
from kpl_core.producer.internal import GroupPut
from kpl_integrations.ingest.admission.clients import ClientRoom

T = TypeVar("T")


class Body(NamedTuple):
    """The body: at most so many bytes, within so many seconds. Unfinished, it uses this room."""

    most_bytes: int
    seconds: float
    room: ClientRoom


class StreamName(NamedTuple):
    """The canonical name of a stream that exists, or None if `allows` is false for it."""

    stream: str
    allows: Callable[[str], bool]
    tenant: str


class KinesisCall(NamedTuple):
    """The answer of Kinesis to a call for this tenant."""

    operation: str
    arguments: Mapping[str, object]
    tenant: str


class LargeBody(NamedTuple):
    """The result of these steps, which a large body of so many bytes takes in its turn."""

    room: ClientRoom
    size_bytes: int
    steps: "Steps[Any]"


class Slices(NamedTuple):
    """The result of a long computation, in slices of a few milliseconds."""

    steps: Generator[None, None, Any]


class GroupSlices(NamedTuple):
    """The put of a large group, in such slices."""

    group: GroupPut


class Results(NamedTuple):
    """Until all of these records have their results."""

    deliveries: Deliveries


class Stored(NamedTuple):
    """Until the spool has committed these records."""

    deliveries: Deliveries


Need = Body | StreamName | KinesisCall | LargeBody | Slices | GroupSlices | Results | Stored
Steps = Generator[Need, Any, T]
