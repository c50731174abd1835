"""Many processes that share a read and a write rate, through objects in S3.

    DistributedRateWorker(session, bucket, prefix, aggregate_max_read_rate=10_000, aggregate_max_write_rate=5_000)
    client = session.client("dynamodb")     # shares the rates with all workers on the same bucket and prefix

The workers divide the rates by leases, as producers do, and need no aggregator. With `policy="proportional"`
arithmetic, S3 objects and defaults are those of AWS's example ("Distributed Coordination", AWS Database Blog), so its
workers can follow this aggregator, and these workers its aggregator. `kpl_core.coordination.proportional` describes
the known weaknesses of that arithmetic. We differ in two points: a summary that is older than three intervals counts
as missing, and the units of refused calls count as consumed.
"""

import logging
import random
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final
from uuid import uuid4

import msgspec
from botocore.exceptions import BotoCoreError, ClientError

from kpl_core.coordination import CoordinationStore
from kpl_core.coordination.demand import Usage
from kpl_core.coordination.proportional import (
    WHOLE,
    Consumption,
    ConsumptionSummary,
    ScaledLimits,
    as_json,
    summed,
)
from kpl_core.coordination.stores.s3 import PARALLEL_READS, S3Store
from kpl_core.coordination.worker import CoordinationWorker
from kpl_core.options.coordination_options import SHARED_BURST_SECONDS, CoordinationOptions, CoordinationPolicy
from kpl_integrations.dynamodb_limits.leased_rate import LeaseThread, ThreadedS3Client, leased_worker
from kpl_integrations.dynamodb_limits.repetition import RepeatingTask, RepeatingThread, Repetition
from kpl_integrations.dynamodb_limits.session_limiter import SessionLimiter

_logger = logging.getLogger(__name__)
_READ_FAILURES: Final = (BotoCoreError, ClientError, OSError)
# An older summary counts as missing.
STALE_INTERVALS: Final = 3.0
_MISSING: Final = frozenset({"NoSuchKey", "404"})


class _Aggregation:
    """Common to both aggregators: options, and decoding one worker's object."""

    def __init__(self, *, staleness_cutoff: float, interval: float, output_key: str) -> None:
        self._staleness = staleness_cutoff
        self._interval = interval
        self._output_key = output_key

    def _make_repetition(self, place: str) -> Repetition:
        return Repetition(
            name="kpl-rate-aggregator",
            pause=lambda: self._interval,
            pauses_first=False,
            on_failure=lambda error: _logger.warning("cannot write the summary at %s: %s; will retry", place, error),
        )

    def _is_report(self, key: str) -> bool:
        return key.endswith(".json") and not key.endswith(self._output_key)

    def _summed(self, reports: list[Consumption | None]) -> ConsumptionSummary:
        readable = [each for each in reports if each is not None]
        return summed(readable, at=time.time(), staleness_seconds=self._staleness)


class DistributedRateAggregator(_Aggregation, RepeatingThread):
    """Writes the summary from a background thread. One process is enough; several do no harm.

    Args:
        session: a boto3 session.
        bucket: the bucket with the workers' objects.
        prefix: the prefix of their keys; a / is appended if it is missing.
        staleness_cutoff: age in seconds from which a worker's object is ignored.
        interval: seconds between two summaries.
        output_key: the summary's name below the prefix.
        autostart: start the thread now.
    """

    def __init__(
        self,
        session: Any,  # noqa: ANN401 - boto3 brings no types of its own
        bucket: str,
        prefix: str,
        staleness_cutoff: float = 15,
        interval: float = 5,
        output_key: str = "summary.json",
        *,
        autostart: bool = True,
    ) -> None:
        _Aggregation.__init__(self, staleness_cutoff=staleness_cutoff, interval=interval, output_key=output_key)
        RepeatingThread.__init__(self, self.aggregate_once, self._make_repetition(f"s3://{bucket}/{prefix}"))
        self._client = session.client("s3")
        self._bucket = bucket
        self._prefix = _with_slash(prefix)
        if autostart:
            self.start()

    def aggregate_once(self, max_workers: int = PARALLEL_READS) -> ConsumptionSummary:
        """Read all workers' objects, `max_workers` at a time, write the summary and return it.

        Raises:
            BotoCoreError, ClientError: the bucket cannot be listed or written.
        """
        pages = self._client.get_paginator("list_objects_v2").paginate(Bucket=self._bucket, Prefix=self._prefix)
        keys = [each["Key"] for page in pages for each in page.get("Contents", ()) if self._is_report(each["Key"])]
        with ThreadPoolExecutor(max_workers) as readers:
            summary = self._summed(list(readers.map(self._read, keys)))
        self._client.put_object(Bucket=self._bucket, Key=self._prefix + self._output_key, Body=as_json(summary))
        return summary

    def _read(self, key: str) -> Consumption | None:
        try:
            body = self._client.get_object(Bucket=self._bucket, Key=key)["Body"].read()
        except _READ_FAILURES as error:
            _logger.debug("cannot read %s: %s", key, error)
            return None
        return _decoded(key, body)


class AsyncDistributedRateAggregator(_Aggregation, RepeatingTask):
    """A DistributedRateAggregator on an event loop.

    `client` is an aiobotocore client for S3; `autostart` needs a running loop.
    """

    def __init__(
        self,
        client: Any,  # noqa: ANN401 - as above
        bucket: str,
        prefix: str,
        staleness_cutoff: float = 15,
        interval: float = 5,
        output_key: str = "summary.json",
        *,
        autostart: bool = True,
    ) -> None:
        _Aggregation.__init__(self, staleness_cutoff=staleness_cutoff, interval=interval, output_key=output_key)
        RepeatingTask.__init__(self, self.aggregate_once, self._make_repetition(f"s3://{bucket}/{prefix}"))
        self._store = S3Store(client, bucket, _with_slash(prefix))
        if autostart:
            self.start()

    async def aggregate_once(self) -> ConsumptionSummary:
        """Read all workers' objects, 16 at a time, write the summary and return it.

        Raises:
            StoreFailed: the bucket cannot be listed or written.
        """
        listing = await self._store.read_all("")
        summary = self._summed([_decoded(key, body) for key, body in listing.bodies.items() if self._is_report(key)])
        await self._store.write(self._output_key, as_json(summary))
        return summary


class _ScaledLimiter:
    """Common to both workers: a session limiter that follows the summary."""

    def __init__(  # noqa: PLR0913 - AWS's own options
        self,
        *,
        aggregate_max_read_rate: float = 100_000,
        aggregate_max_write_rate: float = 50_000,
        worker_max_read_rate: float = 1_500,
        worker_max_write_rate: float = 500,
        worker_initial_read_rate: float | None = None,
        worker_initial_write_rate: float | None = None,
        sync_interval: float = 5,
        worker_id: str | None = None,
        summary_key: str = "summary.json",
        burst_seconds: float | None = None,
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
        chance: Callable[[], float] = random.random,
        policy: CoordinationPolicy = "leases",
        max_workers: int = 64,
        store: CoordinationStore | None = None,
    ) -> None:
        self.worker_id = worker_id or str(uuid4())
        self._coordination = CoordinationOptions(
            # The store is opened here, and the URL is shown in messages only.
            store="s3://",
            policy=policy,
            max_workers=max_workers,
            interval_seconds=sync_interval,
            worker_id=self.worker_id,
        )
        self._lease_store = store
        self._object_name = f"{'report' if policy == 'leases' else 'worker'}-{self.worker_id}.json"
        self._aggregate = (float(aggregate_max_read_rate), float(aggregate_max_write_rate))
        self._sync_interval = sync_interval
        self._summary_key = summary_key
        self._clock = clock
        self._wall_clock = wall_clock
        self._chance = chance
        worker_max = (float(worker_max_read_rate), float(worker_max_write_rate))
        derived = ScaledLimits(self.worker_id, interval_seconds=sync_interval, worker_max=worker_max).share(
            WHOLE, self._aggregate
        )
        initial = (
            derived[0] if worker_initial_read_rate is None else float(worker_initial_read_rate),
            derived[1] if worker_initial_write_rate is None else float(worker_initial_write_rate),
        )
        self._limits = ScaledLimits(
            self.worker_id, interval_seconds=sync_interval, worker_max=worker_max, initial=initial
        )
        self._worker_max = worker_max
        if burst_seconds is None:
            burst_seconds = SHARED_BURST_SECONDS if policy == "leases" else 1.0
        self.limiter = SessionLimiter(
            read_rate=initial[0], write_rate=initial[1], burst_seconds=burst_seconds, clock=clock
        )

    def _leased(self, store: CoordinationStore) -> CoordinationWorker:
        return leased_worker(
            self.limiter,
            self._lease_store or store,
            self._coordination,
            total=self._aggregate,
            worker_max=self._worker_max,
            clock=self._clock,
            wall_clock=self._wall_clock,
            chance=self._chance,
        )

    def _report(self) -> bytes:
        now = self._clock()
        units, waiting = self.limiter.demand()
        self._limits.measure({WHOLE: Usage(self._aggregate, units, waiting)}, now)
        return as_json(self._limits.consumption(now, at=self._wall_clock()))

    def _apply_summary(self, body: bytes) -> None:
        try:
            summary = msgspec.json.decode(body, type=ConsumptionSummary, strict=False)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            _logger.warning("cannot parse %s (%s); keeping the current limits", self._summary_key, error)
            return
        if abs(self._wall_clock() - summary.timestamp) > STALE_INTERVALS * self._sync_interval:
            # Its aggregator has stopped. Applied again and again, it would change the limits without end.
            return
        self._limits.apply(summary, self._clock(), at=self._wall_clock())
        self.limiter.set_rates(*self._limits.share(WHOLE, self._aggregate))

    def _make_repetition(self, place: str) -> Repetition:
        return Repetition(
            name="kpl-rate-worker",
            pause=lambda: self._sync_interval * (0.9 + 0.2 * self._chance()),
            pauses_first=True,
            on_failure=lambda error: _logger.warning("cannot sync at %s: %s; keeping the current limits", place, error),
        )


class DistributedRateWorker(_ScaledLimiter, RepeatingThread):
    """Limits the DynamoDB clients of a boto3 session, from a background thread.

    Args:
        session: a boto3 session; clients that it creates from now on are limited.
        bucket: the bucket that the workers share.
        prefix: the prefix of their keys; a / is appended if it is missing.
        autostart: start the thread now.
        options: aggregate_max_read_rate (100,000), aggregate_max_write_rate (50,000),
            worker_max_read_rate (1,500), worker_max_write_rate (500), worker_initial_read_rate and
            worker_initial_write_rate (None: derived), sync_interval (5), worker_id (None: a UUID),
            summary_key ("summary.json"), burst_seconds (0.1; "proportional": 1), policy ("leases"), and for leases
            max_workers (64, as `CoordinationOptions.max_workers`) and store (None: objects in the bucket).
    """

    def __init__(
        self,
        session: Any,  # noqa: ANN401 - boto3 brings no types of its own
        bucket: str,
        prefix: str,
        *,
        autostart: bool = True,
        **options: Any,  # noqa: ANN401 - those above, checked by their own names
    ) -> None:
        _ScaledLimiter.__init__(self, **options)
        RepeatingThread.__init__(self, self.sync_once, self._make_repetition(f"s3://{bucket}/{prefix}"))
        self._client = session.client("s3")
        self._bucket = bucket
        self._prefix = _with_slash(prefix)
        self._lease_thread: LeaseThread | None = None
        if self._coordination.policy == "leases":
            store = S3Store(ThreadedS3Client(self._client), bucket, self._prefix)
            self._lease_thread = LeaseThread(self._leased(store), self.limiter)
        self.limiter.attach(session)
        if autostart:
            self.start()

    def start(self) -> None:
        """Start the thread if it does not run; works again after `stop`."""
        if self._lease_thread is not None:
            self._lease_thread.start()
        else:
            super().start()

    def stop(self) -> None:
        """End the thread. A worker keeps its limits; with leases, the other workers may use its share from now on."""
        if self._lease_thread is not None:
            self._lease_thread.stop()
        else:
            super().stop()

    def cleanup(self) -> None:
        """Stop, and delete this worker's own object, so that nobody counts it any more.

        Raises:
            BotoCoreError, ClientError: S3 failed.
        """
        self.stop()
        self._client.delete_object(Bucket=self._bucket, Key=self._prefix + self._object_name)

    def sync_once(self) -> None:
        """Write this worker's report, read the summary, and rescale the limits. Policy "proportional" only.

        Raises:
            BotoCoreError, ClientError: S3 failed; the limits stay as they are.
        """
        self._client.put_object(Bucket=self._bucket, Key=self._prefix + self._object_name, Body=self._report())
        try:
            answer = self._client.get_object(Bucket=self._bucket, Key=self._prefix + self._summary_key)
        except ClientError as error:
            if error.response.get("Error", {}).get("Code") not in _MISSING:
                raise
            # No summary has been written yet: keep the current limits.
        else:
            self._apply_summary(answer["Body"].read())


class AsyncDistributedRateWorker(_ScaledLimiter, RepeatingTask):
    """Limits the DynamoDB clients of an aiobotocore session, from a task; `autostart` needs a running loop.

    Args:
        session: an aiobotocore session; clients that it creates from now on are limited.
        client: an aiobotocore client for S3; its owner closes it.
        bucket: the bucket that the workers share.
        prefix: the prefix of their keys; a / is appended if it is missing.
        autostart: start the task now.
        options: those of `DistributedRateWorker`.
    """

    def __init__(
        self,
        session: Any,  # noqa: ANN401
        client: Any,  # noqa: ANN401
        bucket: str,
        prefix: str,
        *,
        autostart: bool = True,
        **options: Any,  # noqa: ANN401
    ) -> None:
        _ScaledLimiter.__init__(self, **options)
        RepeatingTask.__init__(self, self.sync_once, self._make_repetition(f"s3://{bucket}/{prefix}"))
        self._store = S3Store(client, bucket, _with_slash(prefix))
        self._lease_worker = self._leased(self._store) if self._coordination.policy == "leases" else None
        self.limiter.attach(session)
        if autostart:
            self.start()

    async def _run(self) -> None:
        if self._lease_worker is None:
            await super()._run()
            return
        self.limiter.on_waiting = self._lease_worker.units_wait
        await self._lease_worker.run()

    async def stop(self) -> None:
        """Cancel the task. A worker keeps its limits; with leases, the other workers may use its share from now on."""
        await super().stop()
        if self._lease_worker is not None:
            await self._lease_worker.leave()

    async def cleanup(self) -> None:
        """Stop, and delete this worker's own object, so that nobody counts it any more.

        Raises:
            StoreFailed: S3 failed.
        """
        await self.stop()
        await self._store.delete(self._object_name)

    async def sync_once(self) -> None:
        """Write this worker's report, read the summary, and rescale the limits. Policy "proportional" only.

        Raises:
            StoreFailed: S3 failed; the limits stay as they are.
        """
        await self._store.write(self._object_name, self._report())
        summary = (await self._store.read(self._summary_key)).body
        # Without a summary, which may not be written yet, the current limits stay.
        if summary is not None:
            self._apply_summary(summary)


def _with_slash(prefix: str) -> str:
    return prefix if prefix.endswith("/") else f"{prefix}/"


def _decoded(key: str, body: bytes) -> Consumption | None:
    try:
        return msgspec.json.decode(body, type=Consumption, strict=False)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        _logger.debug("%s is not a worker's report: %s", key, error)
        return None
