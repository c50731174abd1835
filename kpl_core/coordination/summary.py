"""The summary: who may use how much, computed by one worker for all, written under a condition.

One object as long as it is small. For large fleets the head names a number of parts, and each
worker reads the head and its own part; parts carry the head's generation in their names, so a
head that wins the conditional write brings its own parts to light and no others.
"""

import zlib
from typing import Final, TypeVar

import msgspec

from kpl_core.coordination.report import VERSION, Pair, unreadable

__all__ = [
    "MEMBERS_PER_PART",
    "Grant",
    "Member",
    "ResourcePlan",
    "Summary",
    "SummaryPart",
    "decode_part",
    "decode_summary",
    "part_name",
    "part_of",
    "part_prefix",
    "split",
]

# An item of DynamoDB holds 400 KB: 200 workers on 10 shards each take some 150.
MEMBERS_PER_PART: Final = 200


class Grant(msgspec.Struct, array_like=True, gc=False):
    """What one worker may use of one resource, units a second.

    `ceiling` is the most it may be using: an older, larger grant counts until the worker has said
    that it applied this one. Nobody else is given that difference before.
    """

    share: Pair
    ceiling: Pair


class Member(msgspec.Struct, array_like=True, gc=False):
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
    members: dict[str, Member] = msgspec.field(default_factory=dict)
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
    members: dict[str, Member]
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
    members: list[dict[str, Member]] = [{} for _ in range(part_count)]
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
