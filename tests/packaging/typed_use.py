"""Not run: user code as a type checker reads it. Lines marked "wrong" must be rejected."""

from typing import assert_type

from fastapi import FastAPI

from kpl_core import BlockingProducer, Config, Delivery, Producer, ProducerReport, RecordResult, UserRecord, decode
from kpl_integrations.fastapi import KinesisRouter, ProducerDep


async def puts(producer: Producer) -> None:
    delivery = producer.put_nowait("orders", partition_key="42", data=b"...")
    assert_type(delivery, Delivery)
    assert_type(await delivery, RecordResult)
    assert_type((await delivery).shard_id, str | None)
    assert_type(await producer.put_many("orders", [("42", b"..."), UserRecord("42", b"...")]), list[Delivery])
    assert_type(await producer.put("orders", partition_key="42", data=bytearray(b"...")), Delivery)
    assert_type(await producer.put_many("orders", [("42", memoryview(b"..."))]), list[Delivery])
    assert_type(await producer.flush(timeout=1.0), ProducerReport)
    producer.put_nowait("orders", "42", b"...")  # wrong: by keyword
    producer.put_nowait("orders", partition_key="42", data="text")  # wrong: bytes
    producer.put_nowait("orders", partition_key="42", data=b"...", tier="urgent")  # wrong: no such tier


def threads() -> None:
    with BlockingProducer(Config(region="us-east-1")) as producer:
        result = producer.put("orders", partition_key="42", data=b"...").result(timeout=1.0)
        assert_type(result, RecordResult)


def values() -> None:
    assert_type(decode(b"..."), tuple[UserRecord, ...] | None)
    Config(ordering="per_user")  # wrong: no such order
    Config("us-east-1")  # wrong: by keyword


app = FastAPI()
app.include_router(KinesisRouter(Config()))


@app.post("/orders")
async def take(producer: ProducerDep) -> None:
    assert_type(producer, Producer)
