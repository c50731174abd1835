"""The dead letters in a spool file: rows, and the questions asked of them.

Works on any connection to the file: the spool's own, or one that only reads while another
process owns the spool (`kpl dlq list | show | export`).
"""

import sqlite3
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import msgspec

from kpl_core.durability.spool.envelope import DeadLetter, Reason, decode_letter, encode_letter
from kpl_core.durability.spool.store import LetterRow
from kpl_core.records.user_record import TIERS, Tier

__all__ = [
    "LetterFilter",
    "StoredLetter",
    "count_letters",
    "find_letter",
    "letter_row",
    "letters_due",
    "letters_matching",
    "newest_number",
    "next_due_after",
]

_COLUMNS: Final = "number, tier, due_at, redrives, checksum, envelope"


class StoredLetter(NamedTuple):
    """A dead letter and where it stands; `letter` is None if its bytes changed on the disk."""

    number: int
    # 0 for critical; what `TIERS` holds at this place.
    tier_rank: int
    due_at: float | None
    redrives: int
    letter: DeadLetter | None


class LetterFilter(msgspec.Struct, frozen=True, kw_only=True):
    """Which dead letters: all that meet every condition given. Instants are Unix seconds of `first_seen`."""

    ids: tuple[str, ...] | None = None
    stream: str | None = None
    tenant: str | None = None
    tier: Tier | None = None
    reason: Reason | None = None
    seen_from: float | None = None
    seen_before: float | None = None

    def where(self) -> tuple[str, list[Any]]:
        """Return the SQL condition and its parameters."""
        conditions = ["1"]
        parameters: list[Any] = []
        for condition, value in (
            ("stream = ?", self.stream),
            ("tenant = ?", self.tenant),
            ("tier = ?", None if self.tier is None else TIERS.index(self.tier)),
            ("reason = ?", self.reason),
            ("first_seen >= ?", self.seen_from),
            ("first_seen < ?", self.seen_before),
        ):
            if value is not None:
                conditions.append(condition)
                parameters.append(value)
        if self.ids is not None:
            # One parameter however many ids: SQLite bounds the number of parameters.
            conditions.append("id IN (SELECT value FROM json_each(?))")
            parameters.append(msgspec.json.encode(self.ids).decode())
        return " AND ".join(conditions), parameters


def letter_row(letter: DeadLetter, *, due_at: float | None, redrives: int = 0) -> LetterRow:
    """Return the row of a letter; the spool gives it its number."""
    checksum, envelope = encode_letter(letter)
    return LetterRow(
        number=0,
        id=letter.id,
        tier=TIERS.index(letter.tier),
        stream=letter.stream,
        tenant=letter.tenant,
        reason=letter.reason,
        first_seen=letter.first_seen,
        due_at=due_at,
        redrives=redrives,
        checksum=checksum,
        envelope=envelope,
    )


def letters_due(connection: sqlite3.Connection, now: float, limit: int, *, latest: float) -> list[StoredLetter]:
    """Return up to `limit` letters due by `now`: critical first, and within a tier the longest due.

    Nobody makes a letter wait beyond `latest`: what seems to be due later was put by a clock that was wrong, and has
    been set right since. It is due too.
    """
    letters: list[StoredLetter] = []
    for tier_rank in range(len(TIERS)):
        # Tier by tier and on either side, so that the index leads past those that are not due.
        for condition, bound in (("due_at <= ?", now), ("due_at > ?", latest)):
            statement = f"SELECT {_COLUMNS} FROM dead_letters WHERE tier = ? AND {condition} ORDER BY due_at LIMIT ?"  # noqa: S608 - our own names
            rows = connection.execute(statement, (tier_rank, bound, limit - len(letters)))
            letters.extend(_stored(row) for row in rows)
    return letters


def next_due_after(connection: sqlite3.Connection, now: float) -> float | None:
    """Return when the first of the letters that are not due yet will be, None if none ever will."""
    instants = []
    for tier_rank in range(len(TIERS)):
        row = connection.execute(
            "SELECT due_at FROM dead_letters WHERE tier = ? AND due_at > ? ORDER BY due_at LIMIT 1", (tier_rank, now)
        ).fetchone()
        if row is not None:
            instants.append(float(row[0]))
    return min(instants, default=None)


def letters_matching(
    connection: sqlite3.Connection, wanted: LetterFilter, limit: int, *, after: tuple[int, int] = (-1, 0)
) -> list[StoredLetter]:
    """Return up to `limit` letters that match, critical first, and within a tier in the order of arrival.

    `after` is (tier_rank, number) of the last letter already seen.
    """
    condition, parameters = wanted.where()
    statement = f"SELECT {_COLUMNS} FROM dead_letters WHERE (tier, number) > (?, ?) AND {condition} ORDER BY tier, number LIMIT ?"  # noqa: S608, E501 - our own names
    return [_stored(row) for row in connection.execute(statement, (*after, *parameters, limit))]


def find_letter(connection: sqlite3.Connection, letter_id: str) -> StoredLetter | None:
    """Return the letter with this id, None if there is none."""
    row = connection.execute(f"SELECT {_COLUMNS} FROM dead_letters WHERE id = ?", (letter_id,)).fetchone()  # noqa: S608
    return None if row is None else _stored(row)


def count_letters(connection: sqlite3.Connection, wanted: LetterFilter) -> dict[Reason, int]:
    """Return how many letters match, by reason."""
    condition, parameters = wanted.where()
    statement = f"SELECT reason, count(*) FROM dead_letters WHERE {condition} GROUP BY reason ORDER BY reason"  # noqa: S608
    return dict(connection.execute(statement, parameters).fetchall())


def newest_number(connection: sqlite3.Connection) -> int:
    """Return the number of the letter that came last, 0 if there is none."""
    (number,) = connection.execute("SELECT coalesce(max(number), 0) FROM dead_letters").fetchone()
    return int(number)


def _stored(row: Sequence[Any]) -> StoredLetter:
    number, tier_rank, due_at, redrives, checksum, envelope = row
    return StoredLetter(number, tier_rank, due_at, redrives, decode_letter(checksum, envelope))
