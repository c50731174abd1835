"""Idempotency-Key: the same request twice is one request, within a bounded window.

The header is draft-ietf-httpapi-idempotency-key-header's, and so are the answers 409 and 422. A key is
remembered with the fingerprint of its request while that is worked on, and with its answer afterwards. A
request that was refused leaves no trace: the client is meant to send it again.
"""

import hashlib
from collections import OrderedDict
from typing import Final

import msgspec

from kpl_integrations.ingest.admission import Refusal, Refused

__all__ = ["MOST_KEY_CHARACTERS", "IdempotencyWindow", "StoredAnswer", "fingerprint", "parse_key"]

MOST_KEY_CHARACTERS: Final = 255
_SHORTEST_QUOTED: Final = 3


class StoredAnswer(msgspec.Struct, frozen=True):
    """The answer to a request that was accepted."""

    status: int
    body: bytes


class _Entry(msgspec.Struct):
    fingerprint: bytes
    expires_at: float
    answer: StoredAnswer | None = None


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
    """One tenant's keys: the latest `most_keys` of the last `seconds`, answers of `most_bytes` together at most.

    Pure; time is an argument. When it is full the oldest answered key is forgotten, and a repetition of its
    request would be a new one.
    """

    def __init__(self, *, most_keys: int, seconds: float, most_bytes: int = 1 << 20) -> None:
        self._most_keys = most_keys
        self._seconds = seconds
        self._most_bytes = most_bytes
        self._entries: OrderedDict[str, _Entry] = OrderedDict()
        self._bytes = 0

    def __len__(self) -> int:
        return len(self._entries)

    def begin(self, key: str, request: bytes, now: float) -> StoredAnswer | None:
        """Return the answer the same request had before; None: it is new and yours to `finish` or `forget`.

        Raises:
            Refused: the first request with the key is not answered, or was another request.
        """
        self._expire(now)
        entry = self._entries.get(key)
        if entry is None:
            self._entries[key] = _Entry(request, now + self._seconds)
            self._shrink()
            return None
        if entry.fingerprint != request:
            detail = "this Idempotency-Key came with another request before; use a new key for a new request"
            raise Refused(Refusal.KEY_REUSED, detail)
        if entry.answer is None:
            detail = "the first request with this Idempotency-Key is still being worked on"
            raise Refused(Refusal.KEY_IN_USE, detail)
        return entry.answer

    def finish(self, key: str, answer: StoredAnswer) -> None:
        """Keep the answer for those who ask again."""
        entry = self._entries.get(key)
        if entry is not None:
            entry.answer = answer
            self._bytes += len(answer.body)
            self._shrink()

    def forget(self, key: str) -> None:
        """Take a key back, because its request was not accepted."""
        self._drop(key)

    def _expire(self, now: float) -> None:
        while self._entries:
            key, entry = next(iter(self._entries.items()))
            if entry.expires_at > now:
                return
            self._drop(key)

    def _shrink(self) -> None:
        while len(self._entries) > self._most_keys or self._bytes > self._most_bytes:
            self._drop(next(iter(self._entries)))

    def _drop(self, key: str) -> None:
        entry = self._entries.pop(key, None)
        if entry is not None and entry.answer is not None:
            self._bytes -= len(entry.answer.body)
