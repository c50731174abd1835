"""The recipe of docs/howto/lambda.md: the example's function, with what our producer put, and DynamoDB by moto."""

import base64
import hashlib
import json
import re
import runpy
import subprocess
import sys
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import boto3
import pytest
from aws_kinesis_agg.deaggregator import deaggregate_records
from botocore.validate import ParamValidator

from kpl_core import BlockingProducer, Config, decode, user_records
from kpl_core.errors import MalformedAggregatedRecord
from kpl_core.records.aggregated_record import MAGIC
from kpl_integrations.local_kinesis import LocalKinesis, ThreadedLocalKinesis
from tests.interop.emulators import Emulator
from tests.interop.lambda_service import EventSourceMapping, Record, records_of
from tests.interop.streams import REGION
from tests.support.processes import CREDENTIALS
from tests.support.running_program import environment

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "consumers" / "lambda_orders.py"
PAGE = ROOT / "docs" / "howto" / "lambda.md"
ACCESS = {
    "region_name": REGION,
    "aws_access_key_id": CREDENTIALS["AWS_ACCESS_KEY_ID"],
    "aws_secret_access_key": CREDENTIALS["AWS_SECRET_ACCESS_KEY"],
}
# What AWS Lambda's guide shows of a record.
FIELDS = {
    *("kinesis", "eventSource", "eventVersion", "eventID", "eventName", "invokeIdentityArn", "awsRegion"),
    "eventSourceARN",
}


@pytest.fixture
def dynamodb(moto: Emulator) -> Any:
    return boto3.client("dynamodb", endpoint_url=moto.endpoint_url, **ACCESS)  # type: ignore[call-overload]


@pytest.fixture
def new_environment(moto: Emulator, dynamodb: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], Any]]:
    """Return a function that loads the example as a new execution environment does, with an empty table."""
    table = f"orders-{uuid.uuid4()}"
    for variable, value in {
        **CREDENTIALS,
        "AWS_ENDPOINT_URL_DYNAMODB": moto.endpoint_url,
        "ORDERS_TABLE": table,
    }.items():
        monkeypatch.setenv(variable, value)
    dynamodb.create_table(
        TableName=table,
        KeySchema=[{"AttributeName": "id", "KeyType": "HASH"}],
        AttributeDefinitions=[{"AttributeName": "id", "AttributeType": "S"}],
        BillingMode="PAY_PER_REQUEST",
    )
    yield lambda: runpy.run_path(str(EXAMPLE))
    dynamodb.delete_table(TableName=table)


@pytest.fixture
def in_the_table(dynamodb: Any, new_environment: Callable[[], Any]) -> Callable[[], dict[str, tuple[str, bytes]]]:
    """Return a function that reads the table: customer and data of each id."""
    table = new_environment()["table"]

    def read() -> dict[str, tuple[str, bytes]]:
        items = [item for page in dynamodb.get_paginator("scan").paginate(TableName=table) for item in page["Items"]]
        return {item["id"]["S"]: (item["customer"]["S"], item["data"]["B"]) for item in items}

    return read


def _orders(prefix: str, count: int) -> list[tuple[str, bytes]]:
    texts = ("", "höchst 🦉", "\u2028\x00\n", "x" * 300)
    orders = ({"id": f"{prefix}-{number}", "text": texts[number % len(texts)]} for number in range(count))
    return [
        (f"customer-{number % 7}", json.dumps(order, ensure_ascii=number % 2 == 0).encode())
        for number, order in enumerate(orders)
    ]


def _put(*parts: tuple[list[tuple[str, bytes]], bool]) -> dict[str, list[Record]]:
    """Put each part, aggregated or not, by our producer; return each shard's records as Lambda sends them."""
    with ThreadedLocalKinesis(LocalKinesis({"orders": 2})) as kinesis:
        for records, aggregated in parts:
            config = Config(
                region=REGION, endpoint_url=kinesis.endpoint_url, ordering="per_key", aggregation_enabled=aggregated
            )
            with BlockingProducer(config) as producer:
                # The first record of a stream goes alone, before its shards are known.
                results = [producer.put("orders", partition_key=key, data=data) for key, data in records[:1]]
                producer.flush(timeout=30)
                results += [producer.put("orders", partition_key=key, data=data) for key, data in records[1:]]
                producer.flush(timeout=30)
                assert all(delivery.result().successful for delivery in results)
        return records_of(boto3.client("kinesis", endpoint_url=kinesis.endpoint_url, **ACCESS), "orders")  # type: ignore[call-overload]


def _by_id(records: list[tuple[str, bytes]]) -> dict[str, tuple[str, bytes]]:
    return {json.loads(data)["id"]: (key, data) for key, data in records}


def test_the_function_stores_what_the_producer_put_aggregated_or_not(
    new_environment: Callable[[], Any], in_the_table: Callable[[], dict[str, tuple[str, bytes]]]
) -> None:
    aggregated, single = _orders("a", 400), _orders("s", 20)
    nested, surrogate, empty = b"[" * 20_000, b'{"id": "\\ud800"}', b'{"id": ""}'
    malformed = [("customer-1", data) for data in (bytes(range(256)), nested, b"no JSON", surrogate, empty)]
    shards = _put((aggregated + malformed, True), (single, False))
    records = [record for shard in shards.values() for record in shard]
    assert 20 < len(records) < 30, "20 alone, the others in few aggregated records"
    assert all(set(record) == FIELDS for record in records)

    handler = new_environment()["handler"]
    mapping = EventSourceMapping(lambda event: handler(event, None), batch_size=5)
    for shard in shards.values():
        mapping.read(shard)

    stored = in_the_table()
    rejected = [stored.pop(order_id) for order_id in sorted(stored) if order_id.startswith("rejected shardId-")]
    assert stored == _by_id(aggregated + single)
    assert sorted(rejected) == sorted(malformed)
    assert not mapping.discarded
    ours = [(record.partition_key, record.data) for record in user_records({"Records": records})]
    theirs = [each["kinesis"] for each in deaggregate_records(records)]
    assert ours == [(each["partitionKey"], base64.b64decode(each["data"])) for each in theirs]


def test_the_function_is_sent_the_batch_again_from_the_kinesis_record_that_failed(
    new_environment: Callable[[], Any], in_the_table: Callable[[], dict[str, tuple[str, bytes]]]
) -> None:
    """DynamoDB refuses a write in the middle of an aggregated record; the next try is in another environment."""
    orders = _orders("a", 400)
    failing = {"a-200"}
    tries: list[str] = []

    def function(event: dict[str, Any]) -> dict[str, Any]:
        module = new_environment()

        def put_item(params: dict[str, Any], **_: Any) -> None:
            order_id = params["Item"]["id"]["S"]
            tries.append(order_id)
            if order_id in failing:
                failing.remove(order_id)
                message = "throttled"
                raise ConnectionError(message)

        module["dynamodb"].meta.events.register("provide-client-params.dynamodb.PutItem", put_item)
        answer: dict[str, Any] = module["handler"](event, None)
        return answer

    shards = _put((orders, True))
    mapping = EventSourceMapping(function)
    for shard in shards.values():
        mapping.read(shard)

    assert in_the_table() == _by_id(orders)
    assert len(mapping.batches) == len(shards) + 1
    repeated = next(batch for number, batch in enumerate(mapping.batches) if batch[-1] in str(mapping.batches[:number]))
    number_of = {
        json.loads(record.data)["id"]: record.sequence_number
        for shard in shards.values()
        for record in user_records({"Records": shard})
    }
    assert repeated[0] == number_of["a-200"]
    again = {order_id for order_id in tries if tries.count(order_id) == 2}
    assert len(again) > 10, "orders of the same Kinesis record before the failed one come again"
    assert {number_of[order_id] for order_id in again} == {number_of["a-200"]}


def test_a_batch_that_ends_without_an_answer_is_split_and_each_order_stored_once(
    new_environment: Callable[[], Any], in_the_table: Callable[[], dict[str, tuple[str, bytes]]]
) -> None:
    """A timeout reports no failed record, so only `BisectBatchOnFunctionError` makes the batch smaller."""
    handler = new_environment()["handler"]
    orders = _orders("s", 40)

    def function(event: dict[str, Any]) -> dict[str, Any]:
        answer: dict[str, Any] = handler(event, None)
        if len(event["Records"]) > 6:
            message = "timed out after the last write"
            raise TimeoutError(message)
        return answer

    shards = _put((orders, False))
    mapping = EventSourceMapping(function, retry_attempts=0)
    for shard in shards.values():
        mapping.read(shard)

    assert in_the_table() == _by_id(orders)
    assert not mapping.discarded
    assert max(len(batch) for batch in mapping.batches) > 6


def test_a_malformed_aggregated_record_is_discarded_after_the_retries_and_not_what_was_before(
    new_environment: Callable[[], Any], in_the_table: Callable[[], dict[str, tuple[str, bytes]]]
) -> None:
    handler = new_environment()["handler"]
    # The key index of its only record is beyond the table of keys.
    protobuf = b"\x1a\x04\x08\x05\x1a\x00"
    malformed = MAGIC + protobuf + hashlib.md5(protobuf, usedforsecurity=False).digest()
    with pytest.raises(MalformedAggregatedRecord):
        decode(malformed)
    orders = _orders("s", 10)
    longest = max(_put((orders, False)).values(), key=len)
    longest[-1]["kinesis"]["data"] = base64.b64encode(malformed).decode()

    mapping = EventSourceMapping(lambda event: handler(event, None), retry_attempts=2)
    mapping.read(longest)

    assert mapping.discarded == longest[-1:]
    assert [len(batch) for batch in mapping.batches] == [len(longest), 1, 1]
    assert in_the_table() == _by_id([_identity(record) for record in longest[:-1]])


def test_the_function_can_be_tried_as_its_page_says(moto: Emulator, tmp_path: Path) -> None:
    for name, code in re.findall(r"^```python\n# (\w+\.py)\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL):
        here = code.replace("http://127.0.0.1:5000", moto.endpoint_url).replace('"orders"', f'"orders-{uuid.uuid4()}"')
        (tmp_path / name).write_text(here)
    command = [sys.executable, str(tmp_path / "try_lambda_orders.py")]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, check=False, timeout=50)
    answer, items = done.stdout.splitlines()
    assert answer == "{'batchItemFailures': []}", done.stderr
    assert items.startswith("[{'id': {'S': '1'}, 'customer': {'S': 'ada'}, 'data': ")


def test_the_command_of_the_page_has_the_parameters_of_an_event_source_mapping() -> None:
    """No AWS here, so botocore's model of the service checks what the AWS CLI would send."""
    (line,) = re.findall(
        r"^aws lambda create-event-source-mapping (.*)$", PAGE.read_text().replace("\\\n", ""), re.MULTILINE
    )
    options: dict[str, Any] = {}
    for option in re.split(r"(?:^|\s)--", line)[1:]:
        name, _, value = option.partition(" ")
        options["".join(word.capitalize() for word in name.split("-"))] = value.strip().strip("'") or True
    options["FunctionResponseTypes"] = [options["FunctionResponseTypes"]]
    options["MaximumRetryAttempts"] = int(options["MaximumRetryAttempts"])
    options["DestinationConfig"] = json.loads(options["DestinationConfig"])
    shape = boto3.client("lambda", **ACCESS).meta.service_model.operation_model("CreateEventSourceMapping").input_shape  # type: ignore[call-overload]
    assert not ParamValidator().validate(options, shape).has_errors()
    assert options["BisectBatchOnFunctionError"] is True
    assert shape.members["FunctionResponseTypes"].member.enum == options["FunctionResponseTypes"]
    assert options["StartingPosition"] in shape.members["StartingPosition"].enum


def _identity(record: Record) -> tuple[str, bytes]:
    return record["kinesis"]["partitionKey"], base64.b64decode(record["kinesis"]["data"])
