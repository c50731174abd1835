"""CloudEvents of the official SDK arrive with their attributes in all three modes, and the SDK reads them back."""

from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any

import pytest
import requests
from cloudevents.core.base import BaseCloudEvent
from cloudevents.core.bindings.http import HTTPMessage, from_structured, to_binary, to_structured
from cloudevents.core.formats.json import JSONFormat
from cloudevents.core.v1.event import CloudEvent

from kpl_integrations.ingest.tenants import OpenTenants, Tenant
from tests.support.running_gateway import RunningGateway, running_gateway

STREAM = "events"
STRUCTURED = "application/cloudevents+json"

# Attributes and data of events.
EVENTS: list[tuple[dict[str, Any], Any]] = [
    ({"datacontenttype": "application/json"}, {"n": 1.5, "s": "é ü"}),
    ({"datacontenttype": "application/json", "subject": 'with "quotes" & 100 % ∞', "partitionkey": "p-1"}, {"n": 2}),
    ({"datacontenttype": "text/plain", "customext": "x"}, "plain text"),
    ({"datacontenttype": "application/octet-stream"}, bytes(range(256))),
    ({"dataschema": "http://example.com/schema"}, None),
]


def event(number: int, mode: str) -> CloudEvent:
    more, data = EVENTS[number]
    attributes = {
        "specversion": "1.0",
        "id": f"{mode}-{number}",
        "source": "/tests/sdk",
        "type": "test.made",
        "time": datetime(2026, 11, 20, 12, 0, 1, tzinfo=UTC),
        **more,
    }
    return CloudEvent(attributes, data)


@pytest.fixture(scope="module")
def gateway() -> Iterator[RunningGateway]:
    with running_gateway(OpenTenants(Tenant(id="local")), {STREAM: 2}) as running:
        yield running


def post(gateway: RunningGateway, body: bytes, headers: dict[str, str]) -> dict[str, Any]:
    with requests.Session() as session:
        session.trust_env = False
        url = f"{gateway.url}/v1/streams/{STREAM}/records?ack=delivered"
        answered = session.post(url, data=body, headers=headers, timeout=20)
    assert answered.status_code == 200, answered.text
    document: dict[str, Any] = answered.json()
    return document


def arrived(gateway: RunningGateway, mode: str) -> dict[str, tuple[BaseCloudEvent, str]]:
    """Return the events of a mode by their ids, as the SDK reads them, and their partition keys."""
    found = {}
    for record in gateway.user_records(STREAM):
        read = from_structured(HTTPMessage({"content-type": STRUCTURED}, record.data), JSONFormat())
        if read.get_id().startswith(mode):
            found[read.get_id()] = (read, record.partition_key)
    return found


def assert_all_arrived(gateway: RunningGateway, mode: str) -> None:
    found = arrived(gateway, mode)
    assert len(found) == len(EVENTS)
    for number in range(len(EVENTS)):
        sent = event(number, mode)
        read, partition_key = found[sent.get_id()]
        assert read.get_attributes() == sent.get_attributes()
        assert read.get_data() == sent.get_data()
        assert partition_key == sent.get_attributes().get("partitionkey", partition_key)


def test_structured_events_arrive_with_their_attributes(gateway):
    for number in range(len(EVENTS)):
        message = to_structured(event(number, "structured"), JSONFormat())
        assert post(gateway, message.body, message.headers)["delivered"] == 1
    assert_all_arrived(gateway, "structured")


def test_binary_events_arrive_with_their_attributes(gateway):
    for number in range(len(EVENTS)):
        message = to_binary(event(number, "binary"), JSONFormat())
        assert post(gateway, message.body, message.headers)["delivered"] == 1
    assert_all_arrived(gateway, "binary")


def test_batched_events_arrive_with_their_attributes(gateway):
    bodies = [to_structured(event(number, "batched"), JSONFormat()).body for number in range(len(EVENTS))]
    headers = {"content-type": "application/cloudevents-batch+json"}
    assert post(gateway, b"[" + b",".join(bodies) + b"]", headers)["delivered"] == len(EVENTS)
    assert_all_arrived(gateway, "batched")
