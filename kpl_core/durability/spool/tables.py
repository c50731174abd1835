"""The tables of a spool file: their schema and migrations, their rows, and the queries on dead letters.

`PRAGMA user_version` counts the migrations a file has seen. To change the tables, append a script to `MIGRATIONS`;
never change one that was released. `PRAGMA application_id` tells a spool from the database of another application.

The queries accept any connection to the file: the spool's own, or a read-only one while another process owns the spool
(`kpl dlq list | show | export`).
"""

import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final, NamedTuple

import msgspec

from kpl_core.durability.spool.envelope import DeadLetter, decode_letter, decode_record, encode
from kpl_core.durability.spool.spool_error import SpoolCorrupt, SpoolUnavailable
from kpl_core.records.record_result import Reason
from kpl_core.records.user_record import TIERS, Tier

# "KPLs" in ASCII.
APPLICATION_ID: Final = 0x4B504C73

# `dead_letters` has a column for each field that a query filters or sorts by; the envelope holds all fields.
# `tier` is 0 for critical. `due_at` is the Unix time of the next automatic redrive, NULL for none.
MIGRATIONS: Final[Sequence[Sequence[str]]] = (
    (
        """
        CREATE TABLE spooled (
            id INTEGER PRIMARY KEY,
            checksum INTEGER NOT NULL,
            envelope BLOB NOT NULL
        )
        """,
        """
        CREATE TABLE dead_letters (
            number INTEGER PRIMARY KEY,
            id TEXT NOT NULL,
            tier INTEGER NOT NULL,
            stream TEXT NOT NULL,
            tenant TEXT,
            reason TEXT NOT NULL,
            first_seen REAL NOT NULL,
            due_at REAL,
            redrives INTEGER NOT NULL,
            checksum INTEGER NOT NULL,
            envelope BLOB NOT NULL
        )
        """,
        "CREATE INDEX dead_letters_by_id ON dead_letters (id)",
        # Every SQLite index ends with the row's number, so this one is (tier, number).
        "CREATE INDEX dead_letters_by_tier ON dead_letters (tier)",
        "CREATE INDEX dead_letters_by_due_at ON dead_letters (tier, due_at)",
    ),
)


# The oldest SQLite that runs the spool's tests (RHEL 8 has it). Its SQL needs 3.15, for the comparison of row values.
OLDEST_SQLITE: Final = (3, 26, 0)


def require_sqlite(*, name: str) -> None:
    """Check that Python's SQLite library has all that the spool's statements need.

    Raises:
        SpoolUnavailable: it is too old.
    """
    if sqlite3.sqlite_version_info < OLDEST_SQLITE:
        oldest = ".".join(map(str, OLDEST_SQLITE))
        message = (
            f"spool {name}: Python uses SQLite {sqlite3.sqlite_version}, a spool needs {oldest} or later; "
            f"update the SQLite library, or use a Python that was built with a later one"
        )
        raise SpoolUnavailable(message)


def migrate(connection: sqlite3.Connection, *, name: str, migrations: Sequence[Sequence[str]] = MIGRATIONS) -> None:
    """Bring the file behind `connection` (autocommit) to the latest version, in one transaction.

    It writes even if nothing changes, so that a full or read-only disk is found here and not at the first record.

    Raises:
        SpoolCorrupt: the file belongs to another application, or to a later version of this one.
        sqlite3.Error: the file cannot be written.
    """
    with transaction(connection):
        version = _version(connection, name, len(migrations))
        for statements in migrations[version:]:
            for statement in statements:
                connection.execute(statement)
        connection.execute(f"PRAGMA application_id = {APPLICATION_ID}")
        connection.execute(f"PRAGMA user_version = {len(migrations)}")


def write_owner(connection: sqlite3.Connection, token: bytes) -> None:
    """Note in the file who has opened it last, within a transaction.

    The table is in no migration: an earlier version ignores it, so it can still open the file.
    """
    connection.execute("CREATE TABLE IF NOT EXISTS owner (id INTEGER PRIMARY KEY, token BLOB NOT NULL)")
    connection.execute("INSERT OR REPLACE INTO owner VALUES (1, ?)", (token,))


def read_owner(connection: sqlite3.Connection) -> bytes | None:
    """Return the token of the last `write_owner`."""
    row = connection.execute("SELECT token FROM owner WHERE id = 1").fetchone()
    return None if row is None else row[0]


def highest_keys(connection: sqlite3.Connection) -> tuple[int, int]:
    """Return the highest id and the highest number of a letter, without reading the tables."""
    row = connection.execute(
        "SELECT coalesce((SELECT max(id) FROM spooled), 0), coalesce((SELECT max(number) FROM dead_letters), 0)"
    ).fetchone()
    return row[0], row[1]


@contextmanager
def transaction(connection: sqlite3.Connection) -> Iterator[None]:
    """Write everything in the block, or nothing. `connection` is in autocommit mode."""
    connection.execute("BEGIN IMMEDIATE")
    try:
        yield
        connection.execute("COMMIT")
    finally:
        # After some errors, such as a full disk, SQLite has already rolled back.
        if connection.in_transaction:
            connection.execute("ROLLBACK")


def require_readable(connection: sqlite3.Connection, *, name: str) -> None:
    """Check that the file behind `connection` is a spool of this version.

    Raises:
        SpoolCorrupt: the file belongs to another application, or has another version.
        sqlite3.Error: the file cannot be read.
    """
    version = _version(connection, name, len(MIGRATIONS))
    if version != len(MIGRATIONS):
        message = (
            f"spool {name}: its schema has version {version}, this program reads {len(MIGRATIONS)}; "
            f"let a producer of this version open it once"
        )
        raise SpoolCorrupt(message)


def _version(connection: sqlite3.Connection, name: str, latest: int) -> int:
    (application_id,) = connection.execute("PRAGMA application_id").fetchone()
    (version,) = connection.execute("PRAGMA user_version").fetchone()
    (tables,) = connection.execute("SELECT count(*) FROM sqlite_master").fetchone()
    if application_id != APPLICATION_ID and (application_id or version or tables):
        message = f"spool {name}: the file is a database of another application; give the spool another path"
        raise SpoolCorrupt(message)
    if version > latest:
        message = (
            f"spool {name}: its schema has version {version}, this program supports {latest}; "
            f"run the version of kpl-integrations that wrote it, or a later one"
        )
        raise SpoolCorrupt(message)
    return int(version)


class RecordRow(NamedTuple):
    """A row of `spooled`. Ids rise in the order of arrival."""

    id: int
    checksum: int
    envelope: bytes


class LetterRow(NamedTuple):
    """A row of `dead_letters`; see `MIGRATIONS`."""

    number: int
    id: str
    tier: int
    stream: str
    tenant: str | None
    reason: str
    first_seen: float
    due_at: float | None
    redrives: int
    checksum: int
    envelope: bytes


_COLUMNS: Final = "number, tier, due_at, redrives, checksum, envelope"


class StoredLetter(NamedTuple):
    """A dead letter and its row; `letter` is None if its bytes changed on the disk."""

    number: int
    # The index of the letter's tier in `TIERS`: 0 for critical.
    tier_rank: int
    due_at: float | None
    redrives: int
    letter: DeadLetter | None


class LetterFilter(msgspec.Struct, frozen=True, kw_only=True):
    """Selects the dead letters that meet every given condition. Instants are Unix seconds of `first_seen`."""

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
            # One parameter for any number of ids, because SQLite limits the number of parameters.
            conditions.append("id IN (SELECT value FROM json_each(?))")
            parameters.append(msgspec.json.encode(self.ids).decode())
        return " AND ".join(conditions), parameters


def records_after(connection: sqlite3.Connection, last_id: int, limit: int, max_bytes: int) -> list[RecordRow]:
    """Return up to `limit` spooled records that arrived after `last_id`, in order, until they exceed `max_bytes`."""
    rows: list[RecordRow] = []
    statement = "SELECT id, checksum, envelope FROM spooled WHERE id > ? ORDER BY id LIMIT ?"
    append_rows(rows, connection.execute(statement, (last_id, limit)), max_bytes)
    return rows


def stored_streams(connection: sqlite3.Connection, most: int) -> set[str]:
    """Return the streams of the spooled records, up to `most`, in one pass over the table.

    An envelope begins with its stream, so SQLite compares the beginnings. A million records take about 0.6 s.
    """
    streams: set[str] = set()
    beginnings: list[bytes] = []
    next_id = 0
    while len(beginnings) < most:
        others = "".join(f" AND substr(envelope, 1, {len(each)}) <> ?" for each in beginnings)
        statement = f"SELECT id, checksum, envelope FROM spooled WHERE id >= ?{others} ORDER BY id LIMIT 1"  # noqa: S608 - lengths only
        row = connection.execute(statement, (next_id, *beginnings)).fetchone()
        if row is None:
            break
        next_id, checksum, envelope = row
        record = decode_record(checksum, envelope)
        if record is None:
            # It stays in the file for manual recovery.
            next_id += 1
            continue
        name = record.stream.encode()
        # At least the lengths of the array and of the name.
        beginnings.append(envelope[: max(2, envelope.index(name) + len(name))])
        streams.add(record.stream)
    return streams


def append_rows(rows: list[RecordRow], cursor: sqlite3.Cursor, max_bytes: int) -> int:
    """Append what `cursor` reads until the envelopes exceed `max_bytes`; return how many bytes are left."""
    for row in cursor:
        rows.append(RecordRow(*row))
        max_bytes -= len(rows[-1].envelope)
        if max_bytes <= 0:
            break
    return max_bytes


def letter_row(letter: DeadLetter, *, due_at: float | None) -> LetterRow:
    """Return the row of a letter; the spool assigns its number."""
    checksum, envelope = encode(letter)
    return LetterRow(
        number=0,
        id=letter.id,
        tier=TIERS.index(letter.tier),
        stream=letter.stream,
        tenant=letter.tenant,
        reason=letter.reason,
        first_seen=letter.first_seen,
        due_at=due_at,
        redrives=0,
        checksum=checksum,
        envelope=envelope,
    )


def letters_due(connection: sqlite3.Connection, now: float, limit: int, *, latest: float) -> list[StoredLetter]:
    """Return up to `limit` letters due by `now`: critical first, within a tier the longest due first.

    No letter is ever scheduled beyond `latest`. A later `due_at` was written while the clock was wrong, so such a
    letter is due too.
    """
    letters: list[StoredLetter] = []
    for tier_rank in range(len(TIERS)):
        # One query per tier and condition, so that the index skips letters that are not due.
        for condition, bound in (("due_at <= ?", now), ("due_at > ?", latest)):
            statement = f"SELECT {_COLUMNS} FROM dead_letters WHERE tier = ? AND {condition} ORDER BY due_at LIMIT ?"  # noqa: S608 - our own names
            rows = connection.execute(statement, (tier_rank, bound, limit - len(letters)))
            letters.extend(_stored(row) for row in rows)
    return letters


def next_due_after(connection: sqlite3.Connection, now: float) -> float | None:
    """Return when the next letter becomes due, None if none ever will."""
    instants = []
    for tier_rank in range(len(TIERS)):
        row = connection.execute(
            "SELECT due_at FROM dead_letters WHERE tier = ? AND due_at > ? ORDER BY due_at LIMIT 1", (tier_rank, now)
        ).fetchone()
        if row is not None:
            instants.append(float(row[0]))
    return min(instants, default=None)


def letters_matching(
    connection: sqlite3.Connection, wanted: LetterFilter, limit: int, *, after: tuple[int, int]
) -> list[StoredLetter]:
    """Return up to `limit` letters that match: critical first, within a tier in the order of arrival.

    `after` is the (tier_rank, number) of the last letter already read.
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
    """Return the number of the latest letter, 0 if there is none."""
    (number,) = connection.execute("SELECT coalesce(max(number), 0) FROM dead_letters").fetchone()
    return int(number)


def _stored(row: Sequence[Any]) -> StoredLetter:
    number, tier_rank, due_at, redrives, checksum, envelope = row
    return StoredLetter(number, tier_rank, due_at, redrives, decode_letter(checksum, envelope))
