"""These tests run in virtual time on both backends. Tests with sockets override the fixture."""

import pytest

from tests.support.virtual_time import Backend


@pytest.fixture
def anyio_backend(virtual_time_backend: Backend) -> Backend:
    return virtual_time_backend
