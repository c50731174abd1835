"""What a sender's thread imports: nothing, so that a fork never catches it inside an import."""

from collections.abc import Iterator

import pytest

from kpl_integrations.local_kinesis import LocalKinesis, ThreadedLocalKinesis
from tests.support.running_program import run


@pytest.fixture
def kinesis() -> Iterator[ThreadedLocalKinesis]:
    with ThreadedLocalKinesis(LocalKinesis({"logs": 2}, enforce_limits=False)) as local:
        yield local


@pytest.mark.parametrize("sender", ["handler", "exporter"])
def test_the_senders_thread_imports_nothing(kinesis: ThreadedLocalKinesis, sender: str) -> None:
    endpoint_url = kinesis.endpoint_url.replace("127.0.0.1", "localhost")
    ended = run("background/programs/import_early.py", sender, more={"KPL_ENDPOINT_URL": endpoint_url})
    assert (ended.returncode, ended.stderr, ended.stdout) == (0, "", "")
    assert kinesis.call(lambda fake, now: len(list(fake.records("logs")))) == 1


def test_a_producer_imports_in_a_thread_what_it_needs_to_open(kinesis: ThreadedLocalKinesis) -> None:
    ended = run("background/programs/import_in_loop.py", more={"KPL_ENDPOINT_URL": kinesis.endpoint_url})
    assert (ended.returncode, ended.stderr) == (0, "")
    # This one takes a millisecond. botocore alone takes a hundred.
    assert set(ended.stdout.split()) <= {"concurrent.futures.thread"}
