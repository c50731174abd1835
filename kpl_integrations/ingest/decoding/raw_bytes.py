"""application/octet-stream: the body is the record; its key comes in a header."""

from collections.abc import Mapping

from kpl_core import UserRecord
from kpl_integrations.ingest.decoding.checked_record import checked_record
from kpl_integrations.ingest.decoding.decoded import (
    Decoded,
    DecodeLimits,
    DecodeRefusal,
    RecordProblem,
    is_aggregated,
)
from kpl_integrations.ingest.decoding.partition_keys import NeighbourKeys

__all__ = ["octet_stream_body"]

KEY_HEADER = "x-partition-key"
HASH_KEY_HEADER = "x-explicit-hash-key"


def octet_stream_body(body: bytes, limits: DecodeLimits, headers: Mapping[str, str], keys: NeighbourKeys) -> Decoded:
    """Return the one record of a request: `X-Partition-Key` (UTF-8), `X-Explicit-Hash-Key`.

    Raises:
        DecodeRefusal: the header is no UTF-8.
    """
    key = headers.get(KEY_HEADER)
    try:
        # A server hands header values on as Latin-1, which loses nothing.
        partition_key = keys.deal() if key is None else key.encode("latin-1").decode()
    except UnicodeError:
        detail = "X-Partition-Key is no UTF-8; encode it as UTF-8"
        raise DecodeRefusal(400, "encoding", detail, index=0, field="X-Partition-Key") from None
    record = UserRecord(partition_key, body, headers.get(HASH_KEY_HEADER))
    made = checked_record(record, 0, limits, key_field="X-Partition-Key")
    if isinstance(made, RecordProblem):
        return Decoded([], [made])
    return Decoded([made], [], is_aggregated([made]))
