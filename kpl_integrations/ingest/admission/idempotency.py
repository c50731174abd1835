"""Idempotency-Key: the same request twice is one request, within a bounded window.

The header is draft-ietf-httpapi-idempotency-key-header's, and so are the answers 409 and 422. A key is
remembered with the fingerprint of its request while that is worked on, and with its answer afterwards. A
request that was refused leaves no trace: the client is meant to send it again.
"""

import hashlib
from collections import OrderedDict
from typing import Final

import msgspec

from kpl_integrations.ingest.admission.admission import Refusal, Refused

__all__ = ["MOST_KEY_CHARACTERS", "IdempotencyWindow", "StoredAnswer", "fingerprint", "parse_key"]

MOST_KEY_CHARACTERS: Final = 255
_SHORTEST_QUOTED: Final = 3


class StoredAnswer(msgspec.Struct, frozen=True):
    """The answer to a request that was accepted."""

    status: int
    body: bytes


class _Entry(msgspec.Struct, frozen=True):
    fingerprint: bytes
    expires_at: float
    answer: StoredAnswer


def parse_key(value: bytes) -> str:
    """Return the key of an Idempotency-Key header: a structured field's string, or bare characters.

    Raises:
        Refused: it is empty, too long, or holds what is no printable ASCII.
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


def fingerprint(*parts: bytes) -> bytes:
    """Return what tells one request from another."""
    digest = hashlib.blake2b(digest_size=16)
    for part in parts:
        digest.update(len(part).to_bytes(8, "big"))
        digest.update(part)
    return digest.digest()


class IdempotencyWindow:
    """One tenant's keys: the latest `most_keys` answered in the last `seconds`, of `most_bytes` of answers at most.

    Pure; time is an argument. When it is full the oldest answered key is forgotten, and a repetition of its
    request would be a new one. A key whose request is worked on is kept until that ends: there are no more of these
    than requests.
    """

    def __init__(self, *, most_keys: int, seconds: float, most_bytes: int = 1 << 20) -> None:
        self._most_keys = most_keys
        self._seconds = seconds
        self._most_bytes = most_bytes
        # Fingerprints by key.
        self._working: dict[str, bytes] = {}
        # The first answered first.
        self._answered: OrderedDict[str, _Entry] = OrderedDict()
        self._bytes = 0

    def __len__(self) -> int:
        return len(self._working) + len(self._answered)

    def begin(self, key: str, request: bytes, now: float) -> StoredAnswer | None:
        """Return the answer the same request had before; None: it is new and yours to `finish` or `forget`.

        Raises:
            Refused: the first request with the key is not answered, or was another request.
        """
        self._expire(now)
        entry = self._answered.get(key)
        before = self._working.get(key) if entry is None else entry.fingerprint
        if before is None:
            self._working[key] = request
            return None
        if before != request:
            detail = "this Idempotency-Key came with another request before; use a new key for a new request"
            raise Refused(Refusal.KEY_REUSED, detail)
        if entry is None:
            detail = "the first request with this Idempotency-Key is still being worked on"
            raise Refused(Refusal.KEY_IN_USE, detail)
        return entry.answer

    def finish(self, key: str, answer: StoredAnswer, now: float) -> None:
        """Keep the answer for those who ask again."""
        self._answered[key] = _Entry(self._working.pop(key), now + self._seconds, answer)
        self._bytes += len(answer.body)
        while len(self._answered) > self._most_keys or self._bytes > self._most_bytes:
            self._drop_oldest()

    def forget(self, key: str) -> None:
        """Take a key back, because its request was not accepted."""
        self._working.pop(key, None)

    def _expire(self, now: float) -> None:
        while self._answered and next(iter(self._answered.values())).expires_at <= now:
            self._drop_oldest()

    def _drop_oldest(self) -> None:
        _, entry = self._answered.popitem(last=False)
        self._bytes -= len(entry.answer.body)
