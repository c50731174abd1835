"""The producer through its real transport, configured for tests: short times, a service on loopback."""

from typing import Any

from kpl_core import Config
from tests.support.waiting import PATIENCE_SECONDS


def config(endpoint_url: str, **options: Any) -> Config:
    """Return options for a local endpoint: quick retries, and a time to live no slow machine outlasts."""
    return Config(
        **{
            "region": "us-east-1",
            "endpoint_url": endpoint_url,
            "aws_access_key_id": "testing",
            "aws_secret_access_key": "testing",
            "record_max_buffered_time_ms": 10,
            "retry_backoff_base_ms": 5,
            "retry_backoff_cap_ms": 50,
            "record_ttl_ms": PATIENCE_SECONDS * 2_000,
            **options,
        }
    )
