"""One Kinesis for all tests of the commands, and a fixture that runs a command in this process, which is fast."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from itertools import count
from typing import Any, NamedTuple, TypeVar

import pytest
from aiobotocore.session import AioSession
from botocore.loaders import Loader, create_loader

from kpl_core.testing import Effect, FakeKinesis, Fault, When
from kpl_integrations.cli import main
from kpl_integrations.local_kinesis import LocalKinesis, ThreadedLocalKinesis
from tests.support.kpl_process import Outcome

_numbers = count()
_Result = TypeVar("_Result")


class Stream(NamedTuple):
    """The stream of one test."""

    name: str
    kinesis: ThreadedLocalKinesis

    @property
    def address(self) -> tuple[str, str, str]:
        """The arguments with which a command finds the stream."""
        return (self.name, "--endpoint-url", self.kinesis.endpoint_url)

    def stored(self) -> list[tuple[str, bytes]]:
        """Return partition key and data of all stored Kinesis records."""
        return [(record.partition_key, record.data) for record in self.call(lambda fake, _: fake.records(self.name))]

    def store(self, *records: tuple[str, str | None, bytes]) -> None:
        """Store Kinesis records (key, explicit hash key, data) without a producer."""
        self.call(lambda fake, now: fake.put_records(self.name, records, now=now))

    def call(self, function: Callable[[FakeKinesis, float], _Result]) -> _Result:
        """Run a function on the service between two requests."""
        return self.kinesis.call(function)

    @contextmanager
    def fault(self, effect: Effect, when: When) -> Iterator[Fault]:
        """Arm a fault for the block."""
        fault = self.call(lambda fake, _: fake.faults.add(effect, when))
        try:
            yield fault
        finally:
            self.call(lambda fake, _: fake.faults.remove(fault))


@pytest.fixture(scope="session")
def kinesis() -> Iterator[ThreadedLocalKinesis]:
    """Yield a Kinesis on loopback for all tests of this folder."""
    with ThreadedLocalKinesis(LocalKinesis({})) as server:
        yield server


@pytest.fixture
def stream(kinesis: ThreadedLocalKinesis) -> Stream:
    """Return an empty stream of two shards."""
    stream = Stream(f"stream-{next(_numbers)}", kinesis)
    stream.call(lambda fake, now: fake.create_stream(stream.name, shard_count=2, now=now))
    return stream


class _Session(AioSession):  # type: ignore[misc] # aiobotocore has no types
    """A session that shares botocore's parsed files, because parsing them is most of a command's time here."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.register_component("data_loader", _loader())


@cache
def _loader() -> Loader:
    loader: Loader = create_loader()
    return loader


@pytest.fixture
def kpl(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Callable[..., Outcome]:
    """Return `kpl(*arguments)`, which runs a command in this process."""
    monkeypatch.setattr("aiobotocore.session.AioSession", _Session)

    def kpl(*arguments: object) -> Outcome:
        capsys.readouterr()
        status = main([str(argument) for argument in arguments])
        return Outcome(status, *capsys.readouterr())

    return kpl
