"""The objects in the store and their JSON: the report of each worker, and the summary computed from all reports.

A report says what a worker wants of each resource and what it may be using now. The summary grants each worker its
share of each resource. A resource is anything with two rates that workers share: a shard (records and bytes a second),
a table (read and write units a second).

The format is JSON, so that a person can read the objects in a bucket. Leaves are arrays, because ten thousand workers
write them every few seconds. A small summary is one object. In large fleets the head names a number of parts, and each
worker reads the head and its own part. The names of the parts contain the head's generation, so the conditional write
of a head makes exactly its own parts current.
"""

import zlib
from collections.abc import Callable, Mapping
from typing import Annotated, Any, Final, TypeVar

import msgspec

VERSION: Final = 1

# Called with the reason and one sentence for each object that cannot be decoded.
OnProblem = Callable[[str, str], None]
# (first, second): records and bytes a second, or read and write units a second.
Pair = tuple[float, float]
# Checked when decoded: a weight of 0 or a negative holding would corrupt the shares of all workers.
_Positive = Annotated[float, msgspec.Meta(gt=0)]
_NotNegative = Annotated[float, msgspec.Meta(ge=0)]


class UnreadableObject(ValueError):  # noqa: N818 - the name says what happened
    """An object of the store that cannot be decoded: garbage, or another version.

    Args:
        reason: "garbage" or "version".
    """

    def __init__(self, message: str, *, reason: str) -> None:
        super().__init__(message)
        self.reason = reason


class Claim(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """What one worker reports for one resource.

    Args:
        demand: what it would use, units a second. Never a JSON null: a saturated worker reports the measured rate, not
            infinity.
        holding: the rates it may be using until it applies a newer summary.
        limit: the configured limit of the resource.
        sent: Kinesis records, or calls, since its last report.
        throttled: how many of those were throttled.
    """

    demand: tuple[_NotNegative, _NotNegative]
    holding: tuple[_NotNegative, _NotNegative]
    limit: tuple[_Positive, _Positive]
    sent: float = 0.0
    throttled: float = 0.0


class WorkerReport(msgspec.Struct, frozen=True, kw_only=True):
    """The object of one worker.

    Args:
        worker_id: the worker's id.
        written_at: the store's clock, seconds since 1970.
        generation: the summary this worker has applied, 0 for none.
        token: the token of that summary.
        claims: by resource.
        weight: relative to other workers.
        tier: 0 is served first.
        max_workers: as configured.
        leaving: True if the worker stops now and its leases are free.
        version: of this format.
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
_version_decoder: Final = msgspec.json.Decoder(_Version)


def encode(value: msgspec.Struct | Mapping[str, object]) -> bytes:
    """Return the JSON of an object."""
    return _encoder.encode(value)


def _unreadable(body: bytes, error: Exception | None) -> UnreadableObject:
    """Return why `body` could not be decoded: another version if it says so, else garbage."""
    try:
        version = _version_decoder.decode(body).version
    except (msgspec.MsgspecError, UnicodeDecodeError):
        version = None
    if version is not None and version != VERSION:
        message = f"it has version {version} and this release reads {VERSION}; run the same release in all workers"
        return UnreadableObject(message, reason="version")
    message = f"it cannot be decoded ({error}); check which other program writes to this prefix"
    return UnreadableObject(message, reason="garbage")


# A DynamoDB item may have 400 KB; 200 workers on 10 shards each need about 150 KB.
MEMBERS_PER_PART: Final = 200
# Every worker of a busy fleet reads its part at each sync, and DynamoDB charges a read by its size. So parts are small,
# but only a few, because one worker writes them all, one after the other.
MEMBERS_PER_SMALL_PART: Final = 50
SMALL_PARTS: Final = 8
# A larger fleet has parts. While a summary is renewed, its workers read only the short head.
MEMBERS_IN_HEAD: Final = 20


class Grant(msgspec.Struct, array_like=True, gc=False):
    """What one worker may use of one resource, units a second.

    `ceiling` is the most it may be using now: an older, larger grant counts until the worker has reported that it
    applied this one. No other worker gets the difference before that.
    """

    share: Pair
    ceiling: Pair


class FleetMember(msgspec.Struct, array_like=True, gc=False):
    """A worker of the summary, and its grants by resource.

    `steady` is how many summaries in a row, up to this one, gave this worker no more than it had and held; 0 if an
    older release wrote the summary.
    """

    reported_at: float
    weight: float
    tier: int
    grants: dict[str, Grant]
    steady: int = 0


class ResourcePlan(msgspec.Struct, array_like=True, gc=False):
    """The plan for one resource.

    Args:
        limit: the smallest configured limit that any worker reported.
        newcomer: what a worker without a grant may use until it has one.
        estimate: the share of the limit that is available to this fleet.
        fair: what a unit of weight may claim, by tier.
        unassigned: what a worker may get at once, because no other worker has to give it up.
        began_at: when the first worker claimed the resource.
        used_at: when a worker last claimed it.
        calm_at: the last division that left enough unassigned. While that is the latest one, its workers may report
            rarely.
    """

    limit: Pair
    newcomer: Pair
    estimate: float
    fair: dict[int, Pair]
    unassigned: Pair = (0.0, 0.0)
    began_at: float = 0.0
    used_at: float = 0.0
    calm_at: float = 0.0


class Summary(msgspec.Struct, kw_only=True, omit_defaults=True):
    """The head of a summary. Every worker reads it twice an interval, so what has its default value is not written.

    Args:
        generation: grows by one with every summary.
        token: tells this summary and its parts from another one of the same generation, which was overtaken, or lost by
            the store.
        computed_at: the store's clock, seconds since 1970. A renewal changes it, but no grant and no generation.
        divided_at: when the grants were computed; 0 if an older release wrote it.
        began_at: when the first summary of an unbroken sequence was computed.
        settled: True if every worker has its target share and has reported that it holds no more.
        claimed_until: the writer computes the next summary; until this instant no other worker tries.
        dedicated: a separate process computes; workers compute only when it is late.
        computed_by: the worker that computed, which has read the reports already and goes on; "" for none.
        members: all workers; empty if there are parts.
        resources: the plan of each resource; empty if there are parts.
        part_count: 0 if the head contains everything.
        old_part_prefix: the names of the previous parts, which are deleted after the next summary.
        old_part_count: the number of the previous parts.
        member_count: all workers, with or without parts.
        max_workers: the highest number that was planned for; 0 if an older release wrote it.
    """

    generation: int
    computed_at: float
    began_at: float
    divided_at: float = 0.0
    token: str = ""
    settled: bool = False
    claimed_until: float = 0.0
    dedicated: bool = False
    computed_by: str = ""
    members: dict[str, FleetMember] = msgspec.field(default_factory=dict)
    resources: dict[str, ResourcePlan] = msgspec.field(default_factory=dict)
    part_count: int = 0
    old_part_prefix: str = ""
    old_part_count: int = 0
    member_count: int = 0
    max_workers: int = 0
    # From a factory, so that it is always written.
    version: int = msgspec.field(default_factory=lambda: VERSION)


class SummaryPart(msgspec.Struct, kw_only=True):
    """Some of the members, and all resources. The resources are encoded once for all parts."""

    generation: int
    members: dict[str, FleetMember]
    raw_resources: msgspec.Raw
    version: int = VERSION

    def resources(self) -> dict[str, ResourcePlan]:
        """Return the plans of all resources."""
        return _plans_decoder.decode(self.raw_resources)


_Object = TypeVar("_Object", WorkerReport, Summary, SummaryPart)

_decoders: Final[dict[type, msgspec.json.Decoder[Any]]] = {
    kind: msgspec.json.Decoder(kind) for kind in (WorkerReport, Summary, SummaryPart)
}
_plans_decoder: Final = msgspec.json.Decoder(dict[str, ResourcePlan])


def decode(body: bytes, kind: type[_Object]) -> _Object:
    """Decode an object of the store.

    Raises:
        UnreadableObject: the object is not valid JSON of this kind, or has another version.
    """
    try:
        value: _Object = _decoders[kind].decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise _unreadable(body, error) from error
    if value.version != VERSION:
        raise _unreadable(body, None)
    return value


def part_count_of(member_count: int) -> int:
    """Return the number of parts of a summary, 0 if it is small enough for one object."""
    if member_count <= MEMBERS_IN_HEAD:
        return 0
    return max(-(-member_count // MEMBERS_PER_PART), min(SMALL_PARTS, -(-member_count // MEMBERS_PER_SMALL_PART)))


def part_of(worker_id: str, part_count: int) -> int:
    """Return the number of the part that contains a worker."""
    return zlib.crc32(worker_id.encode()) % part_count


def part_prefix(generation: int, token: str) -> str:
    """Return the prefix of the names of all parts of a summary."""
    return f"part-{generation}-{token}-"


def part_name(head: Summary, number: int) -> str:
    """Return the name of a part in the store."""
    return f"{part_prefix(head.generation, head.token)}{number}.json"


def split(summary: Summary, *, after: Summary | None) -> tuple[Summary, list[SummaryPart]]:
    """Return a head and its parts; no parts if the summary is small enough for one object.

    `after` is the previous head, whose parts the new head lists as old.
    """
    old = ("", 0) if after is None else (part_prefix(after.generation, after.token), after.part_count)
    part_count = part_count_of(len(summary.members))
    if not part_count:
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
