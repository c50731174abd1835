"""Idempotency-Key: a repeated request gets the first answer again, within a bounded window.

The header and the answers 409 and 422 are from draft-ietf-httpapi-idempotency-key-header. A key is stored with the
fingerprint of its request while the request is processed, and with the answer afterwards. A rejected request is not
stored, because the client should send it again.

Long answers are packed. Most of their results differ in few digits, so the answers of a thousand requests of 50 records
need about 0.3 MB instead of 6.
"""

import hashlib
import zlib
from collections import OrderedDict
from typing import Final

import msgspec

from kpl_integrations.ingest.admission.refusals import Refusal, Refused

MOST_KEY_CHARACTERS: Final = 255
_SHORTEST_QUOTED: Final = 3
# A thousand answers of this size fit into a window. Longer ones are packed, at 0.05 ms for 6 KB and 1.5 ms for 0.6 MB.
_LONG_BYTES: Final = 1_024


class StoredAnswer(msgspec.Struct, frozen=True):
    """The answer to an accepted request."""

    status: int
    body: bytes


class _Entry(msgspec.Struct, frozen=True):
    fingerprint: bytes
    expires_at: float
    status: int
    body: bytes
    is_packed: bool

    @property
    def answer(self) -> StoredAnswer:
        """Return the answer as it was sent."""
        return StoredAnswer(self.status, zlib.decompress(self.body) if self.is_packed else self.body)


def parse_key(value: bytes) -> str:
    """Return the key of an Idempotency-Key header: a structured field's string, or unquoted characters.

    Raises:
        Refused: it is empty, too long, or has characters outside printable ASCII.
    """
    text = value.decode("latin-1").strip()
    if len(text) >= _SHORTEST_QUOTED and text[0] == text[-1] == '"':
        text = text[1:-1]
    if not text or len(text) > MOST_KEY_CHARACTERS or not (text.isascii() and text.isprintable()):
        detail = (
            f"Idempotency-Key has {len(text)} characters; it must be 1 to {MOST_KEY_CHARACTERS} printable ASCII "
            f"characters, such as a UUID"
        )
        raise Refused(Refusal.BAD_PARAMETER, detail, extensions={"field": "Idempotency-Key"})
    return text


def begin_fingerprint(*parts: bytes) -> "hashlib.blake2b":
    """Return the hash of a request's parts, which differs between different requests. The caller adds the body."""
    digest = hashlib.blake2b(digest_size=16)
    for part in parts:
        digest.update(len(part).to_bytes(8, "big"))
        digest.update(part)
    return digest


class IdempotencyWindow:
    """One tenant's keys: at most `most_keys` keys and `most_bytes` of packed answers, each for `seconds`.

    Pure; time is an argument. When it is full, the oldest answered key is evicted; a repetition of its request is
    then a new request. The key of a request in progress is kept until the request ends, so there are never more of
    these than requests.
    """

    def __init__(self, *, most_keys: int, seconds: float, most_bytes: int = 1 << 20) -> None:
        self._most_keys = most_keys
        self._seconds = seconds
        self._most_bytes = most_bytes
        # Fingerprints of requests in progress, by key.
        self._working: dict[str, bytes] = {}
        # Oldest first.
        self._answered: OrderedDict[str, _Entry] = OrderedDict()
        self._bytes = 0

    def __len__(self) -> int:
        return len(self._working) + len(self._answered)

    def begin(self, key: str, request: bytes, now: float) -> StoredAnswer | None:
        """Return the earlier answer to the same request. None: it is new; call `finish` or `forget` when it ends.

        Raises:
            Refused: the first request with the key is in progress, or was a different request.
        """
        self._expire(now)
        entry = self._answered.get(key)
        before = self._working.get(key) if entry is None else entry.fingerprint
        if before is None:
            self._working[key] = request
            return None
        if before != request:
            detail = "this Idempotency-Key was used for a different request; use a new key for a new request"
            raise Refused(Refusal.KEY_REUSED, detail)
        if entry is None:
            detail = "the first request with this Idempotency-Key is still in progress"
            raise Refused(Refusal.KEY_IN_USE, detail)
        return entry.answer

    def finish(self, key: str, answer: StoredAnswer, now: float) -> None:
        """Store the answer for repetitions of the request."""
        is_packed = len(answer.body) > _LONG_BYTES
        body = zlib.compress(answer.body, level=1) if is_packed else answer.body
        self._answered[key] = _Entry(self._working.pop(key), now + self._seconds, answer.status, body, is_packed)
        self._bytes += len(body)
        while len(self._answered) > self._most_keys or self._bytes > self._most_bytes:
            self._drop_oldest()

    def forget(self, key: str) -> None:
        """Remove the key of a rejected request."""
        self._working.pop(key, None)

    def _expire(self, now: float) -> None:
        while self._answered and next(iter(self._answered.values())).expires_at <= now:
            self._drop_oldest()

    def _drop_oldest(self) -> None:
        _, entry = self._answered.popitem(last=False)
        self._bytes -= len(entry.body)
