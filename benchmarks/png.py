"""Make the screenshot of a page smaller: a PNG with a palette of 256 colours needs a third of the bytes.

The format is that of the PNG specification (W3C, third edition). Reads what Chromium writes: 8 bits, RGB or RGBA.
"""

import struct
import zlib
from collections import Counter
from collections.abc import Iterator

_SIGNATURE = b"\x89PNG\r\n\x1a\n"
_CHANNELS = {2: 3, 6: 4}
_COLOURS = 256


def with_palette(png: bytes) -> bytes:
    """Return the picture with its 256 most frequent colours; each other pixel gets the nearest of them."""
    width, height, channels, packed = _parts(png)
    pixels: list[bytes] = []
    for row in _rows(zlib.decompress(packed), width * channels, channels):
        pixels.extend(bytes(row[at : at + 3]) for at in range(0, len(row), channels))
    counted = Counter(pixels)
    palette = [colour for colour, _ in counted.most_common(_COLOURS)]
    numbers = {colour: number for number, colour in enumerate(palette)}
    for colour in counted:
        if colour not in numbers:
            numbers[colour] = min(range(len(palette)), key=lambda number: _distance(palette[number], colour))
    lines = bytes(numbers[pixel] for pixel in pixels)
    # Filter 0: neighbours in a palette have nothing in common.
    raw = b"".join(b"\0" + lines[at : at + width] for at in range(0, len(lines), width))
    header = struct.pack(">IIBBBBB", width, height, 8, 3, 0, 0, 0)
    chunks = ((b"IHDR", header), (b"PLTE", b"".join(palette)), (b"IDAT", zlib.compress(raw, 9)), (b"IEND", b""))
    return _SIGNATURE + b"".join(
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data)) for kind, data in chunks
    )


def _distance(one: bytes, other: bytes) -> int:
    return sum((a - b) ** 2 for a, b in zip(one, other, strict=True))


def _parts(png: bytes) -> tuple[int, int, int, bytes]:
    """Return width, height, bytes for each pixel, and the compressed rows."""
    at, packed = len(_SIGNATURE), b""
    width = height = channels = 0
    while at < len(png):
        size, kind = struct.unpack_from(">I4s", png, at)
        data = png[at + 8 : at + 8 + size]
        if kind == b"IHDR":
            width, height, _, colour_type = struct.unpack_from(">IIBB", data)
            channels = _CHANNELS[colour_type]
        elif kind == b"IDAT":
            packed += data
        at += size + 12
    return width, height, channels, packed


def _rows(raw: bytes, length: int, channels: int) -> Iterator[bytearray]:
    """Yield the rows without their filters."""
    above = bytearray(length)
    for at in range(0, len(raw), length + 1):
        row = bytearray(raw[at + 1 : at + 1 + length])
        filter_type = raw[at]
        for x in range(length if filter_type else 0):
            left = row[x - channels] if x >= channels else 0
            corner = above[x - channels] if x >= channels else 0
            row[x] = (row[x] + _predicted(filter_type, left, above[x], corner)) & 0xFF
        yield row
        above = row


def _predicted(filter_type: int, left: int, up: int, corner: int) -> int:
    """Return what a filter predicts for a byte: 1 Sub, 2 Up, 3 Average, 4 Paeth."""
    if filter_type < 3:
        return left if filter_type == 1 else up
    if filter_type == 3:
        return (left + up) // 2
    guess = left + up - corner
    return min((left, up, corner), key=lambda value: abs(guess - value))
