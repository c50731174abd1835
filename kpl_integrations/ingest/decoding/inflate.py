"""Decode Content-Encoding (gzip, zstd) with a bound on the decompressed size."""

import contextlib
import zlib
from collections.abc import Iterator
from typing import Final

import zstandard

from kpl_integrations.ingest.decoding.decoded import DecodeRefusal

_GZIP_WINDOW: Final = 16 + zlib.MAX_WBITS
_GZIP_PIECE_BYTES: Final = 65_536
# The most bytes of one piece of a result.
_OUTPUT_BYTES: Final = 262_144
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
    coding = _coding(content_encoding)
    whole = _whole_frame(body, max_inflated_bytes) if coding == _ZSTD else None
    if whole is not None:
        return whole
    parts = list(_pieces(coding, body, max_inflated_bytes))
    return parts[0] if len(parts) == 1 else b"".join(parts)


def inflated_pieces(content_encoding: str | None, body: bytes, *, max_inflated_bytes: int) -> Iterator[bytes]:
    """Return the decoded body as `inflate`, in pieces.

    Each costs about a millisecond, but up to 16 ms for a bomb (measured: 546 bytes of zstd).
    """
    return _pieces(_coding(content_encoding), body, max_inflated_bytes)


def declares_more(content_encoding: str, body: bytes, most_bytes: int) -> bool:
    """Return True if a compressed body says that it is larger. It may be larger too if it says nothing or lies."""
    coding = content_encoding.lower()
    if coding in _GZIPS:
        # ISIZE, modulo 2**32 (RFC 1952, 2.3.1).
        return int.from_bytes(body[-4:], "little") > most_bytes
    with contextlib.suppress(zstandard.ZstdError):
        return coding == _ZSTD and zstandard.frame_content_size(body) > most_bytes
    return False


def _coding(content_encoding: str | None) -> str:
    """Return the one coding of a body: gzip, zstd, or an empty string."""
    listed = [coding.strip().lower() for coding in (content_encoding or "").split(",")]
    codings = [coding for coding in listed if coding not in _NOT_ENCODED]
    if not codings:
        return ""
    if len(codings) == 1 and codings[0] in _GZIPS:
        return _GZIP
    if codings == [_ZSTD]:
        return _ZSTD
    said = ", ".join(codings)
    detail = f"Content-Encoding is {said[:40]!r}; send gzip, zstd or none, and only one of them"
    raise DecodeRefusal(415, "unsupported-content-encoding", detail)


def _pieces(coding: str, body: bytes, most: int) -> Iterator[bytes]:
    if coding:
        return _gunzip(body, most) if coding == _GZIP else _unzstd(body, most)
    if len(body) > most:
        raise _too_large(most)
    return iter((body,))


def _whole_frame(body: bytes, most: int) -> bytes | None:
    """Return the content of a body of one frame that declares its size, as most do, without copying a byte twice."""
    with contextlib.suppress(zstandard.ZstdError):
        if 0 < zstandard.frame_content_size(body) <= most:
            frame = zstandard.ZstdDecompressor(max_window_size=_ZSTD_WINDOW_BYTES)
            return frame.decompress(body, allow_extra_data=False)
    return None


def _gunzip(body: bytes, most: int) -> Iterator[bytes]:
    room = most
    at = members = 0
    while at < len(body) or not members:
        if members == _MOST_MEMBERS:
            raise _damaged(_GZIP, _TOO_MANY, most - room)
        members += 1
        member = zlib.decompressobj(_GZIP_WINDOW)
        piece, has_more = b"", False
        while not member.eof:
            if not piece and not has_more:
                if at >= len(body):
                    raise _damaged(_GZIP, _TOO_EARLY, most - room)
                # In pieces, because each member copies what follows it.
                piece = body[at : at + _GZIP_PIECE_BYTES]
                at += len(piece)
            # One byte above the bound is enough to detect that the body is too large.
            most_now = min(room + 1, _OUTPUT_BYTES)
            try:
                inflated = member.decompress(piece, most_now)
            except zlib.error as error:
                raise _damaged(_GZIP, str(error), min(most, most - room + len(piece) * _GZIP_EXPANSION)) from None
            piece, has_more = member.unconsumed_tail, len(inflated) == most_now
            room -= len(inflated)
            if room < 0:
                raise _too_large(most)
            yield inflated
        at -= len(member.unused_data)


def _unzstd(body: bytes, most: int) -> Iterator[bytes]:
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
                inflated = frame.decompress(piece)
            except zstandard.ZstdError as error:
                raise _damaged(_ZSTD, str(error), min(most, most - room + len(piece) * _ZSTD_EXPANSION)) from None
            room -= len(inflated)
            if room < 0:
                raise _too_large(most)
            yield inflated
        at -= len(frame.unused_data)


def _too_large(most: int) -> DecodeRefusal:
    detail = f"the body has more than {most:,} bytes when decoded; send fewer records in a request"
    return DecodeRefusal(413, "too-large", detail, inflated_bytes=most)


def _damaged(encoding: str, said: str, inflated_bytes: int) -> DecodeRefusal:
    detail = f"the body cannot be decoded as {encoding}: {said}; send all of it again"
    return DecodeRefusal(400, "encoding", detail, inflated_bytes=inflated_bytes)
