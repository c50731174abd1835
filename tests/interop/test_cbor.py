"""Binary data without base64: the same records through CBOR."""

from collections.abc import Callable

import pytest

from tests.interop import cbor_wire
from tests.interop.consumers.user_records import Deaggregate
from tests.interop.emulators import ABILITIES, Emulator
from tests.interop.ledger import Ledger, PutUserRecord
from tests.interop.material import DATA
from tests.interop.streams import Stream

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
