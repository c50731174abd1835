"""These tests run in virtual time on both backends. Tests with sockets override the fixture."""

import pytest

from tests.support.virtual_time import Backend


@pytest.fixture
def anyio_backend(virtual_time_backend: Backend) -> Backend:
    return virtual_time_backend


@pytest.fixture(autouse=True)
def _with_the_fast_path(monkeypatch: pytest.MonkeyPatch) -> None:
    """Turn the fast path on, also if the whole suite runs with KPL_INGEST_FAST_PATH=false."""
    monkeypatch.setenv("KPL_INGEST_FAST_PATH", "true")
