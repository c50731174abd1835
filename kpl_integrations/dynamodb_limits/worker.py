"""A process among many that together keep two rates: it reports what it consumed, and scales its own limits.

    DistributedRateWorker(session, bucket, prefix, aggregate_max_read_rate=10_000, aggregate_max_write_rate=5_000)
    client = session.client("dynamodb")     # limited, with all others who use the same bucket and prefix

Arithmetic, objects and defaults are those of AWS's example ("Distributed Coordination", AWS
Database Blog); what is known of its behaviour stands in `kpl_core.coordination.proportional`.
"""

import logging
import random
import time
from collections.abc import Callable
from typing import Any, Final
from uuid import uuid4

import msgspec
from botocore.exceptions import ClientError

from kpl_core.coordination.demand import Usage
from kpl_core.coordination.proportional import WHOLE, ConsumptionSummary, ScaledLimits, as_json
from kpl_core.coordination.stores.s3 import S3Store
from kpl_integrations.dynamodb_limits.aggregator import with_slash
from kpl_integrations.dynamodb_limits.repeating import RepeatingTask, RepeatingThread, Repetition
from kpl_integrations.dynamodb_limits.session_limiter import SessionLimiter

__all__ = ["AsyncDistributedRateWorker", "DistributedRateWorker"]

_logger = logging.getLogger(__name__)
_MISSING: Final = frozenset({"NoSuchKey", "404"})


class _ScaledLimiter:
    """A session's limiter and its place in the fleet; what thread and task have in common."""

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
        burst_seconds: float = 1.0,
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
        chance: Callable[[], float] = random.random,
    ) -> None:
        self.worker_id = worker_id or str(uuid4())
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
        self.limiter = SessionLimiter(
            read_rate=initial[0], write_rate=initial[1], burst_seconds=burst_seconds, clock=clock
        )

    @property
    def _object_name(self) -> str:
        return f"worker-{self.worker_id}.json"

    def _report(self) -> bytes:
        now = self._clock()
        read, write = self.limiter.totals()
        self._limits.look({WHOLE: Usage(self._aggregate, (read, write))}, now)
        return as_json(self._limits.consumption(now, at=self._wall_clock()))

    def _obey(self, body: bytes | None) -> None:
        if body is None:
            # Nobody has summed up yet: go on with the limits there are.
            return
        try:
            summary = msgspec.json.decode(body, type=ConsumptionSummary)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            _logger.warning("%s cannot be read (%s); going on with the limits there are", self._summary_key, error)
            return
        self._limits.apply(summary, self._clock(), at=self._wall_clock())
        self.limiter.set_rates(*self._limits.share(WHOLE, self._aggregate))

    def _repetition(self, place: str) -> Repetition:
        return Repetition(
            name="kpl-rate-worker",
            pause=lambda: self._sync_interval * (0.9 + 0.2 * self._chance()),
            pauses_first=True,
            tell=lambda error: _logger.warning("no meeting at %s: %s; limits stay", place, error),
        )


class DistributedRateWorker(_ScaledLimiter):
    """Limits the DynamoDB clients of a boto3 session, from a background thread.

    Args:
        session: a boto3 session; clients it makes from now on are limited.
        bucket: where the workers meet.
        prefix: what their keys begin with; a / is added if it does not end in one.
        autostart: start the thread now.
        options: aggregate_max_read_rate (100,000), aggregate_max_write_rate (50,000),
            worker_max_read_rate (1,500), worker_max_write_rate (500), worker_initial_read_rate and
            worker_initial_write_rate (None: derived), sync_interval (5), worker_id (None: a UUID),
            summary_key ("summary.json"), burst_seconds (1).
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
        super().__init__(**options)
        self._client = session.client("s3")
        self._bucket = bucket
        self._prefix = with_slash(prefix)
        self.limiter.attach(session)
        self._background = RepeatingThread(self.sync_once, self._repetition(f"s3://{bucket}/{prefix}"))
        if autostart:
            self.start()

    def sync_once(self) -> None:
        """Report, read the summary, scale.

        Raises:
            BotoCoreError, ClientError: S3 could not be used; the limits stay as they are.
        """
        self._client.put_object(Bucket=self._bucket, Key=self._prefix + self._object_name, Body=self._report())
        try:
            answer = self._client.get_object(Bucket=self._bucket, Key=self._prefix + self._summary_key)
        except ClientError as error:
            if error.response.get("Error", {}).get("Code") not in _MISSING:
                raise
            self._obey(None)
        else:
            self._obey(answer["Body"].read())

    def start(self) -> None:
        """Start the thread, if it does not run."""
        self._background.start()

    def stop(self) -> None:
        """End the thread; the limits stay as they are."""
        self._background.stop()


class AsyncDistributedRateWorker(_ScaledLimiter):
    """Limits the DynamoDB clients of an aiobotocore session, from a task; `autostart` needs a running loop.

    Args:
        session: an aiobotocore session; clients it makes from now on are limited.
        client: an aiobotocore client for S3; its owner closes it.
        bucket: where the workers meet.
        prefix: what their keys begin with; a / is added if it does not end in one.
        autostart: start the task now.
        options: as `DistributedRateWorker`.
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
        super().__init__(**options)
        self._store = S3Store(client, bucket, with_slash(prefix))
        self.limiter.attach(session)
        self._background = RepeatingTask(self.sync_once, self._repetition(f"s3://{bucket}/{prefix}"))
        if autostart:
            self.start()

    async def sync_once(self) -> None:
        """Report, read the summary, scale.

        Raises:
            StoreFailed: S3 could not be used; the limits stay as they are.
        """
        await self._store.write(self._object_name, self._report())
        self._obey((await self._store.read(self._summary_key)).body)

    def start(self) -> None:
        """Start the task, if it does not run."""
        self._background.start()

    async def stop(self) -> None:
        """End the task; the limits stay as they are."""
        await self._background.stop()
