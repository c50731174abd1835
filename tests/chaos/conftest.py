"""The chaos tests use real sockets, files and processes, in real time. `TESTS_CHAOS=short` runs a tenth of the load."""

import os

import pytest

SHORT = os.environ.get("TESTS_CHAOS") == "short"


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture
def is_short() -> bool:
    return SHORT
