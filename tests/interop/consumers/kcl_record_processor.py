"""The record processor the KCL starts once for each shard it leases; run in the KCL's own environment.

Appends each record to `$INTEROP_RECORDS/<process id>.jsonl`, one JSON object per line:
`{shard_id, partition_key, sequence_number, sub_sequence_number, data (base64)}` for a user record,
`{shard_id, event}` for what happens to the shard.
"""

import json
import os
from pathlib import Path
from typing import Any

from amazon_kclpy.kcl import KCLProcess  # type: ignore[import-not-found, unused-ignore]
from amazon_kclpy.v3.processor import RecordProcessorBase  # type: ignore[import-not-found, unused-ignore]


class RecordingProcessor(RecordProcessorBase):  # type: ignore[misc, unused-ignore]
    """Writes every user record to a file before it is checkpointed."""

    def initialize(self, initialize_input: Any) -> None:
        self._shard_id = initialize_input.shard_id
        self._path = Path(os.environ["INTEROP_RECORDS"]) / f"{os.getpid()}.jsonl"
        self._write([{"event": "initialized"}])

    def process_records(self, process_records_input: Any) -> None:
        self._write(
            [
                {
                    "partition_key": record.partition_key,
                    "sequence_number": record.sequence_number,
                    "sub_sequence_number": record.sub_sequence_number,
                    "data": record._data,  # noqa: SLF001 - as it came, in base64
                }
                for record in process_records_input.records
            ]
        )

    def lease_lost(self, lease_lost_input: Any) -> None:
        self._write([{"event": "lease lost"}])

    def shard_ended(self, shard_ended_input: Any) -> None:
        shard_ended_input.checkpointer.checkpoint()
        self._write([{"event": "shard ended"}])

    def shutdown_requested(self, shutdown_requested_input: Any) -> None:
        self._write([{"event": "shutdown requested"}])

    def _write(self, rows: list[dict[str, Any]]) -> None:
        with self._path.open("a") as lines:
            lines.write("".join(json.dumps({"shard_id": self._shard_id, **row}) + "\n" for row in rows))


if __name__ == "__main__":
    KCLProcess(RecordingProcessor()).run()
