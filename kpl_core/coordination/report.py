"""What a worker tells the others: what it wants of each resource, and what it may be using now.

A resource is anything with two rates that workers share: a shard (records and bytes a second),
a table (read and write units a second). JSON, so that a person can read what stands in a bucket;
leaves are arrays, because ten thousand workers write them every few seconds.
"""

from collections.abc import Mapping
from typing import Annotated, Final

import msgspec

__all__ = ["VERSION", "Claim", "Pair", "UnreadableObject", "WorkerReport", "decode_report", "encode"]

VERSION: Final = 1

# (first, second): records and bytes a second, or read and write units a second.
Pair = tuple[float, float]
# Bounded where they are read: a weight of 0 or a negative holding would spoil everybody's shares.
_Positive = Annotated[float, msgspec.Meta(gt=0)]
_NotNegative = Annotated[float, msgspec.Meta(ge=0)]


class UnreadableObject(ValueError):  # noqa: N818 - reads as a sentence where it is raised
    """An object of the store that is none of ours: garbage, or of another version.

    Args:
        reason: "garbage" or "version".
    """

    def __init__(self, message: str, *, reason: str) -> None:
        super().__init__(message)
        self.reason = reason


class Claim(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One worker and one resource.

    Args:
        demand: what it would use, units a second; a JSON null never occurs, so a saturated
            worker reports what it saw and not infinity.
        holding: the rates it may be using, until it applies a newer summary.
        limit: the resource's limit, as configured.
        sent: Kinesis records, or calls, since its last report.
        throttled: as many of them were refused for throughput.
    """

    demand: tuple[_NotNegative, _NotNegative]
    holding: tuple[_NotNegative, _NotNegative]
    limit: tuple[_Positive, _Positive]
    sent: float = 0.0
    throttled: float = 0.0


class WorkerReport(msgspec.Struct, frozen=True, kw_only=True):
    """The object of one worker.

    Args:
        worker_id: who.
        written_at: the store's clock, seconds since 1970.
        generation: the summary this worker has applied, 0 for none.
        token: that summary's.
        claims: by resource.
        weight: relative to others.
        tier: 0 is served first.
        max_workers: as configured.
        leaving: it stops now, and its leases are free.
        version: of this layout.
    """

    worker_id: str
    written_at: float
    generation: int
    claims: dict[str, Claim]
    token: str = ""
    weight: _Positive = 1.0
    tier: int = 1
    max_workers: Annotated[int, msgspec.Meta(ge=1)] = 1
    leaving: bool = False
    version: int = VERSION


class _Version(msgspec.Struct):
    version: int | None = None


_encoder: Final = msgspec.json.Encoder()
_report_decoder: Final = msgspec.json.Decoder(WorkerReport)
_version_decoder: Final = msgspec.json.Decoder(_Version)


def encode(value: msgspec.Struct | Mapping[str, object]) -> bytes:
    """Return an object of the store."""
    return _encoder.encode(value)


def decode_report(body: bytes) -> WorkerReport:
    """Read a worker's object.

    Raises:
        UnreadableObject: it is garbage, or of another version.
    """
    try:
        report = _report_decoder.decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise unreadable(body, error) from error
    if report.version != VERSION:
        raise unreadable(body, None)
    return report


def unreadable(body: bytes, error: Exception | None) -> UnreadableObject:
    """Return why `body` could not be read: its version, if it tells one of another, else that it is garbage."""
    try:
        version = _version_decoder.decode(body).version
    except (msgspec.MsgspecError, UnicodeDecodeError):
        version = None
    if version is not None and version != VERSION:
        message = f"it has version {version} and this release reads {VERSION}; run one release in all workers"
        return UnreadableObject(message, reason="version")
    message = f"it cannot be read ({error}); see who else writes to this prefix"
    return UnreadableObject(message, reason="garbage")
