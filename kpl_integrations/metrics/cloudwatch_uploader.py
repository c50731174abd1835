"""Uploads the summary of `CloudWatchMetrics` with PutMetricData, once a minute, from its own thread."""

import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass
from datetime import UTC, datetime
from typing import Any, Final, Self

from botocore.config import Config
from botocore.session import get_session

from kpl_integrations.metrics.cloudwatch import CloudWatchMetrics, Datum

_logger = logging.getLogger("kpl_integrations.metrics")

# The same as the KPL.
DEFAULT_NAMESPACE: Final = "KinesisProducerLibrary"
DEFAULT_INTERVAL_SECONDS: Final = 60.0
# PutMetricData accepts 1,000 data and 1 MB per call; a datum of ours has less than 700 bytes.
_DATA_PER_CALL: Final = 1_000
# The end of a process waits for at most two uploads; with botocore's defaults each could take five minutes.
_CLIENT: Final = Config(connect_timeout=3, read_timeout=5, retries={"total_max_attempts": 2, "mode": "standard"})


@dataclass(eq=False, repr=False)
class CloudWatchUploader:
    """A context manager that uploads every `interval` seconds, and once more at the end.

    `client` is any synchronous CloudWatch client; without it one is made from region and endpoint. Data that
    cannot be sent is merged into the next upload. The first failure of a series is logged.
    """

    metrics: CloudWatchMetrics
    _: KW_ONLY
    client: Any = None
    region: str | None = None
    endpoint_url: str | None = None
    namespace: str = DEFAULT_NAMESPACE
    interval: float = DEFAULT_INTERVAL_SECONDS
    clock: Callable[[], float] = time.time

    def __post_init__(self) -> None:
        self._closing = threading.Event()
        self._has_failed = False
        self._uploading = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="kpl-cloudwatch", daemon=True)

    def __enter__(self) -> Self:
        """Start the thread."""
        self._thread.start()
        return self

    def __exit__(self, *_exc_info: object) -> None:
        """Upload the rest and end the thread."""
        self.close()

    def close(self) -> None:
        """Upload the rest and end the thread. Idempotent."""
        if not self._closing.is_set():
            self._closing.set()
            if self._thread.ident is not None:
                self._thread.join()
            self.upload()

    def upload(self) -> bool:
        """Send the summary since the last upload; return whether all of it was accepted."""
        with self._uploading:
            data = self.metrics.take()
            sent = 0
            try:
                for sent in range(0, len(data), _DATA_PER_CALL):
                    self._send(data[sent : sent + _DATA_PER_CALL])
            except Exception as error:  # noqa: BLE001 - a client of the caller may raise anything; the thread must go on
                self.metrics.give_back(data[sent:])
                if not self._has_failed:
                    _logger.warning("cannot send %d metrics to CloudWatch, will retry: %s", len(data), error)
                self._has_failed = True
                return False
            self._has_failed = False
            return True

    def _run(self) -> None:
        while not self._closing.wait(self.interval):
            self.upload()

    def _send(self, data: Sequence[Datum]) -> None:
        if self.client is None:
            self.client = get_session().create_client(
                "cloudwatch", region_name=self.region, endpoint_url=self.endpoint_url, config=_CLIENT
            )
        now = datetime.fromtimestamp(self.clock(), tz=UTC)
        self.client.put_metric_data(
            Namespace=self.namespace,
            MetricData=[
                {
                    "MetricName": datum.name,
                    "Dimensions": [{"Name": name, "Value": value} for name, value in datum.dimensions],
                    "Timestamp": now,
                    "Unit": datum.unit,
                    "StatisticValues": {
                        "SampleCount": float(datum.values.count),
                        "Sum": datum.values.total,
                        "Minimum": datum.values.minimum,
                        "Maximum": datum.values.maximum,
                    },
                }
                for datum in data
            ],
        )
