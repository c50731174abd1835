"""These tests run in virtual time on asyncio and trio, unless they override the fixture for threads or sockets."""

import pytest

from tests.support.virtual_time import Backend


@pytest.fixture
def anyio_backend(virtual_time_backend: Backend) -> Backend:
    return virtual_time_backend
