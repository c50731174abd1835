import pytest

from kpl_core import ConfigError
from kpl_integrations.ingest.tenants import ACKS, SIGNALS, Tenant, TenantQuota

# Globs, the stream named, and whether it may be written to.
ALLOWED: list[tuple[tuple[str, ...], str, bool]] = [
    (("*",), "orders", True),
    (("*",), "arn:aws:kinesis:eu-west-1:123456789012:stream/orders", False),
    (("orders-*",), "orders-eu", True),
    (("orders-*",), "orders", False),
    (("orders-*",), "my-orders-eu", False),
    (("orders-*", "clicks"), "clicks", True),
    (("Orders",), "orders", False),
    (("o?der[sz]",), "orderz", True),
    ((), "orders", False),
    (("arn:*",), "arn:aws:kinesis:eu-west-1:123456789012:stream/orders", True),
    (("arn:*:stream/clicks",), "arn:aws:kinesis:eu-west-1:123456789012:stream/orders", False),
    (("arn:*",), "orders", False),
    (("orders\n*",), "orders", False),
]


@pytest.mark.parametrize(("globs", "stream", "allowed"), ALLOWED)
def test_globs_select_the_streams_that_a_tenant_may_write_to(globs, stream, allowed):
    assert Tenant(id="a", streams=globs).allows(stream) is allowed


FAULTS: list[dict[str, object]] = [
    {"id": ""},
    {"id": "a b"},
    {"id": "a\nb"},
    {"id": "-a"},
    {"id": "a" * 129},
    {"weight": 0},
    {"weight": float("nan")},
    {"tier": "gold"},
    {"records_per_second": 0},
    {"records_per_second": float("inf")},
    {"bytes_per_second": -1.0},
    {"records_per_second": 1e308},
    {"records_per_second": 1e-300},
    {"bytes_per_second": 5e-324},
    {"bytes_per_second": 1e12},
    {"burst_seconds": 3_601.0},
    {"burst_seconds": 0},
    {"default_ack": "sent"},
    {"otlp_streams": {"profiles": "x"}},
]


@pytest.mark.parametrize("fault", FAULTS)
def test_a_value_out_of_its_range_is_rejected_with_its_bound(fault):
    with pytest.raises(ConfigError, match=r"must|weight"):
        Tenant(**{"id": "a", **fault})


@pytest.mark.parametrize("burst_seconds", [1e-3, 3_600.0])
@pytest.mark.parametrize(("records", "size_bytes"), [(1e-3, 1.0), (1e9, 1e11)])
def test_the_header_fields_of_a_tenant_on_its_bounds_have_short_numbers(records, size_bytes, burst_seconds):
    tenant = Tenant(id="a", records_per_second=records, bytes_per_second=size_bytes, burst_seconds=burst_seconds)
    quota = TenantQuota(tenant)
    for _ in range(3):
        wait = quota.try_take(500, 1 << 20, 0.0)
        assert wait is None or wait < 10**9
    assert all(0 <= state.remaining <= state.limit < 10**15 for state in quota.states(500, 1 << 20, 0.0))


def test_a_tenant_is_immutable_and_equals_a_tenant_with_the_same_settings():
    tenant = Tenant(id="a", otlp_streams={"logs": "l"})
    assert tenant == Tenant(id="a", otlp_streams={"logs": "l"})
    assert hash(tenant) == hash(Tenant(id="a", otlp_streams={"logs": "l"}))
    with pytest.raises(TypeError):
        tenant.otlp_streams["logs"] = "x"  # type: ignore[index]


def test_the_values_of_ack_and_of_signal():
    assert ACKS == ("queued", "spooled", "delivered")
    assert SIGNALS == ("logs", "traces", "metrics")
