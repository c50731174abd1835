"""Store the orders of a stream in SQLite: the record processor of an application on the Kinesis Client Library (KCL).

The KCL's MultiLangDaemon, a Java process, reads the stream and de-aggregates its records. It starts this program once
for each shard that it leases, and sends it the user records over stdin. So this program needs only `amazon_kclpy`.
docs/howto/kcl.md says how to start it. `ORDERS_DATABASE` is the path of the database.
"""

import json
import logging
import os
import signal
import sqlite3
import sys

from amazon_kclpy import messages  # type: ignore[import-not-found, unused-ignore]
from amazon_kclpy.kcl import Checkpointer, CheckpointError, KCLProcess  # type: ignore[import-not-found, unused-ignore]
from amazon_kclpy.v3.processor import RecordProcessorBase  # type: ignore[import-not-found, unused-ignore]

RECORDS_PER_CHECKPOINT = 100
TABLES = """
CREATE TABLE IF NOT EXISTS orders (
    id TEXT PRIMARY KEY, customer TEXT, data BLOB, shard_id TEXT, number TEXT, sub INTEGER
);
CREATE TABLE IF NOT EXISTS rejected (
    data BLOB, shard_id TEXT, number TEXT, sub INTEGER, PRIMARY KEY (shard_id, number, sub)
);
"""
log = logging.getLogger("orders")


class OrderProcessor(RecordProcessorBase):  # type: ignore[misc, unused-ignore]
    """Stores each order once, in the order of its shard, and checkpoints what it has stored."""

    def initialize(self, initialize_input: messages.InitializeInput) -> None:
        """Open the database. The records after the checkpoint, or those of a new shard, come next."""
        self._shard_id = initialize_input.shard_id
        # One process for each shard writes to the same file, so it may have to wait for another one.
        self._database = sqlite3.connect(os.environ.get("ORDERS_DATABASE", "orders.sqlite"), timeout=30)
        self._database.executescript(TABLES)
        log.info(
            "shard %s starts after %s/%s",
            self._shard_id,
            initialize_input.sequence_number,
            initialize_input.sub_sequence_number,
        )

    def process_records(self, process_records_input: messages.ProcessRecordsInput) -> None:
        """Store the records, 100 in a transaction, and checkpoint after each. End this process if that fails."""
        records = process_records_input.records
        try:
            for first in range(0, len(records), RECORDS_PER_CHECKPOINT):
                part = records[first : first + RECORDS_PER_CHECKPOINT]
                with self._database:  # one transaction
                    for record in part:
                        self._store(record)
                _checkpoint(process_records_input.checkpointer, part[-1].sequence_number, part[-1].sub_sequence_number)
        except Exception:
            # KCLProcess would log the exception, and the KCL would go on with the next records.
            log.exception("shard %s: a record could not be stored", self._shard_id)
            sys.exit(1)

    def lease_lost(self, lease_lost_input: messages.LeaseLostInput) -> None:
        """Do not checkpoint: another worker has the lease now."""

    def shard_ended(self, shard_ended_input: messages.ShardEndedInput) -> None:
        """Checkpoint the end of the shard. Without it, the KCL never starts with the shard's children."""
        shard_ended_input.checkpointer.checkpoint()

    def shutdown_requested(self, shutdown_requested_input: messages.ShutdownRequestedInput) -> None:
        """Checkpoint what `process_records` has stored, before this worker gives its leases back."""
        _checkpoint(shutdown_requested_input.checkpointer)

    def _store(self, record: messages.Record) -> None:
        data = record.binary_data
        place = (self._shard_id, record.sequence_number, record.sub_sequence_number)
        order_id = _id_of(data)
        if order_id is None:
            # It would fail each time it is read, and block the shard.
            self._database.execute("INSERT OR IGNORE INTO rejected VALUES (?, ?, ?, ?)", (data, *place))
            return
        # The same id: the producer sent the order twice, or this is read again after the last checkpoint.
        self._database.execute(
            "INSERT INTO orders VALUES (?, ?, ?, ?, ?, ?) ON CONFLICT (id) DO NOTHING",
            (order_id, record.partition_key, data, *place),
        )


def _id_of(data: bytes) -> str | None:
    """Return the id of an order; None if the data is not an order, or its id is not a text that can be stored."""
    try:
        order_id = str(json.loads(data)["id"])
        order_id.encode()
    except (ValueError, TypeError, KeyError, RecursionError):
        return None
    return order_id


def _checkpoint(
    checkpointer: Checkpointer, sequence_number: str | None = None, sub_sequence_number: int | None = None
) -> None:
    """Checkpoint at one user record, which may be inside an aggregated record; by default at the last one received.

    Raises:
        CheckpointError: the KCL refused, for another reason than below.
    """
    try:
        checkpointer.checkpoint(sequence_number, sub_sequence_number)
    except CheckpointError as error:
        # Throttled: the next checkpoint covers these records. Shut down: the new owner of the lease reads them again.
        if error.value not in {"ThrottlingException", "ShutdownException"}:
            raise
        log.warning("no checkpoint: %s", error.value)


if __name__ == "__main__":
    # A supervisor or Ctrl-C may signal the whole group. The daemon needs this process for the last checkpoint, and ends
    # it by closing stdin.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
    # stdout is the connection to the daemon. It copies stderr to its own log.
    logging.basicConfig(level=logging.INFO, stream=sys.stderr)
    KCLProcess(OrderProcessor()).run()
