"""What the log says of trouble, and how seldom."""

import logging

import anyio
import anyio.lowlevel
import pytest

from kpl_core import Config, Producer
from kpl_core.producer.stream_runner import QUIET_SECONDS, TroubleLog
from kpl_core.records.put_records import PutRecordsAnswer, PutRecordsEntry, PutRecordsRequest, RequestFailure
from kpl_core.testing import ErrorAnswer, FakeKinesis, When
from kpl_core.testing.fake_transport import FakeTransport

DOWN = RequestFailure("Internal", "connection refused")
ANSWER = [PutRecordsEntry(sequence_number="1", shard_id="shardId-000000000000")]


@pytest.fixture
def said(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    caplog.set_level(logging.INFO, logger="kpl_core")
    return caplog


def test_one_request_that_fails_is_not_worth_a_line(said):
    log = TroubleLog("orders")
    for now in range(10):
        log.answered(DOWN, float(now))
        log.answered(ANSWER, now + 0.5)
    assert said.messages == []


def test_an_outage_is_logged_once_and_so_is_its_end(said):
    log = TroubleLog("orders")
    for now in range(500):
        log.answered(DOWN, float(now))
    log.answered(ANSWER, 500.0)
    log.answered(ANSWER, 501.0)
    begun, over = said.messages
    assert begun.startswith("requests to stream 'orders' fail (Internal: connection refused); ")
    assert over == "requests to stream 'orders' are answered again, after 499.0 s"
    assert [record.levelname for record in said.records] == ["WARNING", "INFO"]


def test_a_stream_that_comes_and_goes_is_logged_once_a_minute(said):
    log = TroubleLog("orders")
    for tenth in range(10 * 180):
        log.answered(ANSWER if tenth % 3 == 2 else DOWN, tenth / 10)
    assert sum(record.levelname == "WARNING" for record in said.records) == 3


def test_lost_records_are_logged_at_once_then_once_a_minute_and_each_once(said):
    log = TroubleLog("orders")
    log.log_losses_if_due({}, 0.0)
    for second in range(1, 61):
        log.log_losses_if_due({"Expired": second}, float(second))
    log.log_losses_if_due({"Expired": 60, "AccessDeniedException": 1_000}, 1.0 + QUIET_SECONDS)
    log.log_losses_if_due({"Expired": 60, "AccessDeniedException": 1_000}, 1_000.0)
    log.end({"Expired": 60, "AccessDeniedException": 1_000})
    first, second = said.messages
    assert first.startswith("user records of stream 'orders' were not delivered: 1 Expired; ")
    assert second.startswith(
        "user records of stream 'orders' were not delivered: 1,000 AccessDeniedException, 59 Expired; "
    )


@pytest.mark.anyio
async def test_records_whose_results_are_never_read_are_lost_with_a_line_in_the_log(said):
    kinesis = FakeKinesis({"orders": 1})
    kinesis.faults.add(ErrorAnswer("AccessDeniedException"), When(operation="PutRecords"))
    async with Producer(transport=FakeTransport(kinesis)) as producer:
        await producer.put_many("orders", [(f"{number}", b"...") for number in range(100)])
    (line,) = [message for message in said.messages if "not delivered" in message]
    assert "'orders' were not delivered: 100 AccessDeniedException; " in line


@pytest.mark.anyio
async def test_records_that_failed_within_the_minute_are_logged_by_the_close(said):
    kinesis = FakeKinesis({"orders": 1})
    kinesis.faults.add(ErrorAnswer("AccessDeniedException"), When(operation="PutRecords"))
    async with Producer(Config(record_max_buffered_time_ms=0), transport=FakeTransport(kinesis)) as producer:
        for _ in range(3):
            await (await producer.put("orders", partition_key="42", data=b"..."))
    lines = [message for message in said.messages if "not delivered" in message]
    assert [line.partition("delivered: ")[2].partition(";")[0] for line in lines] == [
        "1 AccessDeniedException",
        "2 AccessDeniedException",
    ]


class _Released(FakeTransport):
    """Lets each request fail once `released` is set."""

    def __init__(self) -> None:
        super().__init__(FakeKinesis({"orders": 1}))
        self.asked, self.released = anyio.Event(), anyio.Event()

    async def put_records(self, _request: PutRecordsRequest, /) -> PutRecordsAnswer:
        self.asked.set()
        await self.released.wait()
        return DOWN


@pytest.mark.anyio
async def test_nothing_is_logged_after_the_report_of_a_close(said):
    """A request that ends while the producer gives up woke its stream once more, which logged the loss again."""
    transport = _Released()
    async with Producer(Config(record_max_buffered_time_ms=100), transport=transport) as producer:
        _ = producer.put_nowait("orders", partition_key="1", data=b"...")
        await transport.asked.wait()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(producer.close, None)
            for _ in range(10):
                await anyio.lowlevel.checkpoint()
            transport.released.set()
            tasks.cancel_scope.cancel()
    (line,) = said.messages
    assert line.startswith("the Kinesis producer is closed: 1 accepted: 0 delivered, 1 failed ")
