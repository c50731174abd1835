"""Many processes that share a read and a write rate, through objects in S3.

    DistributedRateWorker(session, bucket, prefix, aggregate_max_read_rate=10_000, aggregate_max_write_rate=5_000)
    client = session.client("dynamodb")     # shares the rates with all workers on the same bucket and prefix

The workers divide the rates by leases, as producers do, and need no aggregator. With `policy="proportional"`
arithmetic, S3 objects and defaults are those of AWS's example ("Distributed Coordination", AWS Database Blog), so its
workers can follow this aggregator, and these workers its aggregator. `proportional.py` describes the known weaknesses
of that arithmetic. We differ in two points: a summary that is older than three intervals counts
as missing, and the units of refused calls count as consumed.
"""

import logging
import random
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final, Literal
from uuid import uuid4

import msgspec
from botocore.exceptions import BotoCoreError, ClientError

from kpl_core import CoordinationOptions
from kpl_core.coordination import CoordinationStore
from kpl_core.coordination.stores.s3 import S3Store
from kpl_core.coordination.worker import CoordinationWorker
from kpl_core.options.coordination_options import SHARED_BURST_SECONDS
from kpl_core.options.validation import require_choice
from kpl_core.paging import PageTokens
from kpl_integrations.dynamodb_limits.leased_rate import LeaseThread, ThreadedS3Client, leased_worker
from kpl_integrations.dynamodb_limits.proportional import (
    Consumption,
    ConsumptionSummary,
    Rates,
    ScaledRates,
    initial_limit,
    summed,
)
from kpl_integrations.dynamodb_limits.repetition import RepeatingTask, RepeatingThread, Repetition
from kpl_integrations.dynamodb_limits.session_limiter import SessionLimiter

_logger = logging.getLogger(__name__)
_READ_FAILURES: Final = (BotoCoreError, ClientError, OSError)
# An older summary counts as missing.
STALE_INTERVALS: Final = 3.0
# So many workers whose clocks differ are named at once.
_MOST_NAMED: Final = 10
_MISSING: Final = frozenset({"NoSuchKey", "404"})


class _Aggregation:
    """Common to both aggregators: options, and decoding one worker's object."""

    def __init__(self, *, staleness_cutoff: float, interval: float, output_key: str) -> None:
        self._staleness = staleness_cutoff
        self._interval = interval
        self._output_key = output_key
        # The workers whose reports had the time of another clock in the last summary.
        self._differing: frozenset[str] = frozenset()

    def _make_repetition(self, place: str) -> Repetition:
        return Repetition(
            name="kpl-rate-aggregator",
            pause=lambda: self._interval,
            pauses_first=False,
            on_failure=lambda error: _logger.warning("cannot write the summary at %s: %s; will retry", place, error),
        )

    def _is_report(self, key: str, prefix: str) -> bool:
        # Not those of a longer prefix: "job-20worker-1.json" begins with "job-2".
        return key.startswith(f"{prefix}worker-") and key.endswith(".json") and not key.endswith(self._output_key)

    def _summed(self, reports: list[Consumption | None]) -> ConsumptionSummary:
        readable, now = [each for each in reports if each is not None], time.time()
        ages = {each.worker_id: now - each.timestamp for each in readable}
        differing = frozenset(worker for worker, age in ages.items() if abs(age) > self._staleness)
        for worker in sorted(differing - self._differing)[:_MOST_NAMED]:
            _logger.warning(
                "the report of worker %s is %.0f s %s: %s",
                ascii(worker),
                abs(ages[worker]),
                *("old", "it has ended, or its clock is late; it does not count")
                if ages[worker] > 0
                else ("in the future", "its clock differs from this one; set both by NTP"),
            )
        self._differing = differing
        return summed(readable, at=now, staleness_seconds=self._staleness)


class DistributedRateAggregator(_Aggregation, RepeatingThread):
    """Writes the summary from a background thread. One process is enough; several do no harm.

    Args:
        session: a boto3 session.
        bucket: the bucket with the workers' objects.
        prefix: the start of their keys, as it is: with "job-2" a worker's key is "job-2worker-<id>.json".
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
        self._prefix = prefix
        if autostart:
            self.start()

    def aggregate_once(self, max_workers: int = 16) -> ConsumptionSummary:
        """Read all workers' objects, `max_workers` at a time, write the summary and return it.

        Raises:
            BotoCoreError, ClientError, OSError: the bucket cannot be listed or written.
        """
        pages = self._client.get_paginator("list_objects_v2").paginate(Bucket=self._bucket, Prefix=self._prefix)
        tokens = PageTokens()
        keys: list[str] = []
        for page in pages:
            tokens.follow(page.get("NextContinuationToken"))
            keys += [each["Key"] for each in page.get("Contents", ()) if self._is_report(each["Key"], self._prefix)]
        with ThreadPoolExecutor(max_workers) as readers:
            summary = self._summed(list(readers.map(self._read, keys)))
        self._client.put_object(
            Bucket=self._bucket, Key=self._prefix + self._output_key, Body=msgspec.json.encode(summary)
        )
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
        # The prefix is a part of the names, because the store would append a /.
        self._store, self._prefix = S3Store(client, bucket, ""), prefix
        if autostart:
            self.start()

    async def aggregate_once(self) -> ConsumptionSummary:
        """Read all workers' objects, 16 at a time, write the summary and return it.

        Raises:
            StoreFailed: the bucket cannot be listed or written.
        """
        listing = await self._store.read_all(f"{self._prefix}worker-")
        reports = [(key, body) for key, body in listing.bodies.items() if self._is_report(key, self._prefix)]
        summary = self._summed([_decoded(key, body) for key, body in reports])
        await self._store.write(self._prefix + self._output_key, msgspec.json.encode(summary))
        return summary


class RateOptions(msgspec.Struct, frozen=True, kw_only=True):
    """The options of a worker, with the names and defaults of AWS's example.

    Args:
        aggregate_max_read_rate: the read units a second that all workers share.
        aggregate_max_write_rate: the write units a second that all workers share.
        worker_max_read_rate: the most this worker may use.
        worker_max_write_rate: the most this worker may use.
        worker_initial_read_rate: policy "proportional": None is a tenth of the total, at most the worker's maximum.
        worker_initial_write_rate: as above.
        sync_interval: seconds between two syncs, within 10 %.
        worker_id: the unique name of this worker; None generates a UUID.
        summary_key: policy "proportional": the summary's name below the prefix.
        burst_seconds: how long the limiter saves unused capacity; None: 0.1, and 1 with "proportional".
        policy: "leases", or "proportional" for fleets that mix with the example's workers.
        max_workers: policy "leases": as `CoordinationOptions.max_workers`.
        store: policy "leases": None keeps the leases in the bucket.
        clock: monotonic seconds.
        wall_clock: seconds since 1970.
        chance: returns a number in [0, 1), for the jitter.

    Raises:
        ConfigError: the policy is unknown.
    """

    aggregate_max_read_rate: float = 100_000
    aggregate_max_write_rate: float = 50_000
    worker_max_read_rate: float = 1_500
    worker_max_write_rate: float = 500
    worker_initial_read_rate: float | None = None
    worker_initial_write_rate: float | None = None
    sync_interval: float = 5
    worker_id: str | None = None
    summary_key: str = "summary.json"
    burst_seconds: float | None = None
    policy: Literal["leases", "proportional"] = "leases"
    max_workers: int = 64
    store: CoordinationStore | None = None
    clock: Callable[[], float] = time.monotonic
    wall_clock: Callable[[], float] = time.time
    chance: Callable[[], float] = random.random

    def __post_init__(self) -> None:
        """Check the policy; the limiter and `CoordinationOptions` check the rest."""
        require_choice("policy", self.policy, ("leases", "proportional"))

    @property
    def aggregate_max(self) -> Rates:
        """Return the read and write units a second that all workers share."""
        return float(self.aggregate_max_read_rate), float(self.aggregate_max_write_rate)

    @property
    def worker_max(self) -> Rates:
        """Return the most this worker may use, read and write units a second."""
        return float(self.worker_max_read_rate), float(self.worker_max_write_rate)

    @property
    def initial(self) -> Rates:
        """Return the initial rates of policy "proportional"."""
        reads, writes = (
            initial_limit(aggregate_max=total, worker_max=most) if given is None else float(given)
            for given, total, most in zip(
                (self.worker_initial_read_rate, self.worker_initial_write_rate),
                self.aggregate_max,
                self.worker_max,
                strict=True,
            )
        )
        return reads, writes


class _SharedLimiter:
    """Common to both workers: a session limiter that follows leases or the summary."""

    def __init__(self, options: RateOptions) -> None:
        self._options = options
        self.worker_id = options.worker_id or str(uuid4())
        self._coordination = CoordinationOptions(
            # The store is opened elsewhere, and the URL is shown in messages only.
            store="s3://",
            max_workers=options.max_workers,
            # No service enforces the budget.
            usual_workers=options.max_workers,
            interval_seconds=options.sync_interval,
            worker_id=self.worker_id,
        )
        self._is_leased = options.policy == "leases"
        self._summary_is_fresh = True
        self._object_name = f"{'report' if self._is_leased else 'worker'}-{self.worker_id}.json"
        self._scaled = ScaledRates(
            aggregate_max=options.aggregate_max, worker_max=options.worker_max, initial=options.initial
        )
        burst_seconds = options.burst_seconds
        if burst_seconds is None:
            burst_seconds = SHARED_BURST_SECONDS if self._is_leased else 1.0
        reads, writes = options.initial
        self.limiter = SessionLimiter(
            read_rate=reads, write_rate=writes, burst_seconds=burst_seconds, clock=options.clock
        )

    def _leased(self, store: CoordinationStore) -> CoordinationWorker:
        options = self._options
        return leased_worker(
            self.limiter,
            options.store or store,
            self._coordination,
            total=options.aggregate_max,
            worker_max=options.worker_max,
            clock=options.clock,
            wall_clock=options.wall_clock,
            chance=options.chance,
        )

    def _report(self) -> bytes:
        units, waiting = self.limiter.demand()
        consumed = units[0] - waiting[0], units[1] - waiting[1]
        reads, writes = self._scaled.consumption_rates(consumed, self._options.clock())
        at = self._options.wall_clock()
        return msgspec.json.encode(
            Consumption(worker_id=self.worker_id, timestamp=at, read_rate=reads, write_rate=writes)
        )

    def _apply_summary(self, body: bytes) -> None:
        try:
            summary = msgspec.json.decode(body, type=ConsumptionSummary, strict=False)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            _logger.warning("cannot parse %s (%s); keeping the current limits", self._options.summary_key, error)
            return
        age, was_fresh = self._options.wall_clock() - summary.timestamp, self._summary_is_fresh
        self._summary_is_fresh = abs(age) <= STALE_INTERVALS * self._options.sync_interval
        if not self._summary_is_fresh:
            # Applied again and again, it would change the limits without end.
            if was_fresh:
                _logger.warning(
                    "%s is %.0f s %s: %s; keeping the current limits",
                    self._options.summary_key,
                    abs(age),
                    *("old", "its aggregator has stopped, or a clock differs")
                    if age > 0
                    else ("in the future", "the clocks of its aggregator and of this worker differ"),
                )
            return
        self._scaled.apply(summary)
        self.limiter.set_rates(*self._scaled.rates)

    def _make_repetition(self, place: str) -> Repetition:
        return Repetition(
            name="kpl-rate-worker",
            pause=lambda: self._options.sync_interval * (0.9 + 0.2 * self._options.chance()),
            pauses_first=True,
            on_failure=lambda error: _logger.warning("cannot sync at %s: %s; keeping the current limits", place, error),
        )


class DistributedRateWorker(_SharedLimiter, RepeatingThread):
    """Limits the DynamoDB clients of a boto3 session, from a background thread.

    Args:
        session: a boto3 session; clients that it creates from now on are limited.
        bucket: the bucket that the workers share.
        prefix: the prefix of their keys. With leases a / is appended if it is missing; "proportional" uses it as it is.
        autostart: start the thread now.
        options: those of `RateOptions`.
    """

    def __init__(
        self,
        session: Any,  # noqa: ANN401 - boto3 brings no types of its own
        bucket: str,
        prefix: str,
        *,
        autostart: bool = True,
        **options: Any,  # noqa: ANN401 - checked by `RateOptions`
    ) -> None:
        _SharedLimiter.__init__(self, RateOptions(**options))
        RepeatingThread.__init__(self, self.sync_once, self._make_repetition(f"s3://{bucket}/{prefix}"))
        self._client = session.client("s3")
        self._bucket = bucket
        self._prefix = _with_slash(prefix) if self._is_leased else prefix
        self._lease_thread: LeaseThread | None = None
        if self._is_leased:
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
        """Stop, and delete this worker's own object. The other workers no longer count this worker.

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
            answer = self._client.get_object(Bucket=self._bucket, Key=self._prefix + self._options.summary_key)
        except ClientError as error:
            if error.response.get("Error", {}).get("Code") not in _MISSING:
                raise
            # No summary has been written yet: keep the current limits.
        else:
            self._apply_summary(answer["Body"].read())


class AsyncDistributedRateWorker(_SharedLimiter, RepeatingTask):
    """Limits the DynamoDB clients of an aiobotocore session, from a task; `autostart` needs a running loop.

    Args:
        session: an aiobotocore session; clients that it creates from now on are limited.
        client: an aiobotocore client for S3; its owner closes it.
        bucket: the bucket that the workers share.
        prefix: the prefix of their keys. With leases a / is appended if it is missing; "proportional" uses it as it is.
        autostart: start the task now.
        options: those of `RateOptions`.
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
        _SharedLimiter.__init__(self, RateOptions(**options))
        RepeatingTask.__init__(self, self.sync_once, self._make_repetition(f"s3://{bucket}/{prefix}"))
        # With "proportional" the prefix is a part of the names, because the store would append a /.
        self._store = S3Store(client, bucket, prefix if self._is_leased else "")
        self._name_prefix = "" if self._is_leased else prefix
        self._lease_worker = self._leased(self._store) if self._is_leased else None
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
        """Stop, and delete this worker's own object. The other workers no longer count this worker.

        Raises:
            StoreFailed: S3 failed.
        """
        await self.stop()
        await self._store.delete(self._name_prefix + self._object_name)

    async def sync_once(self) -> None:
        """Write this worker's report, read the summary, and rescale the limits. Policy "proportional" only.

        Raises:
            StoreFailed: S3 failed; the limits stay as they are.
        """
        await self._store.write(self._name_prefix + self._object_name, self._report())
        summary = (await self._store.read(self._name_prefix + self._options.summary_key)).body
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
