"""The pytest plugin, loaded automatically where this package is installed: the fixture `kinesis_double`.

    @pytest.mark.kinesis_streams(orders=1)
    def test_an_order_is_put(kinesis_double):
        with TestClient(app) as client:
            client.post("/orders")
        assert len(kinesis_double.user_records("orders")) == 1

The producer is imported only when a test uses the fixture.
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from kpl_integrations.asgi.testing import KinesisDouble

_MARK = "kinesis_streams(**shards): the streams of the fixture kinesis_double, each with its number of shards"


def pytest_configure(config: pytest.Config) -> None:
    """Register the mark, for `--strict-markers`."""
    config.addinivalue_line("markers", _MARK)


@pytest.fixture
def kinesis_double(request: pytest.FixtureRequest) -> "Iterator[KinesisDouble]":
    """Yield an in-memory Kinesis for every `KinesisLifespan`; without the mark it has `orders` with one shard."""
    from kpl_integrations.asgi.testing import KinesisDouble  # noqa: PLC0415 - pytest loads this file in every run

    mark = request.node.get_closest_marker("kinesis_streams")
    with KinesisDouble({"orders": 1} if mark is None else dict(mark.kwargs)) as double:
        yield double
