"""What is on its way in the background when a lifespan ends: a server may end the process by a signal after it."""

import contextlib
import logging
from collections.abc import Iterator

from starlette.applications import Starlette
from starlette.testclient import TestClient

from kpl_core.testing import FakeKinesis, FakeTransport, Latency, When
from kpl_integrations.asgi import KinesisLifespan
from kpl_integrations.asgi.testing import KinesisDouble
from kpl_integrations.logging_handler import KinesisHandler
from tests.support.consumers import log_records

LOGGER = logging.getLogger("tests.last_flush")


@contextlib.contextmanager
def handler_to(kinesis: FakeKinesis) -> Iterator[KinesisHandler]:
    handler = KinesisHandler("logs", transport=lambda _config: FakeTransport(kinesis))
    LOGGER.addHandler(handler)
    try:
        yield handler
    finally:
        LOGGER.removeHandler(handler)
        handler.close()


def test_the_end_of_a_lifespan_waits_for_the_lines_on_their_way(kinesis_double: KinesisDouble) -> None:
    kinesis = FakeKinesis({"logs": 1})
    kinesis.faults.add(Latency(0.2), When(operation="PutRecords"))
    with handler_to(kinesis) as handler:
        with TestClient(Starlette(lifespan=KinesisLifespan())):
            LOGGER.warning("said while it served")
        assert handler.counts().delivered == 1
    assert [record["message"] for record in log_records(kinesis)] == ["said while it served"]


def test_what_was_never_logged_to_is_not_waited_for(kinesis_double: KinesisDouble) -> None:
    with handler_to(FakeKinesis({"logs": 1})) as handler, TestClient(Starlette(lifespan=KinesisLifespan())):
        pass
    assert handler.begin_last_flush() is None
