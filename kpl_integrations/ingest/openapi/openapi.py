"""The gateway's description (OpenAPI 3.1): what it takes, and each answer it gives, read from the admission table."""

from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any, Final

from kpl_integrations.ingest.admission.admission import ADMISSION, Refusal
from kpl_integrations.ingest.admission.rate_limit_headers import QUEUE_SHARE
from kpl_integrations.ingest.openapi.openapi_protocols import protocol_paths
from kpl_integrations.ingest.settings import IngestSettings
from kpl_integrations.ingest.tenants import ACKS

__all__ = ["FINER_CODES", "openapi_document"]

# What can keep records out; the others are answers to paths and methods.
_RECORD_REFUSALS: Final = tuple(each for each in Refusal if each is not Refusal.UNKNOWN_PATH)
# Codes that stand in the row's place where a decoder knows more.
FINER_CODES: Final[Mapping[Refusal, tuple[str, ...]]] = MappingProxyType(
    {
        Refusal.MALFORMED: ("truncated", "encoding", "too-deep"),
        Refusal.TOO_LARGE: ("too-many-records",),
        Refusal.UNSUPPORTED: ("unsupported-content-encoding",),
    }
)
_KEY_PATTERN: Final = "^[!#-~]([ !#-~]{0,253}[!#-~])?$"
_STREAM_PATTERN: Final = "^[a-zA-Z0-9_.-]{1,128}$"
# 39 digits are below 2**128 as well, but not all of them.
_HASH_KEY_PATTERN: Final = "^(0|[1-9][0-9]{0,37})$"

Document = dict[str, Any]


def openapi_document(settings: IngestSettings) -> Document:
    """Return the description of a gateway with these settings, as JSON values."""
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Kinesis ingest gateway",
            "version": "1",
            "description": "Takes records over HTTP and ships them to Amazon Kinesis: aggregated, fair, acknowledged.",
        },
        "security": [{}, {"apiKey": []}],
        "paths": {
            "/v1/streams/{stream}/records": {"post": _records(settings)},
            "/livez": {"get": _looked_at("Whether the process lives", {"200": _json("Alive")})},
            "/readyz": {
                "get": _looked_at("Whether to send traffic here", {"200": _json("Ready"), "503": _json("Not ready")})
            },
            "/metrics": {
                "get": _looked_at(
                    "Metrics for Prometheus", {"200": {"description": "OK", "content": {"text/plain": {}}}}
                )
            },
            "/v1/stats": {
                "get": _looked_at(
                    "Counts: of all with the admin key, of one tenant with its own",
                    {"200": _json("OK"), **_problems([Refusal.NO_CREDENTIALS, Refusal.BAD_CREDENTIALS])},
                )
            },
            "/openapi.json": {"get": _looked_at("This document", {"200": _json("OK")})},
            **protocol_paths(),
        },
        "components": {
            "securitySchemes": {"apiKey": {"type": "http", "scheme": "bearer"}},
            "schemas": _schemas(settings),
            "headers": _headers(),
        },
    }


def _records(settings: IngestSettings) -> Document:
    acks = [ack for ack in ACKS if ack != "spooled" or settings.spool is not None]
    return {
        "operationId": "putRecords",
        "summary": "Put records into a stream: all of them, or none",
        "parameters": [
            {
                "name": "stream",
                "in": "path",
                "required": True,
                "schema": {"type": "string", "pattern": _STREAM_PATTERN},
            },
            {"name": "ack", "in": "query", "schema": {"enum": acks}, "description": "Before X-Ack."},
            {"name": "partial", "in": "query", "schema": {"enum": ["true", "false"]}},
            {"name": "X-Ack", "in": "header", "schema": {"enum": acks}},
            {
                "name": "Idempotency-Key",
                "in": "header",
                "schema": {"type": "string", "minLength": 1, "maxLength": 255, "pattern": _KEY_PATTERN},
            },
            {
                "name": "X-Partition-Key",
                "in": "header",
                "schema": {"type": "string", "minLength": 1, "maxLength": 256, "pattern": "^[!-~]+$"},
                "description": "The key of application/octet-stream; without it, one is made up.",
            },
            {
                "name": "X-Explicit-Hash-Key",
                "in": "header",
                "schema": {"type": "string", "pattern": _HASH_KEY_PATTERN},
                "description": "The explicit hash key of application/octet-stream.",
            },
        ],
        "requestBody": {"required": True, "content": _content(settings)},
        "responses": {
            "200": {**_json("ack=delivered: what became of each record", "Delivered"), "headers": _QUOTA_HEADERS},
            "202": {**_json("ack=queued or spooled: accepted", "Accepted"), "headers": _QUOTA_HEADERS},
            **_problems(_RECORD_REFUSALS),
        },
    }


def _content(settings: IngestSettings) -> Document:
    most = settings.max_records
    record, event = {"$ref": "#/components/schemas/Record"}, {"$ref": "#/components/schemas/CloudEvent"}
    many = {
        "type": "object",
        "required": ["records"],
        "additionalProperties": False,
        "properties": {"records": {"type": "array", "items": record, "minItems": 1, "maxItems": settings.max_records}},
    }
    return {
        "application/json": {"schema": {"oneOf": [record, many]}},
        # As OpenAPI 3.2 describes sequential types: the values, of which each is a line.
        "application/x-ndjson": {"schema": {"type": "array", "items": record, "minItems": 1, "maxItems": most}},
        "application/octet-stream": {"schema": {"type": "string", "format": "binary"}},
        "application/cloudevents+json": {"schema": event},
        "application/cloudevents-batch+json": {
            "schema": {"type": "array", "items": event, "minItems": 1, "maxItems": settings.max_records}
        },
    }


def _schemas(settings: IngestSettings) -> Document:
    key = {"type": "string", "minLength": 1, "maxLength": 256}
    hash_key = {"type": "string", "pattern": _HASH_KEY_PATTERN}
    common = {"partition_key": key, "explicit_hash_key": hash_key}
    data = {"not": {"type": "null"}, "description": "A string's UTF-8 bytes; of anything else, its JSON text."}
    return {
        "Record": {
            "description": f"Key and data have at most {settings.max_record_bytes:,} bytes together.",
            "oneOf": [
                _object({**common, "data": data}, required=["data"]),
                _object(
                    {**common, "data_base64": {"type": "string", "contentEncoding": "base64"}}, required=["data_base64"]
                ),
            ],
        },
        "CloudEvent": _cloud_event(),
        "Accepted": _object(
            {
                "ack": {"enum": ["queued", "spooled"]},
                "accepted": {"type": "integer"},
                "rejected": {"type": "array", "items": {"$ref": "#/components/schemas/RejectedRecord"}},
            },
            required=["ack", "accepted"],
        ),
        "Delivered": _object(
            {
                "ack": {"const": "delivered"},
                **{count: {"type": "integer"} for count in ("accepted", "delivered", "failed")},
                "kept": {"type": "integer", "description": "how many of `failed` must not be sent again"},
                "records": {"type": "array", "items": {"$ref": "#/components/schemas/RecordAnswer"}},
                "rejected": {"type": "array", "items": {"$ref": "#/components/schemas/RejectedRecord"}},
            },
            required=["ack", "accepted", "delivered", "failed", "records"],
        ),
        "RecordAnswer": _object(
            {
                "sequence_number": {"type": "string"},
                "shard_id": {"type": "string"},
                "error_code": {"type": "string"},
                "error_message": {"type": "string"},
                "kept": {"enum": ["spooled", "dead_lettered"]},
            }
        ),
        "RejectedRecord": _object(
            {"index": {"type": "integer"}, "field": {"type": "string"}, "detail": {"type": "string"}},
            required=["index", "field", "detail"],
        ),
        "Problem": _problem_schema(),
    }


def _problem_schema() -> Document:
    """Return what every refusal says (RFC 9457), and what some say beside it."""
    return {
        "type": "object",
        "required": ["type", "title", "status", "detail", "code"],
        "properties": {
            "type": {"type": "string"},
            "title": {"type": "string"},
            "status": {"type": "integer"},
            "detail": {"type": "string"},
            "code": {"type": "string"},
            "field": {"type": "string", "description": "the parameter or the member that is meant"},
            "index": {"type": "integer", "description": "of the record, from 0, where one is meant"},
            "errors": {
                "type": "array",
                "description": "of bad-records: what is wrong, and where; the first hundred",
                "items": {"$ref": "#/components/schemas/RejectedRecord"},
            },
            "error_count": {"type": "integer", "description": "how many there are in all"},
            "records": {
                "type": "array",
                "description": "where none was delivered: what became of each",
                "items": {"$ref": "#/components/schemas/RecordAnswer"},
            },
            "violated-policies": {
                "type": "array",
                "description": "of quota-exceeded: the tenant's rates that are used up, or its share of the queue",
                "items": {"enum": ["records", "bytes", QUEUE_SHARE]},
            },
        },
    }


def _cloud_event() -> Document:
    """Return what is asked of an event (CloudEvents 1.0, 3); extension attributes are strings here."""
    text = {"type": "string", "minLength": 1, "pattern": "^[ -~]+$"}
    attributes = {"specversion": {"const": "1.0"}, "id": text, "source": text, "type": text, "data": {}}
    return {
        "type": "object",
        "required": ["specversion", "id", "source", "type"],
        "properties": {**attributes, "partitionkey": {"type": "string", "minLength": 1, "maxLength": 256}},
        "patternProperties": {"^x[a-z0-9]{1,19}$": {"type": "string", "pattern": "^[ -~]*$"}},
        "additionalProperties": False,
    }


def _object(properties: Document, *, required: Iterable[str] = ()) -> Document:
    return {
        "type": "object",
        "additionalProperties": False,
        "properties": properties,
        "required": list(required),
    }


def _problems(refusals: Iterable[Refusal]) -> Document:
    """Return one response for each status that any of the refusals has."""
    by_status: dict[int, list[Refusal]] = {}
    for refusal in refusals:
        by_status.setdefault(ADMISSION[refusal].status, []).append(refusal)
    return {str(status): _problem(by_status[status]) for status in sorted(by_status)}


def _problem(refusals: list[Refusal]) -> Document:
    rows = [ADMISSION[refusal] for refusal in refusals]
    headers: Document = {}
    if any(row.comes_again for row in rows):
        headers["Retry-After"] = {"$ref": "#/components/headers/Retry-After"}
    if any(row.shows_quota for row in rows):
        headers |= _QUOTA_HEADERS
    if Refusal.NO_CREDENTIALS in refusals:
        headers["WWW-Authenticate"] = {"$ref": "#/components/headers/WWW-Authenticate"}
    if Refusal.METHOD in refusals:
        headers["Allow"] = {"$ref": "#/components/headers/Allow"}
    response: Document = {
        "description": "; ".join(
            f"{ADMISSION[each].title} ({', '.join((ADMISSION[each].code, *FINER_CODES.get(each, ())))})"
            for each in refusals
        ),
        "content": {"application/problem+json": {"schema": {"$ref": "#/components/schemas/Problem"}}},
    }
    return {**response, "headers": headers} if headers else response


def _headers() -> Document:
    return {
        "Retry-After": {"schema": {"type": "string", "pattern": "^[0-9]+$"}, "description": "Seconds."},
        "RateLimit": {"schema": {"type": "string"}, "description": "draft-ietf-httpapi-ratelimit-headers"},
        "RateLimit-Policy": {"schema": {"type": "string"}, "description": "draft-ietf-httpapi-ratelimit-headers"},
        "WWW-Authenticate": {"schema": {"type": "string"}, "description": "Bearer."},
        "Allow": {"schema": {"type": "string"}, "description": "The methods there are."},
    }


_QUOTA_HEADERS: Final[Document] = {
    "RateLimit": {"$ref": "#/components/headers/RateLimit"},
    "RateLimit-Policy": {"$ref": "#/components/headers/RateLimit-Policy"},
}


def _json(description: str, schema: str | None = None) -> Document:
    content = {"schema": {"$ref": f"#/components/schemas/{schema}"} if schema else {"type": "object"}}
    return {"description": description, "content": {"application/json": content}}


def _looked_at(summary: str, responses: Document) -> Document:
    return {"summary": summary, "responses": responses}
