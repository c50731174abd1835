"""How long each flow has waited for its turn, for those who watch."""

import anyio
import pytest

from kpl_core import BufferFull, Config, FairnessPolicy, Producer
from tests.support.producer_scene import STREAM, service

pytestmark = pytest.mark.anyio


async def test_a_flow_that_waits_for_its_turn_says_since_when():
    config = Config(fairness=FairnessPolicy(), max_outstanding_records=100_000)
    async with Producer(config, transport=service()) as producer:
        assert producer.internal.waits_by_flow() == {}
        began = anyio.current_time()
        # Some seconds of one shard's bytes.
        for number in range(4_000):
            try:
                _ = producer.put_nowait(STREAM, partition_key=f"{number}", data=bytes(4_000), flow="flood")
            except BufferFull:
                break
        await anyio.sleep(0.5)
        waits = producer.internal.waits_by_flow()
        assert set(waits) == {"flood"}
        assert 0 < waits["flood"] <= anyio.current_time() - began
        _ = producer.put_nowait(STREAM, partition_key="k", data=b"data", flow="quiet")
        waits = producer.internal.waits_by_flow()
        assert waits.get("quiet", 0.0) == 0.0
        await producer.flush()
        assert producer.internal.waits_by_flow() == {}


async def test_without_a_fair_queue_no_record_waits_for_a_turn():
    async with Producer(Config(), transport=service()) as producer:
        _ = producer.put_nowait(STREAM, partition_key="k", data=b"data")
        assert producer.internal.waits_by_flow() == {}
