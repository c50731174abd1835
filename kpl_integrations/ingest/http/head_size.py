"""How large the head of a request is, measured by the pieces in which a connection receives it."""


class HeadSize:
    """The size of the head that is being received. A piece may also end a request, start others and have bodies."""

    __slots__ = ("_bytes", "_max_bytes", "_piece_bytes", "begins_within", "body_within", "ends_within", "most_bytes")

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._bytes = 0
        # The same, but with all of the piece in which it began, and the size of the current piece. A socket delivers
        # up to 256 KiB at once.
        self.most_bytes = self._piece_bytes = 0
        # Whether the current piece has the end of a request (then the size of the next head's part in it is unknown and
        # not counted), the start of one, or a part of a body.
        self.ends_within = self.begins_within = self.body_within = False

    def begin_piece(self, size_bytes: int) -> None:
        """Note that the parser gets so many bytes."""
        self.ends_within = self.begins_within = self.body_within = False
        self._piece_bytes = size_bytes

    def begin(self) -> None:
        """Note that a head begins in this piece."""
        self.begins_within = True
        self._bytes = self.most_bytes = 0

    def end_piece(self, size_bytes: int, *, is_within: bool) -> bool:
        """Count what the parser got, and return True if that is too large. `is_within`: a head is not complete."""
        if is_within:
            self.most_bytes += size_bytes
            if not self.ends_within:
                self._bytes += size_bytes
        else:
            # Neither head nor body: trailer fields, or bytes between chunks.
            is_beside = not (self.body_within or self.begins_within or self.ends_within)
            self._bytes = self._bytes + size_bytes if is_beside else 0
        return self._bytes > self._max_bytes

    def is_too_large(self, url: bytes, headers: list[tuple[bytes, bytes]]) -> bool:
        """Return True if this complete head is. It is measured only if its pieces are large enough."""
        if self.most_bytes + self._piece_bytes <= self._max_bytes:
            return False
        # Each field ends with ": " and a line break.
        return len(url) + sum([len(name) + len(value) + 4 for name, value in headers]) > self._max_bytes
