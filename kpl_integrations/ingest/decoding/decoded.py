"""What decoding a request gives: user records, what is wrong with the others, or one refusal of it all."""

from collections.abc import Iterable

import msgspec

from kpl_core import UserRecord
from kpl_core.options.kinesis_limits import DEFAULT_MAX_RECORD_BYTES
from kpl_core.records.aggregated_record import MAGIC

__all__ = ["DecodeLimits", "DecodeRefusal", "Decoded", "RecordProblem", "is_aggregated"]


class DecodeLimits(msgspec.Struct, frozen=True, kw_only=True):
    """What one request may ask for.

    `max_record_bytes` bounds partition key (as UTF-8) and data of one record together, as Kinesis
    does; `max_depth` how deep objects and arrays may stand inside one another.
    """

    max_records: int = 10_000
    max_record_bytes: int = DEFAULT_MAX_RECORD_BYTES
    max_depth: int = 64


class RecordProblem(msgspec.Struct, frozen=True, gc=False):
    """Why one record cannot be taken: its place in the request (from 0), the field, one sentence."""

    index: int
    field: str
    detail: str


class Decoded(msgspec.Struct, frozen=True, gc=False):
    """The user records of a request in its order, without those that `problems` name.

    Each record satisfies `kpl_core.records.user_record.check_user_record` within the limits. Flow and tier are
    left to whoever knows the tenant.

    `holds_aggregates`: a client that is itself a KPL producer sent aggregated records. They must travel as they
    are: inside another aggregated record no consumer would look for them.
    """

    records: list[UserRecord]
    problems: list[RecordProblem]
    holds_aggregates: bool = False

    def positions(self) -> list[int]:
        """Return the place in the request of each of `records`."""
        bad = {problem.index for problem in self.problems}
        return [index for index in range(len(self.records) + len(bad)) if index not in bad]


def is_aggregated(records: Iterable[UserRecord]) -> bool:
    """Say whether one of these begins as an aggregated record of the KPL does (no text does)."""
    return any(record.data.startswith(MAGIC) for record in records)


class DecodeRefusal(Exception):  # noqa: N818 - reads as a sentence where it is raised
    """The request as a whole cannot be decoded: answer `status` (400, 413 or 415).

    `code` is a word for programs (malformed, truncated, encoding, too-deep, too-large, too-many-records,
    unsupported-media-type, unsupported-content-encoding), `detail` a sentence for people. `index` and
    `field` are set where they are known.
    """

    def __init__(
        self, status: int, code: str, detail: str, *, index: int | None = None, field: str | None = None
    ) -> None:
        super().__init__(f"{status} {code}: {detail}")
        self.status = status
        self.code = code
        self.detail = detail
        self.index = index
        self.field = field
