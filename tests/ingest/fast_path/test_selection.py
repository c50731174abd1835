"""The fast path runs only on tested versions of uvicorn that have all internals it uses.

To test another version: `pip install --target /tmp/uvicorn-VERSION --no-deps uvicorn==VERSION`, then
`PYTHONPATH=/tmp/uvicorn-VERSION python -m pytest tests/ingest/fast_path tests/ingest/http`.
"""

import logging

import httpx
import pytest
import uvicorn
from uvicorn.protocols.http import httptools_impl
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from kpl_integrations.ingest.fast_path.protocol import FastPathProtocol
from kpl_integrations.ingest.fast_path.selection import (
    TESTED_UVICORN,
    missing_internals,
    server_protocol,
    untested_reason,
)
from kpl_integrations.ingest.http.connection_bounds import BoundedProtocol
from kpl_integrations.ingest.settings_sources import load_settings
from kpl_integrations.ingest.tenants import OpenTenants, Tenant
from tests.support.gateway_scene import gateway_of, kinesis
from tests.support.running_gateway import running_gateway

LAST = TESTED_UVICORN[1]

# A version of uvicorn, and whether the fast path runs on it.
VERSIONS = [
    ("0.31.9", False),
    ("0.32.0", True),
    ("0.54.0", True),
    ("0.54.1.post1", True),
    (f"{LAST[0]}.{LAST[1] + 1}.0", False),
    ("1.0.0", False),
    ("0.dev", False),
]


def choice(caplog: pytest.LogCaptureFixture, *, fast_path: bool = True) -> tuple[object, bool, list[str]]:
    with caplog.at_level(logging.WARNING):
        chosen = server_protocol(gateway_of(kinesis()), load_settings(fast_path=fast_path))
    return chosen.http, chosen.is_fast, [record.getMessage() for record in caplog.records]


@pytest.mark.parametrize(("version", "is_supported"), VERSIONS)
def test_the_fast_path_is_limited_to_tested_versions(version, is_supported):
    reason = untested_reason(version)
    assert (reason is None) is is_supported
    assert reason is None or f"uvicorn {version} is outside the tested versions 0.32 to " in reason


def test_the_installed_uvicorn_has_the_fast_path_without_a_warning(caplog):
    http, is_fast, warnings = choice(caplog)
    assert isinstance(http, type)
    assert issubclass(http, FastPathProtocol)
    assert (is_fast, warnings) == (True, [])


def test_an_untested_version_turns_the_fast_path_off_with_one_warning(caplog, monkeypatch):
    monkeypatch.setattr(uvicorn, "__version__", "9.9.9")
    http, is_fast, warnings = choice(caplog)
    assert isinstance(http, type)
    assert issubclass(http, BoundedProtocol)
    assert not issubclass(http, FastPathProtocol)
    assert not is_fast
    (warning,) = warnings
    assert "the fast path is off: uvicorn 9.9.9 is outside the tested versions" in warning
    assert "KPL_INGEST_FAST_PATH=false" in warning


def test_the_setting_turns_the_fast_path_off_without_a_warning(caplog):
    http, is_fast, warnings = choice(caplog, fast_path=False)
    assert isinstance(http, type)
    assert not issubclass(http, FastPathProtocol)
    assert (is_fast, warnings) == (False, [])


def test_a_missing_internal_turns_the_fast_path_off_with_one_warning(caplog, monkeypatch):
    monkeypatch.delattr(httptools_impl, "STATUS_LINE")
    http, is_fast, warnings = choice(caplog)
    assert isinstance(http, type)
    assert issubclass(http, BoundedProtocol)
    assert not is_fast
    assert len(warnings) == 1
    assert "STATUS_LINE" in warnings[0]


@pytest.mark.parametrize("name", ["on_header", "send_400_response"])
def test_without_the_internals_of_the_bounds_uvicorns_h11_protocol_serves(caplog, monkeypatch, name):
    monkeypatch.delattr(HttpToolsProtocol, name)
    http, is_fast, warnings = choice(caplog)
    assert (http, is_fast) == ("h11", False)
    assert len(warnings) == 1
    assert f"HttpToolsProtocol.{name}" in warnings[0]


def test_names_of_absent_modules_and_objects_are_missing():
    assert missing_internals({"uvicorn.absent:Thing": ("a",)}) == ["Thing"]
    assert missing_internals({"uvicorn.server:Absent": ()}) == ["Absent"]
    assert missing_internals({"uvicorn.server:ServerState": ("total_requests", "absent")}) == ["ServerState.absent"]


@pytest.mark.parametrize("version", [None, "9.9.9"])
@pytest.mark.parametrize("lacks_internals", [False, True])
def test_a_gateway_serves_with_each_protocol(monkeypatch, version, lacks_internals):
    if version is not None:
        monkeypatch.setattr(uvicorn, "__version__", version)
    with monkeypatch.context() as patch:
        if lacks_internals:
            # Only the check sees the missing name. uvicorn itself needs it.
            patch.setattr("kpl_integrations.ingest.fast_path.selection._attributes", lambda _: set())
        with running_gateway(OpenTenants(Tenant(id="local")), {"orders": 1}) as gateway:
            answer = httpx.post(
                f"{gateway.url}/v1/streams/orders/records?ack=delivered", json={"partition_key": "k", "data": "d"}
            )
            assert answer.status_code == 200
    assert gateway.report is not None
    assert gateway.report.delivered == 1
