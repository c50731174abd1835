"""npm's aws-kinesis-agg: how Lambda functions in JavaScript de-aggregate, run by node.

Known faults, never asserted as right: like the Python package, it returns the first explicit
hash key of the table for a user record without one. It also rejects a raw record that merely begins like an
aggregated one, where the KCL and the Python package return it unchanged.
"""

import base64
import json
import subprocess
from collections.abc import Sequence

from tests.interop.consumers.user_records import ReadUserRecord
from tests.interop.streams import KinesisRecord
from tests.support.installation import INTEROP, Installed

NAME = "npm aws-kinesis-agg 4.2.8"
SECONDS = 60


def deaggregate(installed: Installed, records: Sequence[KinesisRecord]) -> list[ReadUserRecord]:
    """Return the user records of `records`, in their order.

    Raises:
        ValueError: the package rejected a record.
    """
    # Escaped to ASCII, because node's readline treats U+2028 as the end of a line.
    lines = [
        json.dumps(
            {
                "partitionKey": record.partition_key,
                "sequenceNumber": record.sequence_number,
                "data": base64.b64encode(record.data).decode(),
            }
        )
        for record in records
    ]
    finished = subprocess.run(
        [installed.node.executable, str(INTEROP / "npm" / "deaggregate.cjs")],
        input="\n".join(lines).encode(),
        env={"NODE_PATH": str(installed.node_modules)},
        capture_output=True,
        check=False,
        timeout=SECONDS,
    )
    assert finished.returncode == 0, finished.stderr.decode(errors="replace")
    answers = [json.loads(line) for line in finished.stdout.decode().split("\n") if line]
    return [
        user_record
        for record, answer in zip(records, answers, strict=True)
        for user_record in _user_records(record, answer)
    ]


def _user_records(record: KinesisRecord, answer: object) -> list[ReadUserRecord]:
    if not isinstance(answer, list):
        message = f"{NAME} refused a record of {len(record.data)} bytes: {answer}"
        raise ValueError(message)  # noqa: TRY004 - the answer is a value of the program, not a wrong type
    return [
        ReadUserRecord(
            partition_key=user_record["partitionKey"],
            explicit_hash_key=user_record["explicitHashKey"],
            data=base64.b64decode(user_record["data"]),
            aggregated=user_record["aggregated"],
            shard_id=record.shard_id,
            sequence_number=record.sequence_number,
        )
        for user_record in answer
    ]
