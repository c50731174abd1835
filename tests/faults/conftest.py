"""Faults are carried over real sockets, which are asyncio's; what needs no socket runs in virtual time."""

import pytest


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"
