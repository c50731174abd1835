"""A request's header fields by name, when one of them stands there more than once (RFC 9110, section 5.3).

A list in several fields is the same list in one. What is no list may stand there once: of two values that differ
a proxy in front may have believed the other one, so neither is.
"""

from collections.abc import Sequence
from typing import Final

from kpl_integrations.ingest.admission.admission import Refusal, Refused

__all__ = ["header_fields"]

# All that is read here and is no list, and what a CloudEvent's attributes begin with.
_ONCE: Final = frozenset(
    {
        b"authorization",
        b"content-length",
        b"content-type",
        b"host",
        b"idempotency-key",
        b"x-ack",
        b"x-amz-date",
        b"x-amz-security-token",
        b"x-amz-target",
        b"x-explicit-hash-key",
        b"x-partition-key",
    }
)
_ATTRIBUTE: Final = b"ce-"
_LONGEST_NAME: Final = 100


def header_fields(headers: Sequence[tuple[bytes, bytes]]) -> dict[bytes, bytes]:
    """Return the fields by name (lower case, as a server gives them).

    Raises:
        Refused: one that may stand there once has two values.
    """
    fields = dict(headers)
    return fields if len(fields) == len(headers) else _joined(headers)


def _joined(headers: Sequence[tuple[bytes, bytes]]) -> dict[bytes, bytes]:
    fields: dict[bytes, bytes] = {}
    for name, value in headers:
        first = fields.get(name)
        if first is None:
            fields[name] = value
        elif name not in _ONCE and not name.startswith(_ATTRIBUTE):
            fields[name] = b"%b, %b" % (first, value)
        elif value != first:
            # A token, so without anything that a log line could not hold; the values may be secrets.
            said = name.decode("latin-1")[:_LONGEST_NAME]
            detail = f"the header field {said} stands there twice, with different values; send it once"
            raise Refused(Refusal.BAD_PARAMETER, detail, extensions={"field": said})
    return fields
