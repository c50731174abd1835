"""The OpenAPI description is true: it has every answer of the gateway, and schemathesis finds no difference."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
import schemathesis
from schemathesis import Case

from kpl_integrations.ingest import REFUSALS, Refusal, decoding, load_settings
from kpl_integrations.ingest.decoding.cloud_events import CloudEvent
from kpl_integrations.ingest.decoding.json_records import WireRecord
from kpl_integrations.ingest.openapi import FINER_CODES, STRUCTS, openapi_document, protocol_paths
from kpl_integrations.ingest.tenants import OpenTenants, Tenant
from tests.ingest.app.described_path import check_path
from tests.support.running_gateway import RunningGateway, running_gateway

DOCUMENT = openapi_document(load_settings())
DECODERS = Path(decoding.__file__).parent
# The other protocols are tested by test_openapi_protocols.py.
SCHEMA = schemathesis.openapi.from_dict(DOCUMENT)


@schemathesis.serializer("application/x-ndjson")
def lines(_: Any, values: Any) -> bytes:
    """Return one line for each value."""
    return b"\n".join(json.dumps(value).encode() for value in (values if isinstance(values, list) else [values]))


@pytest.fixture(scope="module")
def gateway() -> Iterator[RunningGateway]:
    """One gateway for all calls, on a socket."""
    with running_gateway(OpenTenants(Tenant(id="local")), {"demo": 1}) as running:
        yield running


def test_every_refusal_of_a_record_is_described():
    described = set(DOCUMENT["paths"]["/v1/streams/{stream}/records"]["post"]["responses"])
    answers = {str(row.status) for refusal, row in REFUSALS.items() if refusal is not Refusal.UNKNOWN_PATH}
    assert described == answers | {"200", "202"}


def test_every_code_of_a_decoder_is_described():
    said: dict[int, set[str]] = {}
    for module in DECODERS.glob("*.py"):
        for status, code in re.findall(r"DecodeRefusal\((\d{3}), \"([a-z-]+)\"", module.read_text(encoding="utf-8")):
            said.setdefault(int(status), set()).add(code)
    described = {REFUSALS[refusal].status: {REFUSALS[refusal].code, *codes} for refusal, codes in FINER_CODES.items()}
    assert said == described
    answers = DOCUMENT["paths"]["/v1/streams/{stream}/records"]["post"]["responses"]
    for status, codes in described.items():
        assert set(re.findall(r"[a-z-]+", answers[str(status)]["description"])) >= codes


@pytest.mark.parametrize("struct", [each for each in STRUCTS if each not in {WireRecord, CloudEvent}])
def test_the_schema_of_an_answer_has_the_members_of_its_struct(struct):
    schema = DOCUMENT["components"]["schemas"][struct.__name__]
    fields = msgspec.structs.fields(struct)
    assert set(schema["properties"]) == {field.encode_name for field in fields}
    assert set(schema["required"]) == {field.encode_name for field in fields if field.required}


def test_a_record_is_described_with_data_or_with_data_base64():
    members = {field.encode_name for field in msgspec.structs.fields(WireRecord)}
    described = [set(each["properties"]) for each in DOCUMENT["components"]["schemas"]["Record"]["oneOf"]]
    assert described == [members - {"data_base64"}, members - {"data"}]


def test_optional_members_are_left_out_and_never_null():
    assert '"null"' not in json.dumps(DOCUMENT["components"]["schemas"]).replace('"not": {"type": "null"}', "")


@pytest.mark.long
@pytest.mark.parametrize("path", [path for path in DOCUMENT["paths"] if path not in protocol_paths()])
def test_schemathesis_finds_nothing(path: str, gateway: RunningGateway) -> None:
    def check(case: "Case[Any]") -> None:
        case.validate_response(case.call(base_url=gateway.url, timeout=20))

    check_path(SCHEMA, path, check, max_examples=12)


def test_the_description_is_served(gateway: RunningGateway) -> None:
    answer: Any = httpx.get(gateway.url + "/openapi.json").json()
    assert answer["paths"].keys() >= DOCUMENT["paths"].keys()
