"""What a worker tells the others: what it wants of each resource, and what it may be using now.

A resource is anything with two rates that workers share: a shard (records and bytes a second),
a table (read and write units a second). JSON, so that a person can read what stands in a bucket;
leaves are arrays, because ten thousand workers write them every few seconds.
"""

import zlib
from collections.abc import Mapping
from typing import Annotated, Final, TypeVar

import msgspec

__all__ = [
    "MEMBERS_PER_PART",
    "VERSION",
    "Claim",
    "FleetMember",
    "Grant",
    "Pair",
    "ResourcePlan",
    "Summary",
    "SummaryPart",
    "UnreadableObject",
    "WorkerReport",
    "decode_part",
    "decode_report",
    "decode_summary",
    "encode",
    "part_name",
    "part_of",
    "part_prefix",
    "split",
]

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


# An item of DynamoDB holds 400 KB: 200 workers on 10 shards each take some 150.
MEMBERS_PER_PART: Final = 200


class Grant(msgspec.Struct, array_like=True, gc=False):
    """What one worker may use of one resource, units a second.

    `ceiling` is the most it may be using: an older, larger grant counts until the worker has said
    that it applied this one. Nobody else is given that difference before.
    """

    share: Pair
    ceiling: Pair


class FleetMember(msgspec.Struct, array_like=True, gc=False):
    """A worker that counts, and its grants by resource."""

    reported_at: float
    weight: float
    tier: int
    grants: dict[str, Grant]


class ResourcePlan(msgspec.Struct, array_like=True, gc=False):
    """What is known of one resource.

    Args:
        limit: as configured, the smallest that any worker reported.
        newcomer: what a worker without a grant may use until it has one.
        estimate: the share of the limit that is there for us.
        fair: what a unit of weight may claim, by tier.
    """

    limit: Pair
    newcomer: Pair
    estimate: float
    fair: dict[int, Pair]


class Summary(msgspec.Struct, kw_only=True):
    """The head.

    Args:
        generation: one more with every summary.
        token: tells it, and its parts, from another of the same generation: one computed in vain, or forgotten by
            the store.
        computed_at: the store's clock, seconds since 1970.
        began_at: when the first summary of an unbroken row was computed.
        settled: every worker has what it should have, and is known to have no more.
        claimed_until: whoever wrote this computes the next one; until then nobody else tries.
        dedicated: a process of its own computes; workers step in only when it is late.
        members: all workers, or none if there are parts.
        resources: likewise.
        part_count: 0 if everything stands in the head.
        old_part_prefix: the names of the parts before these, which may go when the next summary is there.
        old_part_count: as many.
        member_count: all workers, in parts or not.
        max_workers: the most that were planned for; 0 if an older release wrote it.
    """

    generation: int
    computed_at: float
    began_at: float
    token: str = ""
    settled: bool = False
    claimed_until: float = 0.0
    dedicated: bool = False
    members: dict[str, FleetMember] = msgspec.field(default_factory=dict)
    resources: dict[str, ResourcePlan] = msgspec.field(default_factory=dict)
    part_count: int = 0
    old_part_prefix: str = ""
    old_part_count: int = 0
    member_count: int = 0
    max_workers: int = 0
    version: int = VERSION


class SummaryPart(msgspec.Struct, kw_only=True):
    """Some of the members, and every resource, which is written and read once for all parts."""

    generation: int
    members: dict[str, FleetMember]
    raw_resources: msgspec.Raw
    version: int = VERSION

    def resources(self) -> dict[str, ResourcePlan]:
        """Return the plans of all resources."""
        return _plans_decoder.decode(self.raw_resources)


_Kind = TypeVar("_Kind", Summary, SummaryPart)

_summary_decoder: Final = msgspec.json.Decoder(Summary)
_part_decoder: Final = msgspec.json.Decoder(SummaryPart)
_plans_decoder: Final = msgspec.json.Decoder(dict[str, ResourcePlan])


def decode_summary(body: bytes) -> Summary:
    """Read a head.

    Raises:
        UnreadableObject: it is garbage, or of another version.
    """
    return _checked(_summary_decoder, body)


def decode_part(body: bytes) -> SummaryPart:
    """Read a part.

    Raises:
        UnreadableObject: it is garbage, or of another version.
    """
    return _checked(_part_decoder, body)


def _checked(decoder: msgspec.json.Decoder[_Kind], body: bytes) -> _Kind:
    try:
        value = decoder.decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise unreadable(body, error) from error
    if value.version != VERSION:
        raise unreadable(body, None)
    return value


def part_of(worker_id: str, part_count: int) -> int:
    """Return the number of the part that holds a worker."""
    return zlib.crc32(worker_id.encode()) % part_count


def part_prefix(generation: int, token: str) -> str:
    """Return how the names of all parts of a summary begin."""
    return f"part-{generation}-{token}-"


def part_name(head: Summary, number: int) -> str:
    """Return the name of a part in the store."""
    return f"{part_prefix(head.generation, head.token)}{number}.json"


def split(summary: Summary, *, after: Summary | None) -> tuple[Summary, list[SummaryPart]]:
    """Return a head and its parts; no parts if it is small enough to stand in one object.

    `after` is the head before, whose parts the new head lists as old.
    """
    old = ("", 0) if after is None else (part_prefix(after.generation, after.token), after.part_count)
    part_count = -(-len(summary.members) // MEMBERS_PER_PART)
    if part_count <= 1:
        return msgspec.structs.replace(summary, old_part_prefix=old[0], old_part_count=old[1]), []
    members: list[dict[str, FleetMember]] = [{} for _ in range(part_count)]
    for worker_id, member in summary.members.items():
        members[part_of(worker_id, part_count)][worker_id] = member
    head = msgspec.structs.replace(
        summary,
        members={},
        resources={},
        part_count=part_count,
        old_part_prefix=old[0],
        old_part_count=old[1],
    )
    resources = msgspec.Raw(msgspec.json.encode(summary.resources))
    return head, [SummaryPart(generation=summary.generation, members=each, raw_resources=resources) for each in members]
