"""The description of the routes that speak other protocols: OTLP/HTTP, and the Kinesis API at `POST /`."""

from collections.abc import Iterable
from typing import Any, Final

from kpl_integrations.ingest.admission.admission import ADMISSION, Refusal
from kpl_integrations.ingest.decoding.otlp_body import JSON, PROTOBUF, RESOURCES
from kpl_integrations.ingest.routes.otlp import OTLP_PATHS
from kpl_integrations.ingest.routes.upstream import PASSED_ON
from kpl_integrations.ingest.routes.wire_protocol import UNAVAILABLE_ANSWER, WIRE_ANSWERS, WIRE_CODES
from kpl_integrations.ingest.tenants import ACKS
from kpl_integrations.kinesis_protocol import JSON_CONTENT_TYPE, TARGET_PREFIX

__all__ = ["protocol_paths"]

Document = dict[str, Any]

OTLP_REFUSALS: Final = (
    Refusal.QUOTA,
    Refusal.QUEUE_SHARE,
    Refusal.NO_ROOM,
    Refusal.BREAKER_OPEN,
    Refusal.DRAINING,
    Refusal.NOT_SPOOLED,
    Refusal.STREAM_UNCERTAIN,
    Refusal.NO_CREDENTIALS,
    Refusal.BAD_CREDENTIALS,
    Refusal.UNKNOWN_STREAM,
    Refusal.TOO_LARGE,
    Refusal.SLOW_BODY,
    Refusal.UNSUPPORTED,
    Refusal.MALFORMED,
    Refusal.BAD_RECORDS,
    Refusal.BAD_PARAMETER,
    Refusal.NOT_DELIVERED,
)
_BINARY: Final[Document] = {"schema": {"type": "string", "format": "binary"}}
_OBJECT: Final[Document] = {"schema": {"type": "object"}}
_COMES_AGAIN: Final[Document] = {"headers": {"Retry-After": {"$ref": "#/components/headers/Retry-After"}}}
_STATUS: Final[Document] = {
    "schema": {
        "type": "object",
        "description": "google.rpc.Status",
        "required": ["code", "message"],
        "properties": {"code": {"type": "integer"}, "message": {"type": "string"}},
    }
}
_AWS_ERROR: Final[Document] = {
    "schema": {
        "type": "object",
        "required": ["__type", "message"],
        "properties": {"__type": {"type": "string"}, "message": {"type": "string"}},
    }
}


def protocol_paths() -> Document:
    """Return the paths of this gateway that no native client needs."""
    return {**{path: {"post": _otlp(signal)} for path, signal in OTLP_PATHS.items()}, "/": {"post": _wire()}}


def _otlp(signal: str) -> Document:
    name = RESOURCES[signal]
    export_request = {
        "type": "object",
        "properties": {name: {"type": "array", "items": {"type": "object"}}},
        # Empty is a request too. What has members of another signal only would be stored and never found.
        "anyOf": [{"maxProperties": 0}, {"required": [name]}],
    }
    return {
        "operationId": f"export_{signal}",
        "summary": f"OTLP/HTTP: {signal}, to the stream the tenant's settings name for them",
        "parameters": [
            {"name": "X-Ack", "in": "header", "schema": {"enum": [ack for ack in ACKS if ack != "spooled"]}},
            {
                "name": "X-Partition-Key",
                "in": "header",
                "schema": {"type": "string", "minLength": 1, "maxLength": 256, "pattern": "^[!-~]+$"},
                "description": "Without it, each request gets a random one.",
            },
        ],
        "requestBody": {
            "required": True,
            "content": {
                JSON: {"schema": export_request},
                PROTOBUF: _BINARY,
            },
        },
        "responses": {
            "200": {"description": "Accepted whole", "content": {JSON: _OBJECT, PROTOBUF: _BINARY}},
            **_refused(OTLP_REFUSALS),
        },
    }


def _refused(refusals: Iterable[Refusal]) -> Document:
    by_status: dict[int, list[str]] = {}
    comes_again: set[int] = set()
    for refusal in refusals:
        row = ADMISSION[refusal]
        by_status.setdefault(row.status, []).append(row.title)
        if row.comes_again:
            comes_again.add(row.status)
    return {
        str(status): {
            "description": "; ".join(titles),
            "content": {JSON: _STATUS, PROTOBUF: _BINARY},
            **(_COMES_AGAIN if status in comes_again else {}),
        }
        for status, titles in sorted(by_status.items())
    }


def _wire() -> Document:
    operations = sorted(["PutRecord", "PutRecords", *PASSED_ON])
    by_status: dict[int, set[str]] = {400: set(WIRE_CODES), 500: {"InternalFailure"}}
    for answer in WIRE_ANSWERS.values():
        by_status.setdefault(answer.status, set()).add(answer.code)
    return {
        "operationId": "kinesis",
        "summary": "The Kinesis API, signed with SigV4, for AWS SDKs and agents",
        "description": "The Kinesis API, signed with SigV4, for AWS SDKs and agents; in JSON, or in CBOR "
        "(application/x-amz-cbor-1.1), which is answered in CBOR.",
        "externalDocs": {"url": "https://docs.aws.amazon.com/kinesis/latest/APIReference/"},
        "parameters": [
            {
                "name": "X-Amz-Target",
                "in": "header",
                "required": True,
                "schema": {"enum": [f"{TARGET_PREFIX}{operation}" for operation in operations]},
            }
        ],
        "requestBody": {"required": True, "content": {JSON_CONTENT_TYPE: _OBJECT}},
        "responses": {
            "200": {"description": "As Kinesis answers", "content": {JSON_CONTENT_TYPE: _OBJECT}},
            **{
                str(status): {
                    "description": ", ".join(sorted(codes)),
                    "content": {JSON_CONTENT_TYPE: _AWS_ERROR},
                    **(_COMES_AGAIN if status == UNAVAILABLE_ANSWER.status else {}),
                }
                for status, codes in sorted(by_status.items())
            },
        },
    }
