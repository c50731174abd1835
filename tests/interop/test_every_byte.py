"""Every record that our producer puts is read back from every emulator by every consumer, byte for byte."""

import asyncio
from collections.abc import Callable
from typing import Any

import anyio
import pytest

from kpl_core import InvalidUserRecord, Producer, RecordResult
from tests.interop import cbor_wire
from tests.interop.consumers.user_records import Deaggregate
from tests.interop.emulators import ABILITIES, MIB, Emulator
from tests.interop.ledger import Ledger, PutUserRecord
from tests.interop.material import at_the_edges, every_key_and_data, fitting, numbered
from tests.interop.production import assert_all_delivered, assert_delivered_where_told, config, produce
from tests.interop.streams import Stream

# aiohttp warns about every body above 1 MiB, also of the stock SDK; the requests themselves are correct.
LARGE_BODIES = pytest.mark.filterwarnings("ignore:Sending a large body directly:ResourceWarning")

NewStream = Callable[..., Stream]
Check = Callable[..., None]


@pytest.fixture
def check(deaggregators: dict[str, Deaggregate], ledger: Ledger) -> Check:
    """Return a function that produces records, reads them by every consumer and compares."""

    def produce_and_compare(stream: Stream, put: list[PutUserRecord], **options: Any) -> None:
        results = produce(stream, put, **options)
        assert_all_delivered(put, results)

        kinesis_records = stream.read()
        shards = {shard.shard_id: shard for shard in stream.shards()}
        for name, deaggregate in deaggregators.items():
            read = deaggregate(kinesis_records)
            ledger.compare(str(stream.emulator), name, put=put, read=read)
            assert_delivered_where_told(put, results, read)
            told = {record.identity for record in put if record.explicit_hash_key is None}
            assert all(
                record.lies_in(shards[record.shard_id])
                for record in read
                if (record.partition_key, record.data) in told
            )

    return produce_and_compare


def test_every_key_with_every_data(emulator: Emulator, new_stream: NewStream, check: Check) -> None:
    # A record put before the shards are known travels alone, with its own key.
    put = every_key_and_data(emulator.abilities.key_length)

    check(new_stream(emulator, shards=3), put)


def test_every_key_with_every_data_unaggregated(emulator: Emulator, new_stream: NewStream, check: Check) -> None:
    put = every_key_and_data(emulator.abilities.key_length)

    check(new_stream(emulator, shards=3), put, aggregation_enabled=False)


@pytest.mark.parametrize("wire_path", ["fast", "stock"])
def test_thousands_of_records_aggregated(
    emulator: Emulator, new_stream: NewStream, check: Check, wire_path: str
) -> None:
    check(new_stream(emulator, shards=4), numbered(4000, seed=31), wire_path=wire_path)


def test_explicit_hash_keys_at_the_edges_of_each_shard(emulator: Emulator, new_stream: NewStream, check: Check) -> None:
    stream = new_stream(emulator, shards=3)
    put = at_the_edges(stream.shards(), ending_hash_keys=emulator.abilities.ending_hash_key)

    check(stream, put)


def test_explicit_hash_keys_at_the_edges_of_each_shard_unaggregated(
    emulator: Emulator, new_stream: NewStream, check: Check
) -> None:
    stream = new_stream(emulator, shards=3)
    put = at_the_edges(stream.shards(), ending_hash_keys=emulator.abilities.ending_hash_key)

    check(stream, put, aggregation_enabled=False)


def test_records_with_and_without_explicit_hash_keys_in_one_aggregate(
    emulator: Emulator, new_stream: NewStream, check: Check
) -> None:
    put = [
        PutUserRecord(f"key-{number % 7}", f"{number}".encode(), str(number) if number % 2 else None)
        for number in range(300)
    ]

    check(new_stream(emulator, shards=1), put)


def test_the_first_key_of_an_aggregate_as_its_own(emulator: Emulator, new_stream: NewStream, check: Check) -> None:
    stream = new_stream(emulator, shards=2)

    check(stream, numbered(500, seed=32), aggregate_partition_key="first")

    assert "a" not in {record.partition_key for record in stream.read()}


@pytest.mark.parametrize(
    "emulator", [name for name, abilities in ABILITIES.items() if abilities.stream_arn], indirect=True
)
def test_a_stream_addressed_by_its_arn(emulator: Emulator, new_stream: NewStream, check: Check) -> None:
    stream = new_stream(emulator, shards=2)

    check(stream, numbered(300, seed=33), to=stream.arn)


@LARGE_BODIES
def test_a_record_of_the_default_maximum_size(emulator: Emulator, new_stream: NewStream, check: Check) -> None:
    key = fitting("漢" * 256, emulator.abilities.key_length)

    check(new_stream(emulator, shards=1), [PutUserRecord(key, b"\xf3" * (MIB - len(key.encode())))])


def test_tls(kinesis_local: Emulator, new_stream: NewStream, check: Check) -> None:
    """Without verification, because the emulator has a self-signed certificate."""
    check(
        new_stream(kinesis_local, shards=2),
        numbered(300, seed=34),
        endpoint_url=kinesis_local.tls_endpoint_url,
        verify_ssl=False,
    )


@LARGE_BODIES
@pytest.mark.parametrize(
    "emulator", [name for name, abilities in ABILITIES.items() if abilities.max_record_bytes > MIB], indirect=True
)
def test_records_up_to_ten_mib(emulator: Emulator, new_stream: NewStream, check: Check) -> None:
    stream = new_stream(emulator, shards=2)
    largest = emulator.abilities.max_record_bytes
    stream.accept_records_of(10 * MIB)
    put = [
        PutUserRecord("one byte over", bytes(MIB) + b"\x01"),
        PutUserRecord("whole", b"w" * (largest - len("whole"))),
        *numbered(50, seed=35),
    ]

    check(stream, put, max_record_size=10 * MIB, rate_limit_bytes_per_sec_per_shard=1e9)


@LARGE_BODIES
def test_the_producer_reads_the_maximum_record_size_from_the_stream(
    kinesis_local: Emulator, new_stream: NewStream, deaggregators: dict[str, Deaggregate], ledger: Ledger
) -> None:
    stream = new_stream(kinesis_local, shards=1)
    stream.accept_records_of(2 * MIB)
    large = PutUserRecord("large", b"l" * (MIB + 1))

    async def run() -> list[RecordResult]:
        async with Producer(config(kinesis_local)) as producer:
            first = await producer.put(stream.name, partition_key="first", data=b"small")
            with anyio.fail_after(20):
                while True:
                    try:
                        second = producer.put_nowait(stream.name, partition_key=large.partition_key, data=large.data)
                        return [await first, await second]
                    except InvalidUserRecord:
                        await anyio.sleep(0.02)

    put = [PutUserRecord("first", b"small"), large]
    assert_all_delivered(put, asyncio.run(run()))

    kinesis_records = stream.read()
    for name, deaggregate in deaggregators.items():
        ledger.compare(str(kinesis_local), name, put=put, read=deaggregate(kinesis_records))


@LARGE_BODIES
def test_a_record_of_exactly_ten_mib_is_accepted(kinesis_local: Emulator, new_stream: NewStream) -> None:
    """Only put: the emulator cannot return it; the test above reads a record that is 256 bytes smaller."""
    stream = new_stream(kinesis_local, shards=1)
    stream.accept_records_of(10 * MIB)
    put = [PutUserRecord("🦉", bytes(10 * MIB - len("🦉".encode())))]

    assert_all_delivered(put, produce(stream, put, max_record_size=10 * MIB))


@pytest.mark.parametrize("emulator", [name for name, abilities in ABILITIES.items() if abilities.cbor], indirect=True)
def test_every_key_with_every_data_through_cbor(
    emulator: Emulator, new_stream: NewStream, deaggregators: dict[str, Deaggregate], ledger: Ledger
) -> None:
    stream = new_stream(emulator, shards=2)
    put = every_key_and_data(emulator.abilities.key_length)

    # In small requests, because kinesalite truncates CBOR answers at 16 KiB.
    results = produce(stream, put, wire_path="cbor", collection_max_count=80)
    assert_all_delivered(put, results)

    kinesis_records = cbor_wire.read(stream)
    for name, deaggregate in deaggregators.items():
        read = deaggregate(kinesis_records)
        ledger.compare(str(emulator), name, put=put, read=read)
        assert_delivered_where_told(put, results, read)


@LARGE_BODIES
def test_a_record_that_the_stream_rejects_fails_alone(
    emulator: Emulator, new_stream: NewStream, deaggregators: dict[str, Deaggregate], ledger: Ledger
) -> None:
    """Two emulators reject the whole request, as the service does; the producer must find the invalid record."""
    stream = new_stream(emulator, shards=1)
    too_large = PutUserRecord("too large", bytes(MIB + 1))
    neighbours = numbered(40, seed=38)

    results = produce(
        stream, [*neighbours[:20], too_large, *neighbours[20:]], max_record_size=2 * MIB, aggregation_enabled=False
    )

    assert not results.pop(20).successful
    assert_all_delivered(neighbours, results)
    kinesis_records = stream.read()
    for name, deaggregate in deaggregators.items():
        ledger.compare(str(emulator), name, put=neighbours, read=deaggregate(kinesis_records))


def test_a_key_that_the_emulator_rejects_does_not_fail_other_records(
    emulator: Emulator, new_stream: NewStream, deaggregators: dict[str, Deaggregate], ledger: Ledger
) -> None:
    """Two emulators count UTF-16 units and reject the whole request, with different error codes.

    The result of the key itself is not checked, because the service counts it differently.
    """
    stream = new_stream(emulator, shards=1)
    refused = PutUserRecord("🦉" * 256, b"512 UTF-16 units")
    neighbours = numbered(40, seed=39)

    results = produce(stream, [*neighbours[:20], refused, *neighbours[20:]], aggregation_enabled=False)

    results.pop(20)
    assert_all_delivered(neighbours, results)
    kinesis_records = [record for record in stream.read() if record.partition_key != refused.partition_key]
    for name, deaggregate in deaggregators.items():
        ledger.compare(str(emulator), name, put=neighbours, read=deaggregate(kinesis_records))


def test_an_unknown_stream_fails_at_once_without_affecting_another(
    emulator: Emulator, new_stream: NewStream, check: Check
) -> None:
    stream = new_stream(emulator, shards=1)

    results = produce(stream, numbered(10, seed=36), to="nobody-made-this-stream")

    assert {(result.successful, result.error_code) for result in results} == {(False, "ResourceNotFoundException")}
    assert all(len(result.attempts) == 1 for result in results)
    check(stream, numbered(10, seed=37))
