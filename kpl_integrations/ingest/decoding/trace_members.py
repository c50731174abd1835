"""Put the trace of a request into the JSON objects that it sends, as the members `traceparent` and `tracestate`.

A Kinesis record has no headers. So the trace travels as it does in typed topics (`kpl_core/records/topic.py`), whose
`trace_context_of` reads it, and in CloudEvents (extension "Distributed Tracing"). The members stand behind all others.
Every other byte stays: nothing is decoded and encoded again, so numbers, order and blanks are the client's.

An object stays as it is if it has a member of one of these names, or if it would become too large for a record.
"""

from typing import Final

import msgspec

from kpl_integrations.ingest.decoding.decoded import DecodeLimits
from kpl_integrations.ingest.decoding.json_text import BLANKS

_NAMES: Final = (b"traceparent", b"tracestate")
# A name of letters can be written in another way only with this.
_ESCAPE: Final = b"\\u"
_UTF8_BYTES_PER_CHARACTER: Final = 4


class _Own(msgspec.Struct):
    """The members of these names, of any type."""

    traceparent: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    tracestate: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET


_OWN: Final = msgspec.json.Decoder(_Own)


def trace_members(traceparent: str, tracestate: str) -> bytes:
    """Return the members for a trace, whose `tracestate` may be empty: JSON text without braces."""
    members = {"traceparent": traceparent}
    if tracestate:
        members["tracestate"] = tracestate
    return msgspec.json.encode(members)[1:-1]


def with_trace(text: bytes, limits: DecodeLimits, partition_key: str) -> bytes:
    """Return a JSON text with the members of the trace. Leave it unchanged if it is not an object or has such a member.

    `text` is valid JSON in UTF-8. Blanks may stand around the object.
    """
    members = limits.trace_members
    if not members:
        return text
    end = text.rfind(b"}")
    if end < 0 or text[end + 1 :].strip(BLANKS) or text.lstrip(BLANKS)[:1] != b"{":
        return text
    size = len(text) + len(members) + 1 + _UTF8_BYTES_PER_CHARACTER * len(partition_key)
    if size > limits.max_record_bytes or _has_own(text):
        return text
    comma = b"" if text[:end].rstrip(BLANKS)[-1:] == b"{" else b","
    return b"%b%b%b%b" % (text[:end], comma, members, text[end:])


def _has_own(text: bytes) -> bool:
    if not any(name in text for name in (*_NAMES, _ESCAPE)):
        return False
    own = _OWN.decode(text)
    return own.traceparent is not msgspec.UNSET or own.tracestate is not msgspec.UNSET
