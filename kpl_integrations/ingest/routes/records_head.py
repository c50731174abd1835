"""What the head of a request for records says: read once, however many requests come with the same one."""

from collections.abc import Mapping
from typing import Final

import msgspec

from kpl_integrations.ingest.admission.admission import Refusal, Refused
from kpl_integrations.ingest.http.request_options import ACK_HEADER, RequestOptions, request_options

__all__ = ["BODY_ALONE", "RecordsHead", "records_head"]

# Types whose body says it all, in the spelling of nearly all clients: no other header field is looked at.
BODY_ALONE: Final = frozenset({"application/json", "application/x-ndjson"})
_PLAIN_TYPES: Final = {name.encode(): name for name in BODY_ALONE}
_NO_OPTIONS: Final = RequestOptions()
_MOST_QUERY_BYTES: Final = 256

Headers = Mapping[bytes, bytes]


class RecordsHead(msgspec.Struct, frozen=True, gc=False):
    """The stream as it was asked for, and the rest that holds whoever the tenant is and whatever the body."""

    stream: str
    options: RequestOptions
    authorization: str | None
    # One of `BODY_ALONE`, where nothing else decides what the body is.
    plain_type: str | None
    headers: Headers

    def __repr__(self) -> str:
        """Leave out the credentials."""
        return f"<RecordsHead of {self.stream!r}, {self.options}>"


def records_head(stream: str, query: bytes, headers: Headers) -> RecordsHead:
    """Read a head; the last of two fields of one name counts.

    Raises:
        Refused: the query or X-Ack says what it may not.
    """
    authorization = headers.get(b"authorization")
    is_plain = b"content-encoding" not in headers and b"ce-specversion" not in headers
    return RecordsHead(
        stream,
        _options(query, headers.get(ACK_HEADER)) if query or ACK_HEADER in headers else _NO_OPTIONS,
        None if authorization is None else authorization.decode("latin-1"),
        _PLAIN_TYPES.get(headers.get(b"content-type", b"")) if is_plain else None,
        headers,
    )


def _options(query: bytes, ack: bytes | None) -> RequestOptions:
    if len(query) + len(ack or b"") > _MOST_QUERY_BYTES:
        detail = f"query and X-Ack have more than {_MOST_QUERY_BYTES} bytes; they may hold ack and partial"
        raise Refused(Refusal.BAD_PARAMETER, detail)
    return request_options(query, ack)
