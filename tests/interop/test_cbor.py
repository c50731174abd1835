"""Binary data without base64: the same records through CBOR."""

import base64
import json
import urllib.request
from collections.abc import Callable

import pytest

from kpl_integrations.ingest.tenants import Tenant
from tests.interop import cbor_wire
from tests.interop.consumers.user_records import Deaggregate
from tests.interop.emulators import ABILITIES, Emulator
from tests.interop.ledger import Ledger, PutUserRecord
from tests.interop.material import DATA
from tests.interop.streams import REGION, Stream
from tests.support.running_gateway import key_directory, running_gateway

NewStream = Callable[..., Stream]

pytestmark = pytest.mark.parametrize(
    "emulator", [name for name, abilities in ABILITIES.items() if abilities.cbor], indirect=True
)


def test_records_put_by_the_cbor_oracle_are_read_back_unchanged(
    emulator: Emulator, new_stream: NewStream, deaggregators: dict[str, Deaggregate], ledger: Ledger
) -> None:
    stream = new_stream(emulator, shards=2)
    put = [PutUserRecord(f"ключ-{number} 🦉", data) for number, data in enumerate(DATA.values())]

    answer = cbor_wire.call(
        emulator,
        "PutRecords",
        {
            "StreamName": stream.name,
            "Records": [{"PartitionKey": record.partition_key, "Data": record.data} for record in put],
        },
    )

    assert answer["FailedRecordCount"] == 0
    assert all(record["ShardId"] and record["SequenceNumber"] for record in answer["Records"])
    kinesis_records = cbor_wire.read(stream)
    for name, deaggregate in deaggregators.items():
        ledger.compare(str(emulator), name, put=put, read=deaggregate(kinesis_records))


def test_a_gateway_that_sends_cbor_delivers_records_unchanged(
    emulator: Emulator, new_stream: NewStream, deaggregators: dict[str, Deaggregate], ledger: Ledger
) -> None:
    stream = new_stream(emulator, shards=2)
    put = [PutUserRecord(f"key-{number}", data) for number, data in enumerate(DATA.values())]
    config = {"endpoint_url": emulator.endpoint_url, "region": REGION, "collection_max_count": 80}
    lines = [
        json.dumps({"partition_key": each.partition_key, "data_base64": base64.b64encode(each.data).decode()})
        for each in put
    ]

    with running_gateway(key_directory(ada=Tenant(id="ada")), {}, config=config, wire_path="cbor") as gateway:
        request = urllib.request.Request(  # noqa: S310 - loopback
            f"{gateway.url}/v1/streams/{stream.name}/records?ack=delivered",
            "\n".join(lines).encode(),
            {"Authorization": "Bearer ada", "Content-Type": "application/x-ndjson"},
        )
        with urllib.request.urlopen(request, timeout=60) as answer:  # noqa: S310 - loopback
            assert answer.status == 200

    kinesis_records = cbor_wire.read(stream)
    for name, deaggregate in deaggregators.items():
        ledger.compare(str(emulator), name, put=put, read=deaggregate(kinesis_records))
