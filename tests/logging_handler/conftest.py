"""What the tests of the log handler share: a Kinesis in memory, and handlers that are closed after the test."""

import logging
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from kpl_core.testing import FakeKinesis
from kpl_core.testing.fake_transport import FakeTransport
from kpl_integrations.logging_handler import KinesisHandler


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
    return logging.Logger("orders")  # noqa: LOG001 - used by this test only
