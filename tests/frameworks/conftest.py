"""What the tests of the adapters share; where the package is installed, pytest finds the double by itself."""

import logging
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from kpl_core.testing import FakeKinesis
from kpl_core.testing.fake_transport import FakeTransport
from kpl_integrations.logging_handler import KinesisHandler
from kpl_integrations.pytest_plugin import kinesis_double

__all__ = ["anyio_backend", "kinesis_double"]


@pytest.fixture
def anyio_backend() -> str:
    """Applications run on asyncio; the adapters' own waiting is the producer's."""
    return "asyncio"


@pytest.fixture
def kinesis() -> FakeKinesis:
    return FakeKinesis({"logs": 2}, enforce_limits=False)


@pytest.fixture
def make(kinesis: FakeKinesis) -> Iterator[Callable[..., KinesisHandler]]:
    made: list[KinesisHandler] = []

    def make_handler(**options: Any) -> KinesisHandler:
        handler = KinesisHandler("logs", **{"transport": lambda config: FakeTransport(kinesis), **options})
        made.append(handler)
        return handler

    yield make_handler
    for handler in made:
        handler.close()


@pytest.fixture
def logger() -> logging.Logger:
    return logging.Logger("orders")  # noqa: LOG001 - nobody else's, and gone with the test
