"""What pytest finds by itself where this package is installed: the fixture `kinesis_double`, and its mark.

    @pytest.mark.kinesis_streams(orders=1)
    def test_an_order_is_put(kinesis_double):
        with TestClient(app) as client:
            client.post("/orders")
        assert len(kinesis_double.user_records("orders")) == 1

Nothing of the producer is imported before a test asks for the fixture.
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from kpl_integrations.asgi.testing import KinesisDouble

__all__ = ["kinesis_double", "pytest_configure"]

_MARK = "kinesis_streams(**shards): the streams of the fixture kinesis_double, each with its number of shards"


def pytest_configure(config: pytest.Config) -> None:
    """Make the mark known, for `--strict-markers`."""
    config.addinivalue_line("markers", _MARK)


@pytest.fixture
def kinesis_double(request: pytest.FixtureRequest) -> "Iterator[KinesisDouble]":
    """A Kinesis in memory for every `KinesisLifespan`; streams by its mark, else one, `orders`, of one shard."""
    from kpl_integrations.asgi.testing import KinesisDouble  # noqa: PLC0415 - pytest loads this file in every run

    mark = request.node.get_closest_marker("kinesis_streams")
    with KinesisDouble({"orders": 1} if mark is None else dict(mark.kwargs)) as double:
        yield double
