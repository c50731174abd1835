"""The gateway's own `/metrics`: the names of the catalogue, each once, and the tenants that wait."""

import base64
import json
from collections import Counter

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from kpl_integrations.ingest.tenants import OpenTenants, Tenant
from kpl_integrations.metrics.catalogue import METRICS
from tests.support.running_gateway import running_gateway

# More than one shard accepts in its burst and a second.
RECORDS = 110
RECORD_BYTES = 20_000


@pytest.mark.long
def test_a_gateways_metrics_are_in_the_catalogue_and_name_the_waiting_tenant():
    data = base64.b64encode(bytes(RECORD_BYTES)).decode()
    lines = "\n".join(json.dumps({"partition_key": str(number), "data_base64": data}) for number in range(RECORDS))
    with running_gateway(OpenTenants(Tenant(id="shop")), {"orders": 1}) as gateway:
        answer = httpx.post(
            f"{gateway.url}/v1/streams/orders/records",
            content=lines,
            headers={"Content-Type": "application/x-ndjson"},
            timeout=20,
        )
        assert answer.is_success, answer.text
        text = httpx.get(f"{gateway.url}/metrics", timeout=20).text
    families = list(text_string_to_metric_families(text))
    waits = {
        sample.labels["tenant"]: sample.value
        for family in families
        for sample in family.samples
        if sample.name == "kinesis_ingest_tenant_wait_seconds"
    }
    assert list(waits) == ["shop"]
    assert 0 < waits["shop"] < 30
    names = Counter(family.name for family in families)
    assert max(names.values()) == 1
    known = {name.removesuffix("_total") for name in METRICS}
    # Added by the client library for each counter and histogram.
    created = {f"{name}_created" for name in known}
    assert set(names) <= known | created
    assert {family.name: family.documentation for family in families if family.name not in created} == {
        metric.name.removesuffix("_total"): metric.meaning
        for metric in METRICS.values()
        if metric.name.removesuffix("_total") in names
    }
    assert {"kinesis_ingest_requests", "kinesis_producer_accepted_records"} <= set(names)
