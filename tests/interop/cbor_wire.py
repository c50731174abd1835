"""The wire protocol application/x-amz-cbor-1.1, which the Java SDK speaks and botocore does not.

Written with cbor2 and botocore's signer alone, as an oracle for whoever speaks it here. Neither
emulator is right about binary data that came by CBOR: kinesis-local answers in CBOR with base64 text
in place of bytes, and kinesalite keeps the bytes as `{"type": "Buffer", "data": [...]}` and answers
so, in JSON too, where stock boto3 chokes on it; its CBOR answers end early above 16 KiB. So what was
put by CBOR is read by `read_data`, which takes all three forms for the bytes they mean.
"""

import base64
import json
import urllib.request
from typing import Any

import cbor2
from botocore.auth import SigV4Auth
from botocore.awsrequest import AWSRequest
from botocore.credentials import Credentials

from tests.interop.emulators import Emulator
from tests.interop.processes import CREDENTIALS
from tests.interop.streams import REGION, KinesisRecord, Stream

CBOR = "application/x-amz-cbor-1.1"
JSON = "application/x-amz-json-1.1"
SECONDS = 30


def call(emulator: Emulator, operation: str, parameters: dict[str, Any], *, protocol: str = CBOR) -> dict[str, Any]:
    """Return the answer to one signed request.

    Raises:
        urllib.error.HTTPError: the emulator refused it; the body is of the same protocol.
    """
    body = cbor2.dumps(parameters) if protocol == CBOR else json.dumps(parameters).encode()
    headers = {"Content-Type": protocol, "X-Amz-Target": f"Kinesis_20131202.{operation}"}
    url = f"{emulator.endpoint_url}/"
    unsigned = AWSRequest(method="POST", url=url, data=body, headers=headers)
    credentials = Credentials(CREDENTIALS["AWS_ACCESS_KEY_ID"], CREDENTIALS["AWS_SECRET_ACCESS_KEY"])
    SigV4Auth(credentials, "kinesis", REGION).add_auth(unsigned)
    signed = urllib.request.Request(url, body, dict(unsigned.headers.items()), method="POST")  # noqa: S310
    with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(signed, timeout=SECONDS) as answer:
        assert answer.headers["Content-Type"] == protocol
        content = answer.read()
    decoded: dict[str, Any] = cbor2.loads(content) if protocol == CBOR else json.loads(content)
    return decoded


def read(stream: Stream) -> list[KinesisRecord]:
    """Return the Kinesis records of the first page of each shard, of whatever protocol they were put by."""
    return [
        KinesisRecord(shard.shard_id, record["SequenceNumber"], record["PartitionKey"], read_data(record["Data"]))
        for shard in stream.shards()
        for record in _first_page(stream, shard.shard_id)
    ]


def read_data(value: Any) -> bytes:
    """Return the bytes an emulator means by what it answered as Data."""
    if isinstance(value, bytes):
        return value
    if isinstance(value, str):
        return base64.b64decode(value, validate=True)
    assert value["type"] == "Buffer"
    return bytes(value["data"])


def _first_page(stream: Stream, shard_id: str) -> list[dict[str, Any]]:
    start = {"StreamName": stream.name, "ShardId": shard_id, "ShardIteratorType": "TRIM_HORIZON"}
    iterator = call(stream.emulator, "GetShardIterator", start, protocol=JSON)["ShardIterator"]
    page: list[dict[str, Any]] = call(stream.emulator, "GetRecords", {"ShardIterator": iterator}, protocol=JSON)[
        "Records"
    ]
    return page
