"""Decode a large PutRecords request in JSON in steps."""

from collections.abc import Generator, Iterator
from typing import Final

import msgspec

from kpl_core.options.kinesis_limits import RECORDS_PER_REQUEST
from kpl_integrations.ingest.decoding.decoded import DecodeRefusal
from kpl_integrations.ingest.decoding.json_text import MALFORMED, json_pattern, too_deep
from kpl_integrations.ingest.decoding.steps import STEP_BYTES, ArrayRuns, elements_in_steps
from kpl_integrations.kinesis_protocol.requests import (
    SERIALIZATION,
    PutRecords,
    PutRecordsRequestEntry,
    RequestRefused,
    check_constraints,
)

_MEMBER: Final = rb'"(?:StreamName|StreamARN)" : "[^"\\]*" '
_HEAD: Final = json_pattern(rb' \{(?: %b,)* "Records" : \[' % _MEMBER)
_TAIL: Final = json_pattern(rb" (?:, %b)*\} " % _MEMBER)
_HEAD_BYTES: Final = 8_192
# An entry is not nested. Unknown members may be.
_MAX_DEPTH: Final = 64
_OTHERS: Final = msgspec.json.Decoder(PutRecords)
_ENTRIES: Final = msgspec.json.Decoder(list[PutRecordsRequestEntry])


def put_records_in_steps(body: bytes, max_uncut_bytes: int) -> Generator[None, None, PutRecords]:
    """Return a PutRecords request whose members are only those of the API.

    Raises:
        RequestRefused: it cannot be decoded, violates the API's constraints, or cannot be cut into records.
    """
    head = _HEAD.match(body[:_HEAD_BYTES])
    if head is None:
        message = (
            f"A request of more than {max_uncut_bytes:,} bytes may have the members StreamName, StreamARN and Records "
            f"only; send fewer records in a request."
        )
        raise RequestRefused(SERIALIZATION, message)
    runs = ArrayRuns(max_uncut_bytes, _MAX_DEPTH, too_deep("an entry of Records", _MAX_DEPTH))
    entries: list[PutRecordsRequestEntry] = []
    try:
        tail = _tail_of(body)
        for run in elements_in_steps(head, _pieces(body), runs, _TAIL):
            if run:
                entries += _ENTRIES.decode(run)
            if tail and len(entries) > RECORDS_PER_REQUEST:
                # One more than allowed is enough for the violated constraint: the others are not looked at.
                break
            yield
        else:
            tail = runs.tail
        request = _OTHERS.decode(head.group() + b"]" + tail)
    except (*MALFORMED, DecodeRefusal) as error:
        raise RequestRefused(SERIALIZATION, getattr(error, "detail", str(error))) from None
    request.records = entries[: RECORDS_PER_REQUEST + 1]
    check_constraints(request)
    return request


def _tail_of(body: bytes) -> bytes:
    """Return the text after the records, empty if it is not found in the last bytes."""
    tail = body[body.rfind(b"]", max(0, len(body) - _HEAD_BYTES)) + 1 :][:_HEAD_BYTES]
    return b"" if _TAIL.fullmatch(tail) is None else tail


def named_stream(body: bytes) -> str:
    """Return the stream that a large request names before or after its records; empty if its text is not found there.

    Raises:
        RequestRefused: the name violates the API's constraints.
    """
    head, tail = _HEAD.match(body[:_HEAD_BYTES]), _tail_of(body)
    if head is None or not tail:
        return ""
    try:
        request = _OTHERS.decode(head.group() + b"]" + tail)
    except MALFORMED:
        return ""
    # Only the name is checked here.
    request.records = [PutRecordsRequestEntry("k", data=b"")]
    check_constraints(request)
    return request.stream()


def _pieces(body: bytes) -> Iterator[bytes]:
    for at in range(_HEAD_BYTES, len(body), STEP_BYTES):
        yield body[at : at + STEP_BYTES]
