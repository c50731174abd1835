"""The Java Kinesis Client Library 3.1.3, run by its MultiLangDaemon, with its leases in a DynamoDB emulator.

It de-aggregates by the rule that the producer must respect: if one user record is outside the shard's range
of hash keys, the whole aggregated record is dropped. It returns neither explicit hash keys nor
whether a user record was aggregated.
"""

import base64
import json
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from tests.interop.consumers.user_records import ReadUserRecord
from tests.interop.emulators import Emulator
from tests.interop.streams import REGION, Stream
from tests.support.installation import INTEROP, Installed
from tests.support.processes import OwnProcess, own_process

NAME = "Java KCL 3.1.3"

# Before its first lease it waits up to 30 s for another worker to appear, by chance.
FIRST_RECORD_SECONDS = 150.0

# Options of a Java process that needs little memory and starts quickly.
SMALL_AND_QUICK = ("-Xmx512m", "-XX:TieredStopAtLevel=1", "-XX:+UseSerialGC", "-Dfile.encoding=UTF-8")


class KinesisClientLibrary:
    """One running worker of the KCL, reading one stream from its beginning."""

    def __init__(self, process: OwnProcess, records: Path, stream: Stream) -> None:
        self.stream = stream
        self._process = process
        self._records = records
        self._returned: set[tuple[str, str, str]] = set()

    def read(self) -> list[ReadUserRecord]:
        """Return every user record put before this call and not returned by an earlier one.

        It puts a stock record into each open shard and waits for it: the KCL keeps a shard's order, and
        reads a shard's children only after its end, so all earlier records have arrived by then.
        """
        barrier = f"barrier-{uuid.uuid4()}"
        shards = self.stream.open_shards()
        self.stream.put_records([(barrier, str(shard.starting_hash_key), b"") for shard in shards])
        expected = {shard.shard_id for shard in shards}
        self._process.wait_until(
            lambda: expected == {shard_id for shard_id, key in self._places() if key == barrier},
            what=f"{barrier} from {sorted(expected)}",
            seconds=FIRST_RECORD_SECONDS,
        )
        rows = self._handed_out()
        new = [row for place, row in rows.items() if place not in self._returned]
        self._returned.update(rows)
        return [_user_record(row) for row in new if not row["partition_key"].startswith("barrier-")]

    def finished_shards(self) -> set[str]:
        """Return the ids of closed shards read to their end."""
        return {row["shard_id"] for row in self._rows() if row.get("event") == "shard ended"}

    def _places(self) -> set[tuple[str, str]]:
        return {(row["shard_id"], row["partition_key"]) for row in self._handed_out().values()}

    def _handed_out(self) -> dict[tuple[str, str, str], dict[str, str]]:
        """Return the records by shard, sequence and sub-sequence number.

        A lease that is taken again starts from the beginning, so these three identify one user record.
        """
        return {
            (row["shard_id"], row["sequence_number"], row["sub_sequence_number"]): row
            for row in self._rows()
            if "event" not in row
        }

    def _rows(self) -> Iterator[dict[str, str]]:
        for path in sorted(self._records.glob("*.jsonl")):
            # The last line may be incomplete.
            whole_lines, _, _ = path.read_text().rpartition("\n")
            yield from (json.loads(line) for line in whole_lines.split("\n") if line)


def _user_record(row: dict[str, str]) -> ReadUserRecord:
    return ReadUserRecord(
        partition_key=row["partition_key"],
        explicit_hash_key=None,
        data=base64.b64decode(row["data"] or ""),
        aggregated=None,
        shard_id=row["shard_id"],
        sequence_number=row["sequence_number"],
    )


def in_a_test(stream: Stream, leases: Emulator) -> dict[str, object]:
    """Return the properties that connect an application to a stream and to its leases, and make it quick."""
    return {
        "streamName": stream.name,
        "applicationName": stream.name,
        "kinesisEndpoint": stream.emulator.endpoint_url,
        "dynamoDBEndpoint": leases.endpoint_url,
        "metricsLevel": "NONE",
        "idleTimeBetweenReadsInMillis": 250,
        "failoverTimeMillis": 2000,
        "shardSyncIntervalMillis": 1000,
        "parentShardPollIntervalMillis": 1000,
    }


def lines_of(properties: Mapping[str, object]) -> str:
    """Return the text of a properties file."""
    return "".join(f"{name} = {value}\n" for name, value in properties.items())


def daemon_command(installed: Installed, properties: Path) -> list[str]:
    """Return the command of a MultiLangDaemon."""
    assert installed.java is not None
    return [
        installed.java,
        *SMALL_AND_QUICK,
        "-cp",
        f"{installed.kcl_jars}/*",
        "software.amazon.kinesis.multilang.MultiLangDaemon",
        "--properties-file",
        str(properties),
    ]


@contextmanager
def running_kcl(
    stream: Stream, *, installed: Installed, leases: Emulator, place: Path
) -> Iterator[KinesisClientLibrary]:
    """Run a worker on `stream` while the context lasts, its files in `place`."""
    records = place / "kcl-records"
    records.mkdir()
    program = place / "record-processor"
    program.write_text(
        f'#!/bin/sh\nexec "{installed.kcl_python}" "{INTEROP / "consumers" / "kcl_record_processor.py"}"\n'
    )
    program.chmod(0o755)
    properties = place / "kcl.properties"
    settings = {
        "executableName": program,
        "AwsCredentialsProvider": "EnvironmentVariableCredentialsProvider",
        "processingLanguage": "python/3.11",
        "initialPositionInStream": "TRIM_HORIZON",
        "regionName": REGION,
        "retrievalMode": "POLLING",
    }
    properties.write_text(lines_of(settings | in_a_test(stream, leases)))
    command = daemon_command(installed, properties)
    environment = {"INTEROP_RECORDS": str(records), "PYTHONUTF8": "1"}
    with own_process("kcl", command, environment=environment, logs=place) as process:
        yield KinesisClientLibrary(process, records, stream)
