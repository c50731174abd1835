"""Count the store calls of calm and busy fleets in virtual time, and print the cost table of the how-to page.

python -m benchmarks.coordination_cost                  4 to 10,000 workers, a few minutes
python -m benchmarks.coordination_cost 4 20 100         only these

The workers run the library's own syncs, with the library's own S3 store on a bucket in memory that counts requests. The
same run counts what DynamoDB would charge for the same objects, and the commands for Redis or a folder. A calm fleet
uses 40 % of each shard; each worker's load rises and falls by a fifth. In a busy fleet every worker wants more than the
limit. The first minute does not count.
"""

import argparse
import functools
import heapq
import itertools
import math
import random
import sys
from collections import Counter
from collections.abc import Mapping
from email.utils import formatdate
from typing import Any, Final, NamedTuple
from unittest import mock

import anyio
from botocore.exceptions import ClientError

from kpl_core.coordination import lease_sync
from kpl_core.coordination.demand import Usage
from kpl_core.coordination.lease_sync import LeaseSync
from kpl_core.coordination.leaseholder import HolderRules, Leaseholder
from kpl_core.coordination.store import Listing, Reading, Written
from kpl_core.coordination.store_objects import WorkerReport, decode
from kpl_core.coordination.stores.s3 import S3Store

__all__ = ["SIZES", "Cost", "measured", "row"]

SIZES: Final = (4, 20, 100, 1_000, 10_000)
INTERVAL: Final = 5.0
WARM_UP_SECONDS: Final = 60.0
# For large fleets twice the longest time between two reports.
LARGE: Final = 5_000
LARGE_CALM_SECONDS: Final = 120.0
LARGE_BUSY_SECONDS: Final = 30.0
SECONDS: Final = 300.0
HOURS_OF_A_MONTH: Final = 730.0
SHARDS: Final = ("orders/shardId-000000000000", "orders/shardId-000000000001")
LIMIT: Final = (1_000.0, 1_048_576.0)
CALM_SHARE: Final = 0.4
# List prices of us-east-1, November 2025, dollars for a million.
S3_WRITE, S3_READ = 5.0, 0.4
DYNAMODB_WRITE, DYNAMODB_READ = 0.625, 0.125
# The attributes of an item beside its body: group, name, version, expiry.
ITEM_BYTES: Final = 150
_epoch: Final = 1_800_000_000.0
_MISSING: Final = "NoSuchKey"
_CHANGED: Final = "PreconditionFailed"


class Bucket:
    """The calls of `S3StoreClient` on objects in memory. It counts the requests."""

    def __init__(self) -> None:
        self.now = 0.0
        self.counts: Counter[str] = Counter()
        self._objects: dict[str, tuple[bytes, str]] = {}
        self._etags = itertools.count()

    def _answer(self, **fields: object) -> dict[str, Any]:
        return {"ResponseMetadata": {"HTTPHeaders": {"date": _date(int(_epoch + self.now))}}, **fields}

    def _refused(self, code: str) -> ClientError:
        answer: Any = self._answer(Error={"Code": code, "Message": ""})
        return ClientError(answer, "S3")

    async def get_object(self, *, Bucket: str, Key: str) -> Mapping[str, Any]:  # noqa: ARG002, N803 - S3's names
        """Return an object."""
        self.counts["gets"] += 1
        if Key not in self._objects:
            raise self._refused(_MISSING)
        body, etag = self._objects[Key]
        return self._answer(Body=_Body(body), ETag=etag)

    async def put_object(self, *, Key: str, Body: bytes, **options: str) -> Mapping[str, Any]:  # noqa: N803
        """Write an object, on the condition in `options`."""
        self.counts["puts"] += 1
        known = self._objects.get(Key)
        if ("IfNoneMatch" in options and known is not None) or (
            "IfMatch" in options and (known is None or known[1] != options["IfMatch"])
        ):
            raise self._refused(_CHANGED)
        etag = f'"{next(self._etags)}"'
        self._objects[Key] = (Body, etag)
        return self._answer(ETag=etag)

    async def delete_object(self, *, Bucket: str, Key: str) -> Mapping[str, Any]:  # noqa: ARG002, N803
        """Delete an object, free of charge."""
        self._objects.pop(Key, None)
        return self._answer()

    async def list_objects_v2(self, *, Bucket: str, Prefix: str, ContinuationToken: str = "") -> Mapping[str, Any]:  # noqa: ARG002, N803
        """Return a page of 1,000 keys."""
        self.counts["lists"] += 1
        first = int(ContinuationToken or 0)
        keys = [key for key in self._objects if key.startswith(Prefix)]
        page = [{"Key": key, "ETag": self._objects[key][1]} for key in keys[first : first + 1_000]]
        more = {"IsTruncated": True, "NextContinuationToken": str(first + 1_000)} if first + 1_000 < len(keys) else {}
        return self._answer(Contents=page, **more)


class _Body:
    def __init__(self, body: bytes) -> None:
        self._body = body

    async def read(self) -> bytes:
        """Return the body."""
        return self._body


@functools.lru_cache(maxsize=4)
def _date(second: int) -> str:
    return formatdate(second, usegmt=True)


class CountedStore(S3Store):
    """One worker's S3 store; counts what the same call would use in DynamoDB and Redis."""

    def __init__(self, bucket: Bucket) -> None:
        client: Any = bucket
        super().__init__(client, "bucket", "prefix/")
        self._counts = bucket.counts

    def _count(self, *, read_bytes: int = -1, written_bytes: int = -1) -> None:
        self._counts["commands"] += 1
        if read_bytes >= 0:
            self._counts["read units"] += max(1, math.ceil((read_bytes + ITEM_BYTES) / 4_096))
        if written_bytes >= 0:
            self._counts["write units"] += math.ceil((written_bytes + ITEM_BYTES) / 1_024)

    async def read(self, name: str) -> Reading:
        """Return one object."""
        reading = await super().read(name)
        self._count(read_bytes=len(reading.body or b""))
        return reading

    async def write(self, name: str, body: bytes, *, expected: str | None = None) -> Written:
        """Write an object if it has the expected version."""
        self._count(written_bytes=len(body))
        return await super().write(name, body, expected=expected)

    async def read_all(self, prefix: str) -> Listing:
        """Return all objects whose names begin with `prefix`."""
        before = self._counts["commands"], self._counts["read units"]
        listing = await super().read_all(prefix)
        # One Query instead of the reads above.
        self._counts["commands"], self._counts["read units"] = before
        self._count(read_bytes=sum(map(len, listing.bodies.values())) + ITEM_BYTES * len(listing.bodies))
        return listing

    async def delete(self, name: str) -> None:
        """Remove an object; DynamoDB charges a write of its size, which is small."""
        self._count(written_bytes=1_024)
        await super().delete(name)


_decode_cached: Any = functools.lru_cache(maxsize=512)(decode)


def _decode_once(body: bytes, kind: type[Any]) -> Any:  # noqa: ANN401 - as `decode`
    """Decode the heads and parts of summaries once for all workers, to save the time of the benchmark."""
    return decode(body, kind) if kind is WorkerReport else _decode_cached(body, kind)


class _Worker:
    def __init__(self, index: int, bucket: Bucket, *, workers: int, is_busy: bool, chance: random.Random) -> None:
        self._bucket = bucket
        self._chance = chance
        self._per_second = 400.0 if is_busy else CALM_SHARE * LIMIT[0] / workers
        # A calm worker's load rises and falls by a fifth within some minutes.
        self._swing = 0.0 if is_busy else 0.2
        self._period, self._phase = chance.uniform(120, 600), chance.uniform(0, 6)
        self._began_at = chance.uniform(0, 2.0)
        self.holder = Leaseholder(
            HolderRules(worker_id=f"worker-{index:05d}", interval_seconds=INTERVAL, max_workers=workers)
        )
        self._sync = LeaseSync(CountedStore(bucket), self.holder, may_compute=True, on_problem=_fail)
        self.usual = INTERVAL
        self.next_at = self._began_at

    def _offered(self, now: float) -> float:
        angle = 2 * math.pi / self._period
        swing = self._swing / angle * (math.cos(self._phase) - math.cos(self._phase + now * angle))
        return self._per_second * (now + swing)

    def clock(self) -> float:
        return self._bucket.now

    def wall_clock(self) -> float:
        return _epoch + self._bucket.now

    async def turn(self) -> None:
        now = self._bucket.now
        offered = self._offered(now - self._began_at)
        self.holder.measure(dict.fromkeys(SHARDS, Usage(LIMIT, (offered, offered * 1_000))), now)
        if self.holder.sync_due(now, usual_seconds=self.usual):
            self.usual = INTERVAL * self._chance.uniform(0.9, 1.1)
            await self._sync.sync(self.clock, self.wall_clock)
        self.next_at = max(now + 0.01, self.holder.next_sync_at(usual_seconds=self.usual))


def _fail(reason: str, sentence: str) -> None:
    raise AssertionError(reason, sentence)


class Cost(NamedTuple):
    """Calls of the whole fleet a second, and dollars a month."""

    gets: float
    puts: float
    lists: float
    commands: float
    s3: float
    dynamodb: float


async def _count(workers: int, *, is_busy: bool, seconds: float) -> Counter[str]:
    bucket, chance = Bucket(), random.Random(1)
    fleet = [_Worker(index, bucket, workers=workers, is_busy=is_busy, chance=chance) for index in range(workers)]
    queue = [(each.next_at, index) for index, each in enumerate(fleet)]
    heapq.heapify(queue)
    is_counting = False
    while queue[0][0] < WARM_UP_SECONDS + seconds:
        at, index = heapq.heappop(queue)
        bucket.now = max(bucket.now, at)
        if not is_counting and at >= WARM_UP_SECONDS:
            is_counting = True
            bucket.counts.clear()
        await fleet[index].turn()
        heapq.heappush(queue, (fleet[index].next_at, index))
    return bucket.counts


@functools.cache
def measured(workers: int, *, is_busy: bool) -> Cost:
    """Run a fleet for some minutes."""
    seconds = SECONDS
    if workers >= LARGE:
        seconds = LARGE_BUSY_SECONDS if is_busy else LARGE_CALM_SECONDS

    async def run() -> Counter[str]:
        return await _count(workers, is_busy=is_busy, seconds=seconds)

    with mock.patch.object(lease_sync, "decode", _decode_once):
        counts = anyio.run(run)
    month = HOURS_OF_A_MONTH * 3_600 / seconds / 1e6
    s3 = (counts["puts"] + counts["lists"]) * S3_WRITE + counts["gets"] * S3_READ
    dynamodb = counts["write units"] * DYNAMODB_WRITE + counts["read units"] * DYNAMODB_READ
    gets, puts, lists, commands = (counts[name] / seconds for name in ("gets", "puts", "lists", "commands"))
    return Cost(gets, puts, lists, commands, s3 * month, dynamodb * month)


def row(workers: int) -> str:
    """Return the row of the table for a fleet."""
    calm, busy = measured(workers, is_busy=False), measured(workers, is_busy=True)
    calls = f"{calm.gets:,.1f} | {calm.puts:,.1f} | {calm.lists:,.1f} | {calm.commands:,.1f}"
    calm_dollars, busy_dollars = (f"{each.s3:,.0f} | {each.dynamodb:,.0f}" for each in (calm, busy))
    return f"| {workers:,} | {calls} | {calm_dollars} | {busy_dollars} |"


def main() -> int:
    parser = argparse.ArgumentParser("coordination_cost", description=__doc__)
    parser.add_argument("workers", nargs="*", type=int, default=SIZES)
    print("| workers | calm: GET/s | PUT/s | LIST/s | commands/s | calm: S3 $ | DynamoDB $ | busy: S3 $ | DynamoDB $ |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- | --- |")
    for workers in parser.parse_args().workers:
        print(row(workers), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
