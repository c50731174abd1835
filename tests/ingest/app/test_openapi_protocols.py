"""The description of OTLP and of the Kinesis API is true: schemathesis finds no difference."""

from collections.abc import Iterator
from typing import Any

import pytest
import schemathesis
from hypothesis import strategies as st
from schemathesis import Case
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    negative_data_rejection,
    response_schema_conformance,
    status_code_conformance,
)

from kpl_integrations.ingest import load_settings
from kpl_integrations.ingest.decoding.otlp_body import PROTOBUF
from kpl_integrations.ingest.openapi import openapi_document, protocol_paths
from kpl_integrations.ingest.tenants import SIGNALS, OpenTenants, Tenant
from kpl_integrations.kinesis_protocol.wire import JSON_CONTENT_TYPE
from tests.ingest.app.described_path import check_path
from tests.support.running_gateway import RunningGateway, running_gateway

schemathesis.serializer.alias(JSON_CONTENT_TYPE, "application/json")
# Any resources are valid, because the gateway does not read their fields.
schemathesis.openapi.media_type(
    PROTOBUF,
    st.lists(st.binary(max_size=100)).map(lambda parts: b"".join(b"\x0a%c%b" % (len(part), part) for part in parts)),
)

SCHEMA = schemathesis.openapi.from_dict({**openapi_document(load_settings()), "paths": protocol_paths()})


@pytest.fixture(scope="module")
def gateway() -> Iterator[RunningGateway]:
    tenant = Tenant(id="local", otlp_streams=dict.fromkeys(SIGNALS, "demo"))
    with running_gateway(OpenTenants(tenant), {"demo": 1}) as running:
        yield running


@pytest.mark.parametrize("signal", SIGNALS)
def test_schemathesis_finds_nothing_at_otlp(signal: str, gateway: RunningGateway) -> None:
    def check(case: "Case[Any]") -> None:
        # The gateway accepts partition keys outside ASCII, which the description leaves out.
        response = case.call(base_url=gateway.url, timeout=20)
        case.validate_response(response, excluded_checks=[negative_data_rejection])

    check_path(SCHEMA, f"/v1/{signal}", check, max_examples=6)


def test_schemathesis_finds_no_undescribed_answer_at_the_kinesis_api(gateway: RunningGateway) -> None:
    # Bodies are not described, because they depend on the operation and AWS documents them.
    checks: list[Any] = [
        not_a_server_error,
        status_code_conformance,
        content_type_conformance,
        response_schema_conformance,
    ]

    def check(case: "Case[Any]") -> None:
        case.validate_response(case.call(base_url=gateway.url, timeout=20), checks=checks)

    check_path(SCHEMA, "/", check, max_examples=6)
