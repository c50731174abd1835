"""Reads records of the backlog back from the file. Rows are read without the lock, and claimed under it."""

import logging
import threading
from collections.abc import Callable, Sequence
from typing import Final

from kpl_core.durability.spool.claims import Claimed, ClaimTable
from kpl_core.durability.spool.envelope import decode_record
from kpl_core.durability.spool.store import SpoolStore
from kpl_core.durability.spool.tables import RecordRow

_log: Final = logging.getLogger(__name__)


class BacklogReader:
    """Runs on the writer's thread. `claims` returns the table while the spool is open, and needs the lock."""

    def __init__(self, lock: threading.Lock, claims: Callable[[], ClaimTable]) -> None:
        self._lock = lock
        self._claims = claims
        # Rows that could not be decoded.
        self.damaged = 0

    def claim(self, store: SpoolStore, limit: int, max_bytes: int) -> list[Claimed]:
        """Claim up to `limit` records of together at most `max_bytes`, but at least one; empty: there is no backlog."""
        claimed: list[Claimed] = []
        # Repeats only if every row it read was already claimed.
        while not claimed:
            with self._lock:
                query = self._claims().backlog_query(limit)
            try:
                rows, unread = store.records_by_id(query.released_ids, max_bytes)
                after = [] if rows else store.records_after(query.after_id, limit, max_bytes)
            except BaseException:
                with self._lock:
                    self._claims().unread(query.released_ids)
                raise
            with self._lock:
                self._claims().unread(unread)
                claimed = self._decode(rows + after, after, store)
            if not rows and not after:
                break
        return claimed

    def _decode(self, rows: Sequence[RecordRow], after: Sequence[RecordRow], store: SpoolStore) -> list[Claimed]:
        claims = self._claims()
        if after:
            claims.move_cursor(after[-1].id)
        claimed = []
        for row in rows:
            if not claims.claim(row.id, len(row.envelope)):
                continue
            record = decode_record(row.checksum, row.envelope)
            if record is None:
                self.damaged += 1
                _log.error(
                    "spool %s: record %d is damaged and stays in the file; recover it by hand", store.path, row.id
                )
                continue
            claimed.append(Claimed(row.id, record))
        return claimed
