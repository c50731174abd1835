"""A stream that is deleted and made again under its name has shards with the ids of the old ones and other ranges."""

import logging

import anyio
import pytest

from kpl_core import Producer
from kpl_core.pipeline.shard_map import MOST_AGE_SECONDS
from kpl_core.testing.fake_transport import FakeTransport
from tests.support.material import even_shards, keys_in
from tests.support.producer_scene import STREAM, producer, seen_by_kcl, unmetered

pytestmark = pytest.mark.anyio

# Each aggregated record begins with a key of the first of four shards, so it is stored where the old map says.
KEYS = [key for shard in even_shards(4) for key in keys_in(shard, 5)]


async def put_all(orders: Producer, name: str) -> set[bytes]:
    """Put a record of each key; return the data of those that are delivered."""
    data = [f"{name} {key}".encode() for key in KEYS]
    deliveries = await orders.put_many(STREAM, list(zip(KEYS, data, strict=True)))
    results = await deliveries.results()
    return {each for each, result in zip(data, results, strict=True) if result.successful}


async def make_again(transport: FakeTransport, *, after: float) -> None:
    transport.kinesis.delete_stream(STREAM, now=anyio.current_time())
    await anyio.sleep(after)
    transport.kinesis.create_stream(STREAM, shard_count=4, now=anyio.current_time())


@pytest.mark.parametrize("ordering", ["none", "per_key"])
async def test_a_refused_put_forgets_the_shards_so_consumers_read_all_that_is_delivered(ordering: str) -> None:
    transport = unmetered(1)
    async with producer(transport, ordering=ordering) as orders:
        assert len(await put_all(orders, "before")) == len(KEYS)
        transport.kinesis.delete_stream(STREAM, now=anyio.current_time())
        await anyio.sleep(1.0)
        assert await put_all(orders, "meanwhile") == set()
        transport.kinesis.create_stream(STREAM, shard_count=4, now=anyio.current_time())
        delivered: set[bytes] = set()
        for turn in range(100):
            delivered |= await put_all(orders, f"after {turn}")
            await anyio.sleep(0.5)
        assert len(delivered) == 100 * len(KEYS)
        # It knows the new shards, and aggregates again.
        assert len(transport.requests[-1].records) <= 4
    assert seen_by_kcl(transport, now=anyio.current_time()) == delivered


async def test_a_map_that_is_a_minute_old_is_refreshed_and_what_was_made_again_is_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    transport = unmetered(1)
    async with producer(transport) as orders:
        await put_all(orders, "before")
        await make_again(transport, after=MOST_AGE_SECONDS + 1.0)
        # No put was refused. The first answer asks for the map, and has been given with the old one.
        await put_all(orders, "first")
        await anyio.sleep(0.1)
        with caplog.at_level(logging.WARNING, "kpl_core"):
            delivered = await put_all(orders, "then")
    assert len(delivered) == len(KEYS)
    assert delivered <= seen_by_kcl(transport, now=anyio.current_time())
    assert "was deleted and made again" in caplog.text
