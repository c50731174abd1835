"""The library's HTTP/2 connection (h2), with the gateway's settings."""

from collections.abc import Callable, Iterable
from typing import Final

from h2.config import H2Configuration
from h2.connection import H2Connection
from h2.settings import SettingCodes, Settings
from hpack import Decoder
from hpack.struct import HeaderTuple

STREAM_WINDOW_BYTES: Final = 262_144
CONNECTION_WINDOW_BYTES: Final = 524_288
FIRST_WINDOW_BYTES: Final = 65_535
"""That of a new connection (RFC 9113, section 6.9.2)."""
MOST_TABLE_BYTES: Final = 4_096
"""The encoder's table of header fields: its memory is the server's, and the client's setting only a bound."""


class _Frames(H2Connection):
    """The library's connection, which remembers the ends of fewer streams: 65,536 of them take 5 MB."""

    MAX_CLOSED_STREAMS = 1_000


class _CountingDecoder(Decoder):
    """Tells how many fields each header block has, also one of a stream that has ended."""

    def __init__(self, most_bytes: int, count_fields: Callable[[int], None]) -> None:
        super().__init__(max_header_list_size=most_bytes)
        self._count_fields = count_fields

    def decode(self, data: bytes, raw: bool = False) -> Iterable[HeaderTuple]:  # noqa: FBT001, FBT002 - the library's
        """Return the fields of a block."""
        fields = list(super().decode(data, raw))
        self._count_fields(len(fields))
        return fields


def server_frames(most_header_bytes: int, *, most_streams: int, count_fields: Callable[[int], None]) -> H2Connection:
    """Return a server's side of a connection. `count_fields` is called for each header block, and may raise."""
    frames = _Frames(
        H2Configuration(
            client_side=False,
            header_encoding=None,
            # `RequestCycle` has done both.
            validate_outbound_headers=False,
            normalize_outbound_headers=False,
        )
    )
    frames.local_settings = Settings(
        client=False,
        initial_values={
            SettingCodes.MAX_CONCURRENT_STREAMS: most_streams,
            SettingCodes.MAX_HEADER_LIST_SIZE: most_header_bytes,
            SettingCodes.INITIAL_WINDOW_SIZE: STREAM_WINDOW_BYTES,
            SettingCodes.ENABLE_PUSH: 0,
        },
    )
    frames.decoder = _CountingDecoder(most_header_bytes, count_fields)
    return frames
