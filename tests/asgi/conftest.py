"""What the tests of the ASGI adapter share. Where the package is installed, pytest finds the double by itself."""

import pytest

from kpl_integrations.pytest_plugin import kinesis_double

__all__ = ["anyio_backend", "kinesis_double"]


@pytest.fixture
def anyio_backend() -> str:
    """Run applications on asyncio only; the adapters' own waiting is the producer's."""
    return "asyncio"
