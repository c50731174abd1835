"""Sequence numbers in the layout of the service: 188 bits, 56 decimal digits.

From the most significant bit: a leading 2, the second the shard was created, the low digit of
its index, a counter, a zero byte, the second of the write, the shard's index and a trailing 2
(layout observed by users of the service; the same the open emulators produce). Numbers of one
shard rise with the counter, and a child's numbers are all above its parents', because it was
created later.
"""

from typing import Final, NamedTuple

__all__ = ["LAST_COUNTER", "SequenceNumber", "format_sequence_number", "parse_sequence_number", "shard_bits"]

LAST_COUNTER: Final = 0x7FFF_FFFF_FFFF_FFFF

_SHARD: Final = 4
_WRITTEN: Final = 36
_COUNTER: Final = 80
_COUNTER_ABOVE_WRITTEN: Final = _COUNTER - _WRITTEN
_DIGIT: Final = 144
_CREATED: Final = 148
_LEAD: Final = 184
_VERSION: Final = 2


class SequenceNumber(NamedTuple):
    """The fields of a sequence number; instants are whole seconds since 1970."""

    shard_created_at: int
    counter: int
    written_at: int
    shard_index: int


def shard_bits(*, created_at: int, shard_index: int) -> int:
    """Return the bits that all sequence numbers of one shard share."""
    return (
        (_VERSION << _LEAD)
        | (created_at << _CREATED)
        | ((shard_index & 0xF) << _DIGIT)
        | (shard_index << _SHARD)
        | _VERSION
    )


def format_sequence_number(bits: int, counter: int, written_at: int) -> str:
    """Return the decimal sequence number of one record; `bits` come from `shard_bits`."""
    return str(bits + (((counter << _COUNTER_ABOVE_WRITTEN) + written_at) << _WRITTEN))


def parse_sequence_number(text: str) -> SequenceNumber | None:
    """Return the fields of a sequence number, None when it cannot have come from here."""
    if not (text.isascii() and text.isdigit()):
        return None
    number = int(text)
    shard_index = (number >> _SHARD) & 0xFFFF_FFFF
    fields = SequenceNumber(
        shard_created_at=(number >> _CREATED) & 0xF_FFFF_FFFF,
        counter=(number >> _COUNTER) & 0xFFFF_FFFF_FFFF_FFFF,
        written_at=(number >> _WRITTEN) & 0xF_FFFF_FFFF,
        shard_index=shard_index,
    )
    if number >> _LEAD != _VERSION or number & 0xF != _VERSION or (number >> _DIGIT) & 0xF != shard_index & 0xF:
        return None
    return fields
