"""The OpenAPI 3.1 description of the gateway.

Schemas come from the structs that decode requests and encode answers (`msgspec.json.schema_components`). The answers
to rejected requests come from the table of refusals. Only what neither of them can say is written here.
"""

from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any, Final

import msgspec

from kpl_integrations.gateway_figures import StatsDocument
from kpl_integrations.ingest.admission.idempotency import MOST_KEY_CHARACTERS
from kpl_integrations.ingest.admission.refusals import REFUSALS, SERVER_REFUSALS, Refusal
from kpl_integrations.ingest.decoding.cloud_events import CloudEvent
from kpl_integrations.ingest.decoding.json_records import HASH_KEY_PATTERN, WireRecord
from kpl_integrations.ingest.decoding.otlp_body import JSON, PROTOBUF, RESOURCES
from kpl_integrations.ingest.http.answers import PROBLEM_JSON, Accepted, Delivered, Problem
from kpl_integrations.ingest.request.kinesis_wire import UNAVAILABLE_ANSWER, WIRE_ANSWERS, WIRE_CODES
from kpl_integrations.ingest.request.otlp import OTLP_PATHS, RpcStatus
from kpl_integrations.ingest.settings import IngestSettings
from kpl_integrations.ingest.streams.upstream import FORWARDED
from kpl_integrations.ingest.tenants import ACKS
from kpl_integrations.kinesis_protocol.wire import JSON_CONTENT_TYPE, TARGET_PREFIX

STRUCTS: Final = (WireRecord, CloudEvent, Accepted, Delivered, Problem, RpcStatus, StatsDocument)
# The codes of decoders that replace the code of a row.
FINER_CODES: Final[Mapping[Refusal, tuple[str, ...]]] = MappingProxyType(
    {
        Refusal.MALFORMED: ("truncated", "encoding", "too-deep"),
        Refusal.TOO_LARGE: ("too-many-records",),
        Refusal.UNSUPPORTED: ("unsupported-content-encoding",),
    }
)
# The refusals of requests for records; the others are answers to unknown paths.
_RECORD_REFUSALS: Final = tuple(each for each in Refusal if each is not Refusal.UNKNOWN_PATH)
# Those that depend on what only the records route has: keys, paths, methods, options and results per record.
_OTLP_REFUSALS: Final = tuple(
    each
    for each in _RECORD_REFUSALS
    if each not in {Refusal.FORBIDDEN, Refusal.METHOD, Refusal.KEY_IN_USE, Refusal.KEY_REUSED, Refusal.EXPIRED}
    and each not in SERVER_REFUSALS
)
_KEY_PATTERN: Final = "^[!#-~]([ !#-~]{0,253}[!#-~])?$"
_STREAM_PATTERN: Final = "^[a-zA-Z0-9_.-]{1,128}$"
_REF: Final = "#/components/schemas/"

Document = dict[str, Any]

_BINARY: Final[Document] = {"schema": {"type": "string", "format": "binary"}}
_OBJECT: Final[Document] = {"schema": {"type": "object"}}
_TEXT: Final[Document] = {"type": "string"}
_AWS_ERROR: Final[Document] = {
    "schema": {
        "type": "object",
        "required": ["__type", "message"],
        "properties": {"__type": _TEXT, "message": _TEXT},
    }
}
_DRAFT: Final[Document] = {"schema": _TEXT, "description": "draft-ietf-httpapi-ratelimit-headers"}
_PARTITION_KEY: Final[Document] = _TEXT | {"minLength": 1, "maxLength": 256, "pattern": "^[!-~]+$"}


def openapi_document(settings: IngestSettings) -> Document:
    """Return the description of a gateway with these settings, as JSON values."""
    stats_problems = _problems([Refusal.NO_CREDENTIALS, Refusal.BAD_CREDENTIALS])
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Kinesis ingest gateway",
            "version": "1",
            "description": "Accepts records over HTTP and ships them to Kinesis: aggregated, fair, acknowledged.",
        },
        "security": [{}, {"apiKey": []}],
        "paths": {
            "/v1/streams/{stream}/records": {"post": _records(settings)},
            "/livez": _get("Whether the process is alive", {"200": _json("Alive")}),
            "/readyz": _get(
                "Whether to send traffic here; with ?verbose the state of each part",
                {"200": _json("Ready"), "503": _json("Not ready")},
                {"name": "verbose", "in": "query", "allowEmptyValue": True, "schema": _TEXT},
            ),
            "/metrics": _get("Metrics for Prometheus", {"200": _response("OK", {"text/plain": {}})}),
            "/v1/stats": _get(
                "Figures of the whole gateway with the admin key, of one tenant with its own key",
                {"200": _json("OK", "StatsDocument"), **stats_problems},
            ),
            "/openapi.json": _get("This document", {"200": _json("OK")}),
            **protocol_paths(),
        },
        "components": {
            "securitySchemes": {"apiKey": {"type": "http", "scheme": "bearer"}},
            "schemas": schemas(settings),
            "headers": {
                "Retry-After": {"schema": _TEXT | {"pattern": "^[0-9]+$"}, "description": "Seconds."},
                "RateLimit": _DRAFT,
                "RateLimit-Policy": _DRAFT,
                "WWW-Authenticate": {"schema": _TEXT, "description": "Bearer."},
                "Allow": {"schema": _TEXT, "description": "The allowed methods."},
            },
        },
    }


def schemas(settings: IngestSettings) -> Document:
    """Return the schemas of all structs, and what their types cannot express."""
    _, components = msgspec.json.schema_components(STRUCTS, ref_template=_REF + "{name}")
    found = {name: _plain(schema) for name, schema in components.items()}
    record = found.pop("WireRecord")
    del record["title"], record["description"]
    found["Record"] = {
        "description": f"Key and data have at most {settings.max_record_bytes:,} bytes together.",
        "oneOf": [_without(record, "data_base64", "data"), _without(record, "data", "data_base64")],
    }
    # Extension attributes are described as strings. An event has data or data_base64, not both.
    found["CloudEvent"] = _without(found["CloudEvent"], "data_base64") | {
        "patternProperties": {"^x[a-z0-9]{1,19}$": {"type": "string", "pattern": "^[ -~]*$"}},
        "additionalProperties": False,
    }
    return found


def _plain(schema: Any) -> Any:  # noqa: ANN401 - JSON
    """Return a schema of msgspec for readers: optional members are left out, never null; no docstring details."""
    if isinstance(schema, list):
        return [_plain(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    plain = {name: _plain(value) for name, value in schema.items() if not (name == "default" and value is None)}
    if isinstance(plain.get("anyOf"), list) and {"type": "null"} in plain["anyOf"]:
        (choice,) = (each for each in plain.pop("anyOf") if each != {"type": "null"})
        plain |= choice
    if isinstance(plain.get("description"), str):
        plain["description"] = plain["description"].partition("\n")[0]
    return plain


def _without(schema: Document, member: str, *required: str) -> Document:
    """Return the schema of an object without one member; `required` are further required members."""
    properties = {name: each for name, each in schema["properties"].items() if name != member}
    return {**schema, "properties": properties, "required": [*schema["required"], *required]}


def _records(settings: IngestSettings) -> Document:
    acks = [ack for ack in ACKS if ack != "spooled" or settings.spool is not None]
    key = _TEXT | {"minLength": 1, "maxLength": MOST_KEY_CHARACTERS, "pattern": _KEY_PATTERN}
    return {
        "operationId": "putRecords",
        "summary": "Put records into a stream: all of them, or none",
        "parameters": [
            _parameter("path", "stream", _TEXT | {"pattern": _STREAM_PATTERN}, required=True),
            _parameter("query", "ack", {"enum": acks}, description="Has precedence over X-Ack."),
            _parameter("query", "partial", {"enum": ["true", "false"]}),
            _parameter("header", "X-Ack", {"enum": acks}),
            _parameter("header", "X-Request-Id", _TEXT | {"pattern": "^[A-Za-z0-9._-]{1,128}$"}, description="Its id."),
            _parameter("header", "Idempotency-Key", key),
            _parameter(
                "header",
                "X-Partition-Key",
                _PARTITION_KEY,
                description="The key of application/octet-stream; the default is random.",
            ),
            _parameter(
                "header",
                "X-Explicit-Hash-Key",
                _TEXT | {"pattern": HASH_KEY_PATTERN},
                description="The explicit hash key of application/octet-stream.",
            ),
        ],
        "requestBody": {"required": True, "content": _content(settings)},
        "responses": {
            "200": _json("ack=delivered: the result of each record", "Delivered", _QUOTA_HEADERS),
            "202": _json("ack=queued or spooled: accepted", "Accepted", _QUOTA_HEADERS),
            **_problems(_RECORD_REFUSALS),
        },
    }


def _parameter(place: str, name: str, schema: Document, **more: object) -> Document:
    return {"name": name, "in": place, "schema": schema, **more}


def _content(settings: IngestSettings) -> Document:
    def many(name: str) -> Document:
        return {"type": "array", "items": {"$ref": _REF + name}, "minItems": 1, "maxItems": settings.max_records}

    envelope = {
        "type": "object",
        "required": ["records"],
        "additionalProperties": False,
        "properties": {"records": many("Record")},
    }
    return {
        JSON: {"schema": {"oneOf": [{"$ref": _REF + "Record"}, envelope]}},
        # As in OpenAPI 3.2 for sequential types: the values, one per line.
        "application/x-ndjson": {"schema": many("Record")},
        "application/octet-stream": _BINARY,
        "application/cloudevents+json": {"schema": {"$ref": _REF + "CloudEvent"}},
        "application/cloudevents-batch+json": {"schema": many("CloudEvent")},
    }


def _by_status(refusals: Iterable[Refusal]) -> dict[int, list[Refusal]]:
    by_status: dict[int, list[Refusal]] = {}
    for refusal in refusals:
        by_status.setdefault(REFUSALS[refusal].status, []).append(refusal)
    return dict(sorted(by_status.items()))


def _problems(refusals: Iterable[Refusal]) -> Document:
    """Return one response for each status of the refusals."""
    return {str(status): _problem(each) for status, each in _by_status(refusals).items()}


def _problem(refusals: list[Refusal]) -> Document:
    rows = [REFUSALS[refusal] for refusal in refusals]
    headers: Document = _retry_after_header(refusals)
    if any(row.shows_quota for row in rows):
        headers |= _QUOTA_HEADERS
    if Refusal.NO_CREDENTIALS in refusals:
        headers |= _header("WWW-Authenticate")
    if Refusal.METHOD in refusals:
        headers |= _header("Allow")
    description = "; ".join(
        f"{row.title} ({', '.join((row.code, *FINER_CODES.get(each, ())))})"
        for each, row in zip(refusals, rows, strict=True)
    )
    return _response(description, {PROBLEM_JSON.decode(): {"schema": {"$ref": _REF + "Problem"}}}, headers)


def _header(name: str) -> Document:
    return {name: {"$ref": f"#/components/headers/{name}"}}


def _retry_after_header(refusals: Iterable[Refusal]) -> Document:
    retries = any(REFUSALS[each].retry_after_seconds is not None for each in refusals)
    return _header("Retry-After") if retries else {}


_QUOTA_HEADERS: Final[Document] = {**_header("RateLimit"), **_header("RateLimit-Policy")}


def _response(description: str, content: Document, headers: Document | None = None) -> Document:
    return {"description": description, "content": content} | ({"headers": headers} if headers else {})


def _json(description: str, schema: str | None = None, headers: Document | None = None) -> Document:
    return _response(description, {JSON: {"schema": {"$ref": _REF + schema}} if schema else _OBJECT}, headers)


def _get(summary: str, responses: Document, *parameters: Document) -> Document:
    described = {"parameters": list(parameters)} if parameters else {}
    return {"get": {"summary": summary, **described, "responses": responses}}


def protocol_paths() -> Document:
    """Return the paths of other protocols: OTLP/HTTP, and the Kinesis API at `POST /`."""
    return {**{path: {"post": _otlp(signal)} for path, signal in OTLP_PATHS.items()}, "/": {"post": _kinesis()}}


def _otlp(signal: str) -> Document:
    name = RESOURCES[signal]
    export_request = {
        "type": "object",
        "properties": {name: {"type": "array", "items": {"type": "object"}}},
        # An empty request is valid. Members of another signal only are rejected.
        "anyOf": [{"maxProperties": 0}, {"required": [name]}],
    }
    status = {"schema": {"$ref": _REF + "RpcStatus"}}
    errors = {
        str(code): _response(
            "; ".join(REFUSALS[each].title for each in refusals),
            {JSON: status, PROTOBUF: _BINARY},
            _retry_after_header(refusals),
        )
        for code, refusals in _by_status(_OTLP_REFUSALS).items()
    }
    return {
        "operationId": f"export_{signal}",
        "summary": f"OTLP/HTTP: {signal}, to the stream that the tenant's settings name for them",
        "parameters": [
            _parameter("header", "X-Ack", {"enum": [ack for ack in ACKS if ack != "spooled"]}),
            _parameter(
                "header", "X-Partition-Key", _PARTITION_KEY, description="The default is random for each request."
            ),
        ],
        "requestBody": {"required": True, "content": {JSON: {"schema": export_request}, PROTOBUF: _BINARY}},
        "responses": {"200": _response("Accepted completely", {JSON: _OBJECT, PROTOBUF: _BINARY}), **errors},
    }


def _kinesis() -> Document:
    operations = sorted(["PutRecord", "PutRecords", *FORWARDED])
    by_status: dict[int, set[str]] = {400: set(WIRE_CODES), 500: {"InternalFailure"}}
    for answer in WIRE_ANSWERS.values():
        by_status.setdefault(answer.status, set()).add(answer.code)
    errors = {
        str(status): _response(
            ", ".join(sorted(codes)),
            {JSON_CONTENT_TYPE: _AWS_ERROR},
            _header("Retry-After") if status == UNAVAILABLE_ANSWER.status else None,
        )
        for status, codes in sorted(by_status.items())
    }
    targets = {"enum": [TARGET_PREFIX + operation for operation in operations]}
    return {
        "operationId": "kinesis",
        "summary": "The Kinesis API, signed with SigV4, for AWS SDKs and agents",
        "description": "The Kinesis API, signed with SigV4, for AWS SDKs and agents; in JSON, or in CBOR "
        "(application/x-amz-cbor-1.1), which is answered in CBOR.",
        "externalDocs": {"url": "https://docs.aws.amazon.com/kinesis/latest/APIReference/"},
        "parameters": [_parameter("header", "X-Amz-Target", targets, required=True)],
        "requestBody": {"required": True, "content": {JSON_CONTENT_TYPE: _OBJECT}},
        "responses": {"200": _response("As Kinesis answers", {JSON_CONTENT_TYPE: _OBJECT}), **errors},
    }
