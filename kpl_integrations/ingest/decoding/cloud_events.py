"""CloudEvents 1.0 over HTTP, in all three modes. Each event becomes one record in the JSON event format.

Structured and batched events keep their JSON text. A binary event has its attributes in headers. A Kinesis
record has no headers, so a binary event is converted to JSON: JSON data as it is, text as a string, other data
in data_base64 (CloudEvents JSON event format 1.0.2, section 3.1).

The partition key is the attribute `partitionkey` (CloudEvents partitioning extension).
"""

import re
from collections.abc import Mapping
from typing import Annotated, Final
from urllib.parse import unquote_to_bytes

import msgspec
import pybase64

from kpl_core import InvalidUserRecord, UserRecord
from kpl_core.records.user_record import require_size
from kpl_integrations.ingest.decoding.decoded import (
    Decoded,
    DecodeLimits,
    DecodeRefusal,
    NeighbourKeys,
    RecordProblem,
    checked_record,
)
from kpl_integrations.ingest.decoding.json_records import require_count
from kpl_integrations.ingest.decoding.json_text import (
    ABSENT,
    MALFORMED,
    SkippedObject,
    has_many_elements,
    is_deeper_than,
    malformed,
    mismatch,
    printable,
    require_text,
)
from kpl_integrations.ingest.decoding.trace_members import with_trace

_PREFIX: Final = "ce-"
_ANY_FORMAT: Final = "application/cloudevents"
_VERSION: Final = "1.0"
# "CloudEvents attribute names MUST consist of lower-case letters or digits" (1.0.2, naming conventions)
_NAME: Final = re.compile(r"[a-z0-9]+")
# Members of the JSON format, and the attribute that Content-Type carries.
_NOT_HEADERS: Final = frozenset({"data", "data_base64", "datacontenttype"})
_QUOTED: Final = re.compile(r'"((?:[^"\\]|\\.)*)"')
_ESCAPED: Final = re.compile(r"\\(.)")


_Attribute = Annotated[str, msgspec.Meta(extra_json_schema={"minLength": 1, "pattern": "^[ -~]+$"})]


class CloudEvent(msgspec.Struct, gc=False):
    """The required attributes, the partition key and the data; extension attributes are not checked.

    `Meta(extra_json_schema=...)` is for OpenAPI; it checks nothing.
    """

    specversion: Annotated[str, msgspec.Meta(extra_json_schema={"const": _VERSION})]
    id: _Attribute
    source: _Attribute
    type: _Attribute
    partitionkey: Annotated[str, msgspec.Meta(extra_json_schema={"minLength": 1, "maxLength": 256})] | None = None
    data: msgspec.Raw = msgspec.field(default_factory=lambda: ABSENT)
    data_base64: str | None = None


_EVENT: Final = msgspec.json.Decoder(CloudEvent)
_EVENTS: Final = msgspec.json.Decoder(list[msgspec.Raw])
_COUNTED_EVENTS: Final = msgspec.json.Decoder(list[SkippedObject])


def is_binary_mode(content_type: str, headers: Mapping[str, str]) -> bool:
    """Return True if the attributes of an event are in the headers (lower-case names).

    The content type decides first. A structured event may repeat its attributes as headers (HTTP binding 1.0.2,
    sections 3 and 3.2.2). An event in an unknown format is rejected and not wrapped as data.
    """
    return "ce-specversion" in headers and not content_type.lstrip().lower().startswith(_ANY_FORMAT)


def structured_event(body: bytes, limits: DecodeLimits, keys: NeighbourKeys) -> Decoded:
    """Return the record of application/cloudevents+json: the unchanged body.

    Raises:
        DecodeRefusal: it is not JSON in UTF-8.
    """
    require_text(body)
    try:
        return _decoded([body], limits, keys)
    except MALFORMED as error:
        raise malformed(error) from None


def batched_events(body: bytes, limits: DecodeLimits, keys: NeighbourKeys) -> Decoded:
    """Return the records of application/cloudevents-batch+json: each event's unchanged text.

    Raises:
        DecodeRefusal: it is not a JSON array in UTF-8, is empty, or has too many events.
    """
    require_text(body)
    try:
        if has_many_elements(body):
            require_count(len(_COUNTED_EVENTS.decode(body)), limits)
        texts = _EVENTS.decode(body)
    except msgspec.ValidationError as error:
        raise DecodeRefusal(400, "malformed", mismatch(error)[1], field="$") from None
    except MALFORMED as error:
        raise malformed(error) from None
    require_count(len(texts), limits)
    return _decoded([bytes(text) for text in texts], limits, keys)


def binary_event(
    content_type: str, body: bytes, limits: DecodeLimits, headers: Mapping[str, str], keys: NeighbourKeys
) -> Decoded:
    """Return the record of an event whose attributes are `ce-` headers (lower-case names).

    Raises:
        DecodeRefusal: an attribute's value is not UTF-8, or data with a JSON content type is not JSON.
    """
    try:
        # The text of the event is at least as long. Making a text that is too long costs memory.
        require_size(0, len(body), max_record_bytes=limits.max_record_bytes)
    except InvalidUserRecord as error:
        return Decoded([], [RecordProblem(0, "data", str(error))])
    members: dict[str, object] = {}
    for name, value in headers.items():
        if name.startswith(_PREFIX):
            attribute = name.removeprefix(_PREFIX)
            if _NAME.fullmatch(attribute) is None or attribute in _NOT_HEADERS:
                detail = (
                    f"{printable(name)} is not an attribute; a name has lower-case letters and digits, and data is "
                    f"the body"
                )
                return Decoded([], [RecordProblem(0, printable(name), detail)])
            members[attribute] = _attribute(name, value)
    if content_type:
        members["datacontenttype"] = content_type
    if body:
        name, data = _data_member(content_type, body)
        members[name] = data
    return _decoded([msgspec.json.encode(members)], limits, keys)


def _attribute(name: str, value: str) -> str:
    quoted = _QUOTED.fullmatch(value)
    if quoted is not None:
        value = _ESCAPED.sub(r"\1", quoted.group(1))
    try:
        # HTTP binding 1.0.2, section 3.1.3.2. The server decodes header values as Latin-1.
        return unquote_to_bytes(value.encode("latin-1")).decode()
    except UnicodeError:
        detail = f"{name} is not UTF-8; percent-encode its UTF-8 bytes"
        raise DecodeRefusal(400, "encoding", detail, index=0, field=name) from None


def _data_member(content_type: str, body: bytes) -> tuple[str, object]:
    media_type = content_type.partition(";")[0].strip().lower()
    if media_type == "application/json" or media_type.endswith("+json") or not media_type:
        require_text(body)
        try:
            msgspec.json.decode(body, type=msgspec.Raw)
        except MALFORMED as error:
            raise malformed(error, index=0) from None
        return "data", msgspec.Raw(body)
    if media_type.startswith("text/") or media_type == "application/xml" or media_type.endswith("+xml"):
        try:
            return "data", body.decode()
        except UnicodeDecodeError:
            pass  # another charset: keep the bytes
    return "data_base64", pybase64.b64encode(body).decode()


def _decoded(texts: list[bytes], limits: DecodeLimits, keys: NeighbourKeys) -> Decoded:
    records: list[UserRecord] = []
    problems: list[RecordProblem] = []
    for index, text in enumerate(texts):
        made = _record(text, index, limits, keys)
        if isinstance(made, RecordProblem):
            problems.append(made)
        else:
            records.append(made)
    return Decoded(records, problems)


def _record(text: bytes, index: int, limits: DecodeLimits, keys: NeighbourKeys) -> UserRecord | RecordProblem:
    try:
        event = _EVENT.decode(text)
    except msgspec.ValidationError as error:
        return RecordProblem(index, *mismatch(error))
    for name in ("id", "source", "type"):
        if not getattr(event, name):
            return RecordProblem(index, name, f"{name} is empty; every event needs one")
    if event.specversion != _VERSION:
        detail = f"specversion is {printable(event.specversion)!r}; send {_VERSION}"
        return RecordProblem(index, "specversion", detail)
    if event.data_base64 is not None and bytes(event.data):
        return RecordProblem(index, "data_base64", "the event has data and data_base64; send one of them")
    key = keys.deal() if event.partitionkey is None else event.partitionkey
    made = checked_record(UserRecord(key, text), index, limits, key_field="partitionkey")
    # Skip the depth check for events that are rejected anyway.
    if isinstance(made, UserRecord) and is_deeper_than(limits.max_depth, text):
        return RecordProblem(index, "$", f"the event is nested more than {limits.max_depth} deep; flatten it")
    is_traced = limits.trace_members and isinstance(made, UserRecord)
    # The extension "Distributed Tracing" of CloudEvents has these names too.
    return UserRecord(key, with_trace(text, limits, key)) if is_traced else made
