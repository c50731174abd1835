"""The tables of a spool file, and how an older file becomes a present one.

`PRAGMA user_version` counts the migrations a file has seen. To change the tables, append a
script to `MIGRATIONS`; never touch one that was released. `PRAGMA application_id` tells a
spool from somebody else's database.
"""

import sqlite3
from collections.abc import Sequence
from typing import Final

from kpl_core.durability.spool.spool_error import SpoolCorrupt

__all__ = ["APPLICATION_ID", "MIGRATIONS", "migrate", "require_readable"]

# "KPLs" in ASCII.
APPLICATION_ID: Final = 0x4B504C73

# In `dead_letters`, what a query may filter or sort by stands beside the envelope that says all:
# `tier` is 0 for critical, `due_at` the Unix seconds of the next automatic redrive, NULL for none.
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
        # Every index ends with the row's number, so this one is (tier, number).
        "CREATE INDEX dead_letters_by_tier ON dead_letters (tier)",
        "CREATE INDEX dead_letters_by_due_at ON dead_letters (tier, due_at)",
    ),
)


def migrate(connection: sqlite3.Connection, *, name: str, migrations: Sequence[Sequence[str]] = MIGRATIONS) -> None:
    """Bring the file behind `connection` (autocommit) to the latest version, in one transaction.

    It writes even if there is nothing to change, so that a full or read-only disk shows here
    and not at the first record.

    Raises:
        SpoolCorrupt: the file is another application's, or was written by a later version of this one.
        sqlite3.Error: the file cannot be written.
    """
    connection.execute("BEGIN IMMEDIATE")
    try:
        version = _version(connection, name, len(migrations))
        for statements in migrations[version:]:
            for statement in statements:
                connection.execute(statement)
        connection.execute(f"PRAGMA application_id = {APPLICATION_ID}")
        connection.execute(f"PRAGMA user_version = {len(migrations)}")
        connection.execute("COMMIT")
    finally:
        if connection.in_transaction:
            connection.execute("ROLLBACK")


def require_readable(connection: sqlite3.Connection, *, name: str) -> None:
    """Check that the file behind `connection` is a spool of this version.

    Raises:
        SpoolCorrupt: it is another application's, or of another version.
        sqlite3.Error: it cannot be read.
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
        message = f"spool {name}: the file is another application's database; give the spool another path"
        raise SpoolCorrupt(message)
    if version > latest:
        message = (
            f"spool {name}: its schema has version {version}, this program knows {latest}; "
            f"run the version of kpl-integrations that wrote it, or a later one"
        )
        raise SpoolCorrupt(message)
    return int(version)
