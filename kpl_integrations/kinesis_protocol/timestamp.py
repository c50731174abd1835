"""An instant on the wire: seconds as a float in JSON, tagged milliseconds in CBOR."""

__all__ = ["Timestamp"]


class Timestamp:
    """An instant in milliseconds since 1970, to be put into an answer."""

    __slots__ = ("milliseconds",)

    def __init__(self, milliseconds: int) -> None:
        self.milliseconds = milliseconds

    def __repr__(self) -> str:
        return f"Timestamp({self.milliseconds})"
