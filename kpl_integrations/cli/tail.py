"""`kpl tail`: the user records of a stream as they arrive, read from all shards with GetRecords.

A child shard is read only after its parents, so that the records of a partition key stay in order. Aggregated
records are taken apart. The Kinesis Client Library drops a whole aggregated record if one of its user records hashes
outside the shard that it was read from (`AggregatorUtil.deaggregate`), because that user record's own shard returns it
too; so does this reader. Data that looks aggregated and cannot be decoded is shown as it is.

The output of an earlier run says how far that run has read each shard, so `--after` continues there.
"""

import sys
from base64 import b64encode
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple, Self

import anyio
import msgspec
from anyio.abc import TaskGroup
from botocore.exceptions import ClientError
from rich.console import Console
from rich.progress import Progress, TaskID
from rich.text import Text

from kpl_core import UserRecord, decode
from kpl_core.errors import MalformedAggregatedRecord
from kpl_core.paging import PageTokens
from kpl_core.records.hash_key import hash_key_of
from kpl_integrations.cli.connection import Connection
from kpl_integrations.cli.exit_code import CommandFailure, ExitCode, until_signal
from kpl_integrations.cli.options import ProgressWanted
from kpl_integrations.cli.progress import progress
from kpl_integrations.cli.terminal import note, printable, results

# A shard allows five reads a second for all its consumers together; at its end this reader uses two.
PAUSE_SECONDS: Final = 0.5
_RECORDS_PER_READ: Final = 1_000

Start = Literal["LATEST", "TRIM_HORIZON"]


@dataclass
class TailCommand:
    """One run of the command."""

    stream: str
    endpoint_url: str | None
    region: str | None
    from_start: bool
    after: Path | None
    follow: bool
    limit: int | None
    as_json: bool

    def __post_init__(self) -> None:
        self._left = self.limit
        self._console: Console | None = None if self.as_json else results()
        self._bars: Progress | None = None
        self._shown = TaskID(0)
        self._read_records = self._read_bytes = 0

    async def run(self) -> ExitCode:
        """Read until Ctrl-C, the limit, or the end of the stream without --follow; each of them is status 0."""
        ended = await until_signal(self._read)
        is_kept = self.as_json and not sys.stdout.isatty()
        if ended is not ExitCode.DONE and is_kept and self._read_records and not ProgressWanted.is_quiet:
            self._print_how_to_continue()
        return ExitCode.DONE

    def _print_how_to_continue(self) -> None:
        """Print a line of JSON on stderr, as progress is, with the options that read the rest."""
        # Without --from-start, a shard of which nothing was read yet would begin in the middle.
        options = "--from-start --after FILE" if self.from_start else "--after FILE"
        line = {"interrupted": "read", "records": self._read_records, "continue_with": options}
        with suppress(OSError):  # as `note`
            sys.stderr.write(msgspec.json.encode(line).decode() + "\n")

    async def _read(self) -> None:
        earlier = ReadBefore() if self.after is None else ReadBefore.of_output(self.after)
        connection = await Connection.to_stream(self.stream, region=self.region, endpoint_url=self.endpoint_url)
        async with connection.client() as client:
            reader = StreamReader(
                client,
                connection.stream_argument,
                self._take,
                start="TRIM_HORIZON" if self.from_start else "LATEST",
                follow=self.follow,
                earlier=earlier,
            )
            # On a terminal the records themselves show how far it is; in a file or a pipe they do not.
            try:
                with progress(as_json=self.as_json, hidden=sys.stdout.isatty()) as bars:
                    self._bars = bars
                    self._shown = bars.add_task("read", total=self.limit, unit="records", bytes=0)
                    await reader.run(started=lambda: self._note_start(connection))
            finally:
                if reader.dropped_records:
                    note(
                        f"{reader.dropped_records:,} aggregated records were on the wrong shard and dropped, "
                        "as the Kinesis Client Library drops them"
                    )

    def _note_start(self, connection: Connection) -> None:
        """Print that reading has started: an idle stream shows nothing, and a program may wait for this line."""
        if self.follow:
            note(f"reading {self.stream} from {connection.place}; press Ctrl-C to stop")

    def _take(self, records: Sequence["ReadRecord"]) -> bool:
        if self._left is not None:
            records = records[: self._left]
            self._left -= len(records)
        if self._console is None:
            sys.stdout.write("".join(f"{_as_json(record)}\n" for record in records))
        else:
            for record in records:
                self._console.print(_as_text(record), soft_wrap=True)
        sys.stdout.flush()
        self._read_records += len(records)
        self._read_bytes += sum(len(record.data) for record in records)
        if self._bars is not None:
            self._bars.update(self._shown, completed=self._read_records, bytes=self._read_bytes)
        return self._left is None or self._left > 0


class ReadRecord(NamedTuple):
    """A user record with its location. `subsequence` is its index in an aggregated record, otherwise None."""

    shard_id: str
    sequence_number: str
    subsequence: int | None
    partition_key: str
    explicit_hash_key: str | None
    arrived_at: datetime
    data: bytes


def _as_json(record: ReadRecord) -> str:
    """Return one JSON object. Data that is not UTF-8 is in `data_base64` instead of `data`."""
    members: dict[str, Any] = {
        "shard": record.shard_id,
        "sequence_number": record.sequence_number,
        "subsequence": record.subsequence,
        "partition_key": record.partition_key,
        "explicit_hash_key": record.explicit_hash_key,
        "arrival": record.arrived_at.astimezone(UTC).isoformat(timespec="milliseconds"),
    }
    try:
        members["data"] = record.data.decode()
    except UnicodeDecodeError:
        members["data_base64"] = b64encode(record.data).decode()
    return msgspec.json.encode(members).decode()


def _as_text(record: ReadRecord) -> Text:
    """Return arrival (UTC), shard, partition key and data in one line without control characters."""
    try:
        data = Text(printable(record.data.decode()))
    except UnicodeDecodeError:
        data = Text.assemble((f"{len(record.data):,} bytes, base64 ", "dim"), b64encode(record.data).decode())
    return Text.assemble(
        (f"{record.arrived_at.astimezone(UTC):%H:%M:%S.%f}"[:-3], "dim"),
        "  ",
        (f"shard {record.shard_id.removeprefix('shardId-').lstrip('0') or '0'}", "cyan"),
        "  ",
        (printable(record.partition_key), "bold"),
        "  ",
        data,
    )


class _Line(msgspec.Struct):
    """What a line of `--json` says of its place."""

    shard: str
    sequence_number: str
    subsequence: int | None
    arrival: datetime


class _Place(NamedTuple):
    """The last Kinesis record of a shard that was read, and how many of its user records."""

    number: int
    user_records: int


@dataclass(frozen=True)
class ReadBefore:
    """How far an earlier run has read each shard."""

    places: Mapping[str, _Place] = field(default_factory=dict)
    # When its oldest record arrived; None if it has read none.
    since: datetime | None = None

    @classmethod
    def of_output(cls, path: Path) -> Self:
        """Return what a file has that `kpl tail --json` wrote, in one run or in several.

        Raises:
            CommandFailure: it cannot be read, or has another line.
        """
        decoder, number = msgspec.json.Decoder(_Line), 0
        places: dict[str, _Place] = {}
        since: datetime | None = None
        try:
            with path.open("rb") as lines:
                for number, text in enumerate(lines, 1):  # noqa: B007 - used if the line is wrong
                    line = decoder.decode(text)
                    place = _Place(int(line.sequence_number), 1 + (line.subsequence or 0))
                    places[line.shard] = max(place, places.get(line.shard, place))
                    since = line.arrival if since is None else min(since, line.arrival)
        except OSError as error:
            message = f"{path} cannot be read ({error.strerror}); check its path and permissions"
            raise CommandFailure(message, exit_code=ExitCode.BAD_INPUT) from error
        except (msgspec.MsgspecError, ValueError) as error:
            message = f"line {number} of {path} was not written by `kpl tail --json`; remove it, or name another file"
            raise CommandFailure(message, exit_code=ExitCode.BAD_INPUT) from error
        return cls(places, since)

    def unfinished(self, shards: Sequence["ReadableShard"]) -> list["ReadableShard"]:
        """Return the shards without the ancestors of those that the earlier run has read, which it has read before."""
        by_id = {shard.shard_id: shard for shard in shards}
        finished: set[str] = set()
        visited = [by_id[shard_id] for shard_id in self.places if shard_id in by_id]
        while visited:
            parents = set(visited.pop().parent_ids) - finished
            finished |= parents
            visited += [by_id[parent] for parent in parents if parent in by_id]
        return [shard for shard in shards if shard.shard_id not in finished]

    def unread(self, shard_id: str, sequence_number: str, found: list[ReadRecord]) -> list[ReadRecord]:
        """Return the user records of a Kinesis record without those that the earlier run has read."""
        place = self.places.get(shard_id)
        return found[place.user_records :] if place is not None and place.number == int(sequence_number) else found


class ReadableShard(msgspec.Struct, frozen=True):
    """A shard to read; both ends of its hash key range are inclusive."""

    shard_id: str
    parent_ids: tuple[str, ...]
    first_hash_key: int
    last_hash_key: int

    @classmethod
    def of(cls, shard: Mapping[str, Any]) -> Self:
        """Return the shard in a Shard of ListShards, or in a ChildShard of GetRecords."""
        listed = (shard.get("ParentShardId"), shard.get("AdjacentParentShardId"))
        parents = shard.get("ParentShards") or [parent for parent in listed if parent]
        bounds = shard["HashKeyRange"]
        return cls(shard["ShardId"], tuple(parents), int(bounds["StartingHashKey"]), int(bounds["EndingHashKey"]))


class ReadingOrder:
    """Returns each shard once, after all its parents have been read.

    A parent that is not read (its records are gone, or reading began after it) does not delay its children.
    """

    def __init__(self) -> None:
        self._waiting: dict[str, ReadableShard] = {}
        self._started: set[str] = set()
        self._unfinished: set[str] = set()

    def discover(self, shards: Iterable[ReadableShard]) -> list[ReadableShard]:
        """Add shards, known or new; return those to read now."""
        for shard in shards:
            if shard.shard_id not in self._started:
                self._waiting[shard.shard_id] = shard
        ready = [shard for shard in self._waiting.values() if not self._has_unread_parent(shard)]
        for shard in ready:
            del self._waiting[shard.shard_id]
            self._started.add(shard.shard_id)
            self._unfinished.add(shard.shard_id)
        return ready

    def finish(self, shard_id: str, children: Iterable[ReadableShard]) -> list[ReadableShard]:
        """Mark a shard as read to its end; return those to read now."""
        self._unfinished.discard(shard_id)
        return self.discover(children)

    def _has_unread_parent(self, shard: ReadableShard) -> bool:
        return any(parent in self._waiting or parent in self._unfinished for parent in shard.parent_ids)


def user_records(record: Mapping[str, Any], shard: ReadableShard) -> list[ReadRecord] | None:
    """Return the user records in a Record of GetRecords; None if consumers drop it."""
    shard_id, sequence_number = shard.shard_id, record["SequenceNumber"]
    arrived_at = record["ApproximateArrivalTimestamp"]
    try:
        aggregated = decode(record["Data"])
    except MalformedAggregatedRecord:
        aggregated = None
    if aggregated is None:
        return [ReadRecord(shard_id, sequence_number, None, record["PartitionKey"], None, arrived_at, record["Data"])]
    if not all(shard.first_hash_key <= _hash_key(user_record) <= shard.last_hash_key for user_record in aggregated):
        return None
    return [
        ReadRecord(
            shard_id,
            sequence_number,
            index,
            user_record.partition_key,
            user_record.explicit_hash_key,
            arrived_at,
            user_record.data,
        )
        for index, user_record in enumerate(aggregated)
    ]


def _hash_key(record: UserRecord) -> int:
    if record.explicit_hash_key is None:
        return hash_key_of(record.partition_key)
    return int(record.explicit_hash_key)


@dataclass
class StreamReader:
    """Reads all shards until `take` returns False or, with `follow` False, to the end of the stored records.

    `take` receives the user records of each answer and returns whether to continue.
    """

    client: Any  # aiobotocore has no types
    stream_argument: Mapping[str, str]
    take: Callable[[Sequence[ReadRecord]], bool]
    start: Start = field(kw_only=True)
    follow: bool = field(kw_only=True)
    earlier: ReadBefore = field(kw_only=True, default_factory=ReadBefore)
    # Aggregated records found on the wrong shard.
    dropped_records: int = field(init=False, default=0)
    _order: ReadingOrder = field(init=False, default_factory=ReadingOrder)

    async def run(self, started: Callable[[], object] = lambda: None) -> None:
        """Read; call `started` when every record that arrives from then on will be read."""
        shards = self.earlier.unfinished(await self._list_shards())
        iterators: dict[str, str] = {}
        for shard in shards:
            if self.start == "LATEST" or shard.shard_id in self.earlier.places:
                iterators[shard.shard_id] = await self._first_iterator(shard)
        started()
        with raises_first():
            async with anyio.create_task_group() as tasks:
                for shard in self._order.discover(shards):
                    tasks.start_soon(self._read_shard, shard, iterators.get(shard.shard_id), tasks)

    async def _list_shards(self) -> list[ReadableShard]:
        """Return the open shards, and the closed ones too if reading starts at the oldest record."""
        shards: list[ReadableShard] = []
        wanted = "FROM_TRIM_HORIZON" if self._reads_old_records else "AT_LATEST"
        arguments: dict[str, Any] = {**self.stream_argument, "ShardFilter": {"Type": wanted}}
        tokens = PageTokens()
        while True:
            page = await self.client.list_shards(**arguments)
            shards += map(ReadableShard.of, page["Shards"])
            token = page.get("NextToken")
            if not token:
                return shards
            tokens.follow(token)
            arguments = {"NextToken": token}

    @property
    def _reads_old_records(self) -> bool:
        return self.start == "TRIM_HORIZON" or self.earlier.since is not None

    async def _first_iterator(self, shard: ReadableShard) -> str:
        """Return where to begin in a shard that was listed at the start."""
        place, since = self.earlier.places.get(shard.shard_id), self.earlier.since
        if place is not None:
            # Not after it: user records of it may be unread.
            return await self._iterator(shard, "AT_SEQUENCE_NUMBER", StartingSequenceNumber=str(place.number))
        if self.start == "LATEST" and since is not None:
            return await self._iterator(shard, "AT_TIMESTAMP", Timestamp=since)
        return await self._iterator(shard, self.start)

    async def _iterator(self, shard: ReadableShard, position: str, **arguments: Any) -> str:  # noqa: ANN401 - aiobotocore has no types
        answer = await self.client.get_shard_iterator(
            **self.stream_argument, ShardId=shard.shard_id, ShardIteratorType=position, **arguments
        )
        iterator: str = answer["ShardIterator"]
        return iterator

    async def _read_shard(self, shard: ReadableShard, iterator: str | None, tasks: TaskGroup) -> None:
        children: list[ReadableShard] = []
        last: str | None = None
        if iterator is None:
            iterator = await self._iterator(shard, "TRIM_HORIZON")
        while iterator is not None:
            try:
                answer = await self.client.get_records(ShardIterator=iterator, Limit=_RECORDS_PER_READ)
            except ClientError as error:
                iterator = await self._iterator_after(error, shard, last)
                continue
            iterator = answer.get("NextShardIterator")
            children = list(map(ReadableShard.of, answer.get("ChildShards") or ()))
            records = answer["Records"]
            if records:
                last = records[-1]["SequenceNumber"]
            if not self._pass_on(records, shard):
                tasks.cancel_scope.cancel()
            if iterator is not None and not answer.get("MillisBehindLatest"):
                if not self.follow:
                    return
                await anyio.sleep(PAUSE_SECONDS)
        for next_shard in self._order.finish(shard.shard_id, children):
            tasks.start_soon(self._read_shard, next_shard, None, tasks)

    async def _iterator_after(self, error: ClientError, shard: ReadableShard, last: str | None) -> str:
        """Replace an iterator that expired after five minutes, as when the process was suspended."""
        if error.response.get("Error", {}).get("Code") != "ExpiredIteratorException":
            raise error
        if last is None:
            return await self._first_iterator(shard)
        return await self._iterator(shard, "AFTER_SEQUENCE_NUMBER", StartingSequenceNumber=last)

    def _pass_on(self, records: Sequence[Mapping[str, Any]], shard: ReadableShard) -> bool:
        found: list[ReadRecord] = []
        for record in records:
            read = user_records(record, shard)
            if read is None:
                self.dropped_records += 1
            else:
                found += self.earlier.unread(shard.shard_id, record["SequenceNumber"], read)
        return self.take(found) if found else True


@contextmanager
def raises_first() -> Iterator[None]:
    """Raise the first exception of a task group's ExceptionGroup, because a command reports only one failure."""
    try:
        yield
    except ExceptionGroup as group:
        error: Exception = group
        while isinstance(error, ExceptionGroup):
            error = error.exceptions[0]
        raise error from group
