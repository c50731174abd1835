"""Sums up what all workers consume, every few seconds, in one object of S3; in a thread, or in a task.

The objects are those of AWS's example (see `kpl_core.coordination.proportional`), so its workers
may follow this aggregator, and these workers its own.
"""

import logging
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

import msgspec
from botocore.exceptions import BotoCoreError, ClientError

from kpl_core.coordination.proportional import Consumption, ConsumptionSummary, as_json, summed
from kpl_core.coordination.stores.s3 import PARALLEL_READS, S3Store
from kpl_integrations.dynamodb_limits.repeating import RepeatingTask, RepeatingThread, Repetition

__all__ = ["AsyncDistributedRateAggregator", "DistributedRateAggregator", "with_slash"]

_logger = logging.getLogger(__name__)
_FAILURES: Final = (BotoCoreError, ClientError, OSError)


def with_slash(prefix: str) -> str:
    """Return a prefix that ends in /, as the example makes it."""
    return prefix if prefix.endswith("/") else f"{prefix}/"


class _Aggregation:
    """What thread and task have in common: options, and reading one object."""

    def __init__(self, *, staleness_cutoff: float, interval: float, output_key: str) -> None:
        self._staleness = staleness_cutoff
        self._interval = interval
        self._output_key = output_key

    def _repetition(self, place: str) -> Repetition:
        return Repetition(
            name="kpl-rate-aggregator",
            pause=lambda: self._interval,
            pauses_first=False,
            tell=lambda error: _logger.warning("no summary at %s: %s; it is tried again", place, error),
        )

    def _is_a_workers(self, key: str) -> bool:
        return key.endswith(".json") and not key.endswith(self._output_key)

    @staticmethod
    def _decoded(key: str, body: bytes) -> Consumption | None:
        try:
            return msgspec.json.decode(body, type=Consumption)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            _logger.debug("%s is no worker's object: %s", key, error)
            return None


class DistributedRateAggregator(_Aggregation):
    """Writes the summary from a background thread. One is enough; several do no harm.

    Args:
        session: a boto3 session.
        bucket: where the workers' objects are.
        prefix: what their keys begin with; a / is added if it does not end in one.
        staleness_cutoff: seconds after which a worker's object does not count any more.
        interval: seconds between two summaries.
        output_key: the summary's name below the prefix.
        autostart: start the thread now.
        wall_clock: seconds since 1970.
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
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        super().__init__(staleness_cutoff=staleness_cutoff, interval=interval, output_key=output_key)
        self._client = session.client("s3")
        self._bucket = bucket
        self._prefix = with_slash(prefix)
        self._wall_clock = wall_clock
        self._background = RepeatingThread(self.aggregate_once, self._repetition(f"s3://{bucket}/{prefix}"))
        if autostart:
            self.start()

    def aggregate_once(self, max_workers: int = PARALLEL_READS) -> ConsumptionSummary:
        """Read all objects, `max_workers` at a time, write the summary and return it.

        Raises:
            BotoCoreError, ClientError: the bucket cannot be listed or written.
        """
        pages = self._client.get_paginator("list_objects_v2").paginate(Bucket=self._bucket, Prefix=self._prefix)
        keys = [each["Key"] for page in pages for each in page.get("Contents", ()) if self._is_a_workers(each["Key"])]
        with ThreadPoolExecutor(max_workers) as readers:
            found = [each for each in readers.map(self._read, keys) if each is not None]
        summary = summed(found, at=self._wall_clock(), staleness_seconds=self._staleness)
        self._client.put_object(Bucket=self._bucket, Key=self._prefix + self._output_key, Body=as_json(summary))
        return summary

    def _read(self, key: str) -> Consumption | None:
        try:
            body = self._client.get_object(Bucket=self._bucket, Key=key)["Body"].read()
        except _FAILURES as error:
            _logger.debug("%s was not read: %s", key, error)
            return None
        return self._decoded(key, body)

    def start(self) -> None:
        """Start the thread, if it does not run."""
        self._background.start()

    def stop(self) -> None:
        """End the thread, after the summary it may be at."""
        self._background.stop()


class AsyncDistributedRateAggregator(_Aggregation):
    """The same on an event loop, with an aiobotocore client for S3; `autostart` needs a running loop."""

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
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        super().__init__(staleness_cutoff=staleness_cutoff, interval=interval, output_key=output_key)
        self._store = S3Store(client, bucket, with_slash(prefix))
        self._wall_clock = wall_clock
        self._background = RepeatingTask(self.aggregate_once, self._repetition(f"s3://{bucket}/{prefix}"))
        if autostart:
            self.start()

    async def aggregate_once(self) -> ConsumptionSummary:
        """Read all objects, 16 at a time, write the summary and return it.

        Raises:
            StoreFailed: the bucket cannot be listed or written.
        """
        listing = await self._store.read_all("")
        found = [self._decoded(key, body) for key, body in listing.bodies.items() if self._is_a_workers(key)]
        fresh = [each for each in found if each is not None]
        summary = summed(fresh, at=self._wall_clock(), staleness_seconds=self._staleness)
        await self._store.write(self._output_key, as_json(summary))
        return summary

    def start(self) -> None:
        """Start the task, if it does not run."""
        self._background.start()

    async def stop(self) -> None:
        """End the task."""
        await self._background.stop()
