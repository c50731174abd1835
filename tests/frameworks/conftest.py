"""The double that ships, as the fixture that ships; where the package is installed, pytest finds it by itself."""

import pytest

from kpl_integrations.pytest_plugin import kinesis_double

__all__ = ["anyio_backend", "kinesis_double"]


@pytest.fixture
def anyio_backend() -> str:
    """Applications run on asyncio; the adapters' own waiting is the producer's."""
    return "asyncio"
