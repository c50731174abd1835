"""The examples in examples/ingest work: clients put records, and the tenants file is valid."""

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from kpl_integrations.ingest.tenants import SIGNALS, FileTenants, OpenTenants, Tenant
from tests.support.running_gateway import RunningGateway, running_gateway

EXAMPLES = Path(__file__).parents[2] / "examples" / "ingest"


@pytest.fixture(scope="module")
def gateway() -> Iterator[RunningGateway]:
    tenant = Tenant(id="local", otlp_streams=dict.fromkeys(SIGNALS, "telemetry"), default_ack="delivered")
    with running_gateway(OpenTenants(tenant), {"orders": 2, "telemetry": 2}) as running:
        yield running


def printed_by(example: str, *arguments: str) -> str:
    ended = subprocess.run(
        [sys.executable, EXAMPLES / example, *arguments],
        env=os.environ,
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout


def test_the_boto3_client_puts_all_its_records(gateway):
    printed = printed_by("boto3_client.py", gateway.url, "orders")
    assert re.fullmatch(r"1,000 records are in \d+ Kinesis records on 2 shards\n", printed)
    assert sorted(r.data for r in gateway.user_records("orders")) == sorted(b"event %d" % n for n in range(1_000))


def test_the_opentelemetry_client_sends_spans_and_logs_to_one_shard(gateway):
    assert printed_by("opentelemetry_client.py", gateway.url) == "100 spans and 100 log records are sent\n"
    records = gateway.user_records("telemetry")
    assert {record.partition_key for record in records} == {"checkout-1"}
    assert len({record.shard_id for record in records}) == 1


def test_the_tenants_file_is_valid_and_shows_every_member():
    tenants = FileTenants(EXAMPLES / "tenants.toml", environment={"CHECKOUT_AGENT_SECRET": "secret"})
    assert [tenant.id for tenant in tenants.tenants()] == ["checkout", "checkout-agent", "analytics"]
    key = tenants.access_key("KPLI3EXAMPLE7EXAMPLE")
    assert key is not None
    assert key.tenant.burst_seconds == 5
    analytics = tenants.by_id("analytics")
    assert analytics is not None
    assert dict(analytics.otlp_streams)["logs"] == "analytics-logs"
    text = (EXAMPLES / "tenants.toml").read_text()
    optional = "weight tier records_per_second bytes_per_second burst_seconds streams ack aggregation api_keys"
    for member in [*optional.split(), "secret_file", "session_token_env", "expires_at", "[unknown]"]:
        assert member in text
