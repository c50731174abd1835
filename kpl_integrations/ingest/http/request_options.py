"""What a request asks for beside its records: `ack` and `partial`, in the query or a header."""

from functools import lru_cache
from typing import Final, NamedTuple
from urllib.parse import parse_qsl

from kpl_integrations.ingest.admission.admission import Refusal, Refused
from kpl_integrations.ingest.tenants import ACKS, Ack

__all__ = ["ACK_HEADER", "RequestOptions", "request_options"]

ACK_HEADER: Final = b"x-ack"
_FLAGS: Final = {"true": True, "1": True, "": True, "false": False, "0": False}
_MOST_PARAMETERS: Final = 8


class RequestOptions(NamedTuple):
    """`ack` None: the tenant's default. `partial`: take the good records of a request, name the others."""

    ack: Ack | None = None
    partial: bool = False


@lru_cache(maxsize=256)
def request_options(query: bytes, ack_header: bytes | None) -> RequestOptions:
    """Return the options; the query comes before the header.

    Raises:
        Refused: a parameter is unknown, or has another value than it may.
    """
    ack: str | None = None if ack_header is None else ack_header.decode("latin-1").strip().lower()
    field, partial = "X-Ack", False
    try:
        parameters = parse_qsl(query.decode("ascii"), keep_blank_values=True, max_num_fields=_MOST_PARAMETERS)
    except ValueError:
        detail = "the query cannot be read; it may hold ack and partial"
        raise Refused(Refusal.BAD_PARAMETER, detail) from None
    for name, value in parameters:
        if name == "ack":
            ack, field = value, "ack"
        elif name == "partial" and value.lower() in _FLAGS:
            partial = _FLAGS[value.lower()]
        elif name == "partial":
            raise _bad(name, "true or false")
        else:
            detail = "the query holds an unknown parameter; it may hold ack and partial"
            raise Refused(Refusal.BAD_PARAMETER, detail)
    if ack is not None and ack not in ACKS:
        raise _bad(field, ", ".join(ACKS))
    return RequestOptions(ack, partial)


def _bad(field: str, allowed: str) -> Refused:
    # The value itself is not repeated: it may be anything.
    return Refused(Refusal.BAD_PARAMETER, f"{field} must be one of {allowed}", extensions={"field": field})
