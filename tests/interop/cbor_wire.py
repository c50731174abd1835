"""The wire protocol application/x-amz-cbor-1.1, which the Java SDK uses and botocore does not support.

Written only with cbor2 and botocore's signer, as an oracle for our own implementation. Neither
emulator handles binary data in CBOR correctly: kinesis-local answers in CBOR with base64 text
in place of bytes. kinesalite keeps the bytes as `{"type": "Buffer", "data": [...]}` and answers
so, in JSON too, which stock boto3 cannot parse; its CBOR answers are truncated above 16 KiB. So records
that were put by CBOR are read by `read_data`, which converts all three forms to bytes.
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
from tests.interop.streams import REGION, KinesisRecord, Stream
from tests.support.processes import CREDENTIALS

CBOR = "application/x-amz-cbor-1.1"
JSON = "application/x-amz-json-1.1"
SECONDS = 30


def call(emulator: Emulator, operation: str, parameters: dict[str, Any], *, protocol: str = CBOR) -> dict[str, Any]:
    """Return the answer to one signed request.

    Raises:
        urllib.error.HTTPError: the emulator rejected it; the body has the same protocol.
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
    """Return the Kinesis records of the first page of each shard, put by any protocol."""
    return [
        KinesisRecord(shard.shard_id, record["SequenceNumber"], record["PartitionKey"], read_data(record["Data"]))
        for shard in stream.shards()
        for record in _first_page(stream, shard.shard_id)
    ]


def read_data(value: Any) -> bytes:
    """Return the bytes that an emulator's Data stands for."""
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
