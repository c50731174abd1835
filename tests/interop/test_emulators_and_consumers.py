"""The harness is tested before our producer: stock requests, and aggregates built by other libraries."""

import base64
import json
import socket
import subprocess
from collections.abc import Callable
from urllib.parse import urlsplit

import pytest
from aws_kinesis_agg.aggregator import RecordAggregator

from kpl_core.records.aggregated_record import decode
from tests.interop.consumers import npm, pypi
from tests.interop.consumers.user_records import Deaggregate
from tests.interop.emulators import Emulator
from tests.interop.ledger import Ledger, PutUserRecord
from tests.interop.material import every_key_and_data, numbered
from tests.interop.streams import KinesisRecord, Stream, hash_key
from tests.support.installation import INTEROP, Installed
from tests.support.processes import listens_only_on_loopback

NewStream = Callable[..., Stream]


def aggregated_elsewhere(records: list[PutUserRecord]) -> bytes:
    """Return the aggregated record that PyPI's package builds."""
    aggregator = RecordAggregator()
    for record in records:
        aggregator.add_user_record(record.partition_key, record.data, record.explicit_hash_key)
    data: bytes = aggregator.clear_and_get().get_contents()[2]
    return data


def test_aggregates_of_another_library_are_read_back_unchanged(
    emulator: Emulator, new_stream: NewStream, deaggregators: dict[str, Deaggregate], ledger: Ledger
) -> None:
    stream = new_stream(emulator, shards=2)
    put = every_key_and_data()
    for first in range(0, len(put), 20):
        lot = put[first : first + 20]
        stream.put_records([("a", str(hash_key(lot[0].partition_key)), aggregated_elsewhere(lot))])

    kinesis_records = stream.read()

    for name, deaggregate in deaggregators.items():
        read = deaggregate(kinesis_records)
        assert all(record.aggregated for record in read)
        ledger.compare(str(emulator), name, put=put, read=read)


def test_an_emulator_puts_a_record_where_its_hash_key_belongs(emulator: Emulator, new_stream: NewStream) -> None:
    stream = new_stream(emulator, shards=5)
    put = [(f"key-{number}", str(hash_key(f"key-{number}")), b"") for number in range(100)]
    stream.put_records(put)

    read = stream.read()

    assert {record.partition_key for record in read} == {key for key, _, _ in put}
    assert all(stream.shard(record.shard_id).takes(hash_key(record.partition_key)) for record in read)


def test_aggregates_of_the_npm_package_are_decoded_by_us(installed: Installed) -> None:
    put = numbered(1000, seed=11)

    finished = subprocess.run(
        [installed.node.executable, str(INTEROP / "npm" / "aggregate.cjs")],
        input=json.dumps(
            [{"partitionKey": record.partition_key, "data": base64.b64encode(record.data).decode()} for record in put]
        ).encode(),
        env={"NODE_PATH": str(installed.node_modules)},
        capture_output=True,
        check=True,
    )

    decoded = decode(base64.b64decode(finished.stdout))
    assert decoded is not None
    assert [(record.partition_key, record.data) for record in decoded] == [record.identity for record in put]


def test_a_raw_record_that_only_looks_aggregated_is_read_raw() -> None:
    """The npm package rejects it: a known fault, which no test requires."""
    data = aggregated_elsewhere(numbered(3, seed=12))[:-1] + b"\x00"

    (read,) = pypi.deaggregate([KinesisRecord("shardId-000000000000", "1", "key", data)])

    assert decode(data) is None
    assert (read.data, read.aggregated) == (data, False)


def test_the_harness_detects_a_lost_changed_repeated_or_invented_record(ledger: Ledger) -> None:
    put = numbered(3, seed=13)
    whole = pypi.deaggregate([KinesisRecord("shardId-000000000000", "1", "a", aggregated_elsewhere(put))])
    changed = pypi.deaggregate(
        [KinesisRecord("shardId-000000000000", "1", "a", aggregated_elsewhere([*put[:2], PutUserRecord("key", b"?")]))]
    )
    rows_before = dict(ledger.rows)

    for read, complaint in [
        (whole[:2], "1 of 3 records lost"),
        (changed, "1 of 3 records lost"),
        ([*whole, whole[0]], "twice"),
        ([*whole, changed[2]], "what nobody put"),
    ]:
        with pytest.raises(AssertionError, match=complaint):
            ledger.compare("nowhere", npm.NAME, put=put, read=read)

    assert ledger.rows == rows_before


def test_a_client_that_disconnects_does_not_end_the_emulator(emulator: Emulator, new_stream: NewStream) -> None:
    address = urlsplit(emulator.endpoint_url)
    assert address.port is not None
    for _ in range(3):
        with socket.create_connection(("127.0.0.1", address.port)) as connection:
            connection.sendall(
                b"POST / HTTP/1.1\r\nHost: localhost\r\nX-Amz-Target: Kinesis_20131202.PutRecords\r\n"
                b"Content-Type: application/x-amz-json-1.1\r\nContent-Length: 1000\r\n\r\n{"
            )

    stream = new_stream(emulator, shards=1)
    stream.put_records([("key", "0", b"data")])

    assert [record.data for record in stream.read()] == [b"data"]
    assert emulator.process.running


def test_the_loopback_check_detects_a_socket_on_all_interfaces() -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed, socket.create_server(("0.0.0.0", 0)) as open_to_all:  # noqa: S104
        assert listens_only_on_loopback(closed.getsockname()[1])
        assert not listens_only_on_loopback(open_to_all.getsockname()[1])
