"""`ordering="per_key"`: a reader of the stream sees each key's records in the order of their puts, whatever happens."""

from collections import defaultdict
from typing import Any

import anyio
import pytest

from tests.support.consumers import read_as_kcl
from tests.support.key_order import Unreliable
from tests.support.producer_scene import STREAM, producer

pytestmark = pytest.mark.anyio


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("aggregation", [True, False])
async def test_no_record_overtakes_another_of_its_key_not_at_the_start_nor_in_a_reshard(seed, aggregation):
    transport = Unreliable(seed)
    options: dict[str, Any] = {
        "ordering": "per_key",
        "aggregation_enabled": aggregation,
        "record_max_buffered_time_ms": 10,
        "retry_backoff_base_ms": 5,
        "retry_backoff_cap_ms": 100,
        "record_ttl_ms": 600_000,
    }
    async with producer(transport, **options) as orders:
        for number in range(60):
            for key in range(6):
                _ = await orders.put(STREAM, partition_key=f"k{key}", data=str(number).encode())
            await anyio.sleep(0.005)
            if number in {20, 40}:
                parent = transport.kinesis.open_shards(STREAM, now=anyio.current_time())[0]
                middle = (parent.starting_hash_key + parent.ending_hash_key) // 2
                transport.kinesis.split_shard(
                    STREAM, shard_id=parent.shard_id, new_starting_hash_key=middle, now=anyio.current_time()
                )
        report = await orders.flush()
        assert report.delivered == report.accepted == 360
        seen: dict[str, list[int]] = defaultdict(list)
        for read in read_as_kcl(transport.kinesis, STREAM, now=anyio.current_time()):
            seen[read.partition_key].append(int(read.data))
    for numbers in seen.values():
        first_seen = list(dict.fromkeys(numbers))
        assert first_seen == list(range(60))
