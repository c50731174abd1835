"""`BlockingProducer.shared`: one producer for each process."""

import os
import signal
import threading
from collections.abc import Iterator

import pytest

from kpl_core import BlockingProducer, Config, ConfigError
from kpl_core.background import blocking
from kpl_core.background.process_end import OnePerProcess
from kpl_integrations.local_kinesis import LocalKinesis, ThreadedLocalKinesis


@pytest.fixture
def config(monkeypatch: pytest.MonkeyPatch) -> Iterator[Config]:
    shared: OnePerProcess[BlockingProducer] = OnePerProcess()
    monkeypatch.setattr(blocking, "_shared", shared)
    with ThreadedLocalKinesis(LocalKinesis({"orders": 1})) as kinesis:
        yield Config(region="us-east-1", endpoint_url=kinesis.endpoint_url)
        for producer in shared._made.values():  # noqa: SLF001 - whichever there are
            producer.close()


def test_every_thread_gets_the_same_producer(config: Config) -> None:
    found: list[BlockingProducer] = []
    threads = [threading.Thread(target=lambda: found.append(BlockingProducer.shared(config))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 8
    assert len(set(map(id, found))) == 1
    assert found[0].put("orders", partition_key="1", data=b"x").result(10).successful


def test_another_config_is_rejected_while_it_is_open(config: Config) -> None:
    first = BlockingProducer.shared(config)
    with pytest.raises(ConfigError, match="open with another config"):
        BlockingProducer.shared(Config(region="eu-west-1"))
    first.close()
    other = Config(region="us-east-1", endpoint_url=config.endpoint_url, record_max_buffered_time_ms=5)
    assert BlockingProducer.shared(other) is not first


def test_a_forked_child_opens_its_own(config: Config) -> None:
    parents = BlockingProducer.shared(config)
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            own = BlockingProducer.shared(config)
            result = own is not parents and own.put("orders", partition_key="1", data=b"x").result(10).successful
            os.write(write, b"1" if result else b"0")
        finally:
            os._exit(0)
    assert os.waitpid(child, 0) == (child, 0)
    assert os.read(read, 1) == b"1"
    assert parents.is_open


def test_a_child_forked_while_another_thread_opens_the_shared_producer_opens_its_own(config: Config) -> None:
    # As a call in another thread holds it.
    with blocking._shared._locks.setdefault(os.getpid(), threading.RLock()):  # noqa: SLF001
        child = os.fork()
        if child == 0:
            # A child that waits for the lock ends with this signal.
            signal.alarm(20)
            try:
                own = BlockingProducer.shared(config)
                result = own.put("orders", partition_key="1", data=b"x").result(10).successful
                os._exit(0 if result else 1)
            finally:
                os._exit(2)
    assert os.waitpid(child, 0) == (child, 0)


def test_a_signal_handler_may_ask_in_the_middle_of_asking() -> None:
    shared: OnePerProcess[str] = OnePerProcess()

    def asked_again(_: str) -> bool:
        return shared.get(lambda _: True, lambda: "another") == "made"

    assert [shared.get(asked_again, lambda: "made") for _ in range(2)] == ["made"] * 2
