"""Decode Content-Encoding (gzip, zstd) with a bound on the decompressed size."""

import contextlib
import zlib
from typing import Final

import zstandard

from kpl_integrations.ingest.decoding.decoded import DecodeRefusal

_GZIP_WINDOW: Final = 16 + zlib.MAX_WBITS
_GZIP_PIECE_BYTES: Final = 65_536
# The window that a decoder should support (RFC 8878, 3.1.1.1.2). A larger one would cost memory.
_ZSTD_WINDOW_BYTES: Final = 8 * 1024 * 1024
# A block of 4 bytes can expand to 128 KiB (RFC 8878, 3.1.1.2), so one byte expands to at most this many.
_ZSTD_EXPANSION: Final = 32 * 1024
_ZSTD_LEAST_PIECE: Final = 64
# zlib, "Maximum Compression Factor".
_GZIP_EXPANSION: Final = 1_032
# One member is usual and some tools write several. Each costs a decoder of its own.
_MOST_MEMBERS: Final = 100
_GZIP: Final = "gzip"
# "A recipient SHOULD consider x-gzip to be equivalent to gzip" (RFC 9110, section 8.4.1.3).
_GZIPS: Final = frozenset({_GZIP, "x-gzip"})
_ZSTD: Final = "zstd"
_TOO_EARLY: Final = "it ends too early"
_TOO_MANY: Final = f"it has more than {_MOST_MEMBERS} members"
_NOT_ENCODED: Final = frozenset({"", "identity"})


def inflate(content_encoding: str | None, body: bytes, *, max_inflated_bytes: int) -> bytes:
    """Return the decoded body of a request with this `Content-Encoding`: none, gzip or zstd.

    The field is a list (RFC 9110, sections 5.6.1 and 8.4). Empty elements and `identity` are ignored. More than
    one coding is rejected; no client compresses a body twice on purpose.

    Memory is bounded by twice `max_inflated_bytes`, for all sizes that the body declares. Several gzip members or
    zstd frames may follow one another.

    Raises:
        DecodeRefusal: 413 if the result is larger, 415 for another encoding, 400 for a body that is
            truncated, damaged or followed by other bytes.
    """
    listed = [coding.strip().lower() for coding in (content_encoding or "").split(",")]
    codings = [coding for coding in listed if coding not in _NOT_ENCODED]
    if not codings:
        if len(body) > max_inflated_bytes:
            raise _too_large(max_inflated_bytes)
        return body
    if len(codings) == 1 and codings[0] in _GZIPS:
        return _gunzip(body, max_inflated_bytes)
    if codings == [_ZSTD]:
        return _unzstd(body, max_inflated_bytes)
    said = ", ".join(codings)
    detail = f"Content-Encoding is {said[:40]!r}; send gzip, zstd or none, and only one of them"
    raise DecodeRefusal(415, "unsupported-content-encoding", detail)


def _gunzip(body: bytes, most: int) -> bytes:
    parts: list[bytes] = []
    room = most
    at = members = 0
    while at < len(body) or not members:
        if members == _MOST_MEMBERS:
            raise _damaged(_GZIP, _TOO_MANY, most - room)
        members += 1
        member = zlib.decompressobj(_GZIP_WINDOW)
        while not member.eof:
            if at >= len(body):
                raise _damaged(_GZIP, _TOO_EARLY, most - room)
            # In pieces, because each member copies what follows it.
            piece = body[at : at + _GZIP_PIECE_BYTES]
            at += len(piece)
            try:
                # One byte above the bound is enough to detect that the body is too large.
                parts.append(member.decompress(piece, room + 1))
            except zlib.error as error:
                raise _damaged(_GZIP, str(error), min(most, most - room + len(piece) * _GZIP_EXPANSION)) from None
            room -= len(parts[-1])
            if room < 0:
                raise _too_large(most)
        at -= len(member.unused_data)
    return parts[0] if len(parts) == 1 else b"".join(parts)


def _unzstd(body: bytes, most: int) -> bytes:
    # Most bodies are one frame that declares its size. Then no byte is copied twice.
    with contextlib.suppress(zstandard.ZstdError):
        if 0 < zstandard.frame_content_size(body) <= most:
            return zstandard.ZstdDecompressor(max_window_size=_ZSTD_WINDOW_BYTES).decompress(
                body, allow_extra_data=False
            )
    return _unzstd_frames(body, most)


def _unzstd_frames(body: bytes, most: int) -> bytes:
    parts: list[bytes] = []
    room = most
    at = 0
    frames = 0
    while at < len(body) or not frames:
        if frames == _MOST_MEMBERS:
            raise _damaged(_ZSTD, _TOO_MANY, most - room)
        frames += 1
        frame = zstandard.ZstdDecompressor(max_window_size=_ZSTD_WINDOW_BYTES).decompressobj()
        while not frame.eof:
            if at >= len(body):
                raise _damaged(_ZSTD, _TOO_EARLY, most - room)
            # zstandard cannot bound the output of a call, so bound its input.
            piece = body[at : at + max(_ZSTD_LEAST_PIECE, room // _ZSTD_EXPANSION)]
            at += len(piece)
            try:
                parts.append(frame.decompress(piece))
            except zstandard.ZstdError as error:
                raise _damaged(_ZSTD, str(error), min(most, most - room + len(piece) * _ZSTD_EXPANSION)) from None
            room -= len(parts[-1])
            if room < 0:
                raise _too_large(most)
        at -= len(frame.unused_data)
    return b"".join(parts)


def _too_large(most: int) -> DecodeRefusal:
    detail = f"the body has more than {most:,} bytes when decoded; send fewer records in a request"
    return DecodeRefusal(413, "too-large", detail, inflated_bytes=most)


def _damaged(encoding: str, said: str, inflated_bytes: int) -> DecodeRefusal:
    detail = f"the body cannot be decoded as {encoding}: {said}; send all of it again"
    return DecodeRefusal(400, "encoding", detail, inflated_bytes=inflated_bytes)
