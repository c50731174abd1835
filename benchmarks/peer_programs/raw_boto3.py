"""boto3 alone: put_records with 500 records a call, one call after the other, no retry, no aggregation."""

import boto3
from botocore.config import Config

from benchmarks.trial import REGION, Trial
from benchmarks.workload import STREAM_NAME

_RECORDS_PER_CALL = 500


def main() -> None:
    trial = Trial.from_command_line()
    client = boto3.client(
        "kinesis",
        region_name=REGION,
        endpoint_url=trial.endpoint_url,
        config=Config(retries={"total_max_attempts": 1}),
    )

    def send(records: list[tuple[str, bytes]]) -> int:
        acknowledged = 0
        for start in range(0, len(records), _RECORDS_PER_CALL):
            response = client.put_records(
                StreamName=STREAM_NAME,
                Records=[
                    {"Data": data, "PartitionKey": key} for key, data in records[start : start + _RECORDS_PER_CALL]
                ],
            )
            acknowledged += sum("SequenceNumber" in result for result in response["Records"])
        return acknowledged

    send(trial.warm_up_records())
    records = trial.measured_records()
    with trial.measured():
        acknowledged = send(records)
    trial.finish(acknowledged=acknowledged, distributions=("boto3", "botocore"))


if __name__ == "__main__":
    main()
