"""What log tests read back: the log records in a stream, taken out of their aggregates."""

import json
from typing import Any

from kpl_core import UserRecord, decode
from kpl_core.testing import FakeKinesis


def user_records(kinesis: FakeKinesis, stream: str = "logs") -> list[UserRecord]:
    found: list[UserRecord] = []
    for stored in kinesis.records(stream):
        inside = decode(stored.data)
        found += [UserRecord(stored.partition_key, stored.data)] if inside is None else inside
    return found


def log_records(kinesis: FakeKinesis, stream: str = "logs") -> list[dict[str, Any]]:
    return [json.loads(record.data) for record in user_records(kinesis, stream)]
