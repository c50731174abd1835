"""What waits in the queue: a formatted log record, with what else is known of it."""

import msgspec

__all__ = ["ENTRY_BYTES", "Entry", "WholeAndStub", "entry_size"]

# What CPython keeps beside the bytes of an entry: two object headers and a place in the deque.
ENTRY_BYTES = 96


class WholeAndStub(msgspec.Struct, frozen=True, gc=False):
    """A record that no Kinesis record holds: the whole for the dead letters, its beginning for the stream.

    Both bear `mark`: the letter in its metadata, the stub as its field `dead_letter`.
    """

    mark: str
    whole: bytes
    stub: bytes


# The formatted record, and with it, where it is not drawn by chance, the partition key. A record that was split is
# a tuple of its pieces.
Entry = bytes | tuple[str | None, bytes | tuple[bytes, ...] | WholeAndStub]


def entry_size(entry: Entry) -> int:
    """Return what an entry counts in the queue, in bytes."""
    if isinstance(entry, bytes):
        return len(entry) + ENTRY_BYTES
    key, data = entry
    if isinstance(data, WholeAndStub):
        pieces: tuple[bytes, ...] = (data.whole, data.stub)
    else:
        pieces = (data,) if isinstance(data, bytes) else data
    return sum(len(piece) + ENTRY_BYTES for piece in pieces) + (0 if key is None else len(key))
