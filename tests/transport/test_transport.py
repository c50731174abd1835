"""Which transport a configuration has, and what a failure quotes of an invalid answer."""

import pytest
import trio

from kpl_core import Config
from kpl_core.records.put_records import RequestFailure
from kpl_core.transport.default_transport import default_transport
from kpl_core.transport.direct_transport import DirectTransport
from kpl_core.transport.transport import as_record_limit


@pytest.mark.parametrize(("characters", "shown"), [(100, "'" + "x" * 98 + "'"), (101, "'" + "x" * 99 + "...")])
def test_a_failure_quotes_at_most_100_characters_of_an_invalid_answer(characters, shown):
    failure = as_record_limit("x" * (characters - len("''")))
    assert isinstance(failure, RequestFailure)
    assert f" returned {shown}; it must return " in failure.message


def test_outside_asyncio_the_transport_is_made_in_the_thread_that_asks():
    assert isinstance(trio.run(default_transport, Config(region="us-east-1")), DirectTransport)
