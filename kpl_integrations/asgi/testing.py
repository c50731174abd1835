"""For tests of an application: replaces Kinesis by an in-memory one, and keeps the real producer.

    with KinesisDouble({"orders": 1}) as kinesis, TestClient(app) as client:
        client.post("/orders")
        kinesis.wait_for("orders", count=1)

Every `KinesisLifespan` entered inside the block uses it, regardless of its config. In pytest it is the fixture
`kinesis_double` (`kpl_integrations.pytest_plugin`).
"""

import threading
from collections.abc import Mapping, Sequence
from typing import Self

from kpl_core import Config, UserRecord, decode
from kpl_core.testing import FakeKinesis, Faults, PutRecord, PutRecordsEntry
from kpl_core.testing.fake_transport import FakeTransport
from kpl_core.transport import KinesisTransport
from kpl_integrations.asgi.lifespan import KinesisLifespan


class _AnnouncingKinesis(FakeKinesis):
    """Notifies waiting threads of new records."""

    def __init__(self, streams: Mapping[str, int]) -> None:
        super().__init__(streams, enforce_limits=False)
        self.changed = threading.Condition()

    def put_records(self, stream: str, records: Sequence[PutRecord], *, now: float) -> list[PutRecordsEntry]:
        """Store the records and notify waiting threads."""
        with self.changed:
            entries = super().put_records(stream, records, now=now)
            self.changed.notify_all()
        return entries


class KinesisDouble:
    """A Kinesis in memory; `faults` are its fault switches (`kpl_core.testing`)."""

    def __init__(self, streams: Mapping[str, int]) -> None:
        self._kinesis = _AnnouncingKinesis(streams)

    @property
    def faults(self) -> Faults:
        """The fault switches."""
        return self._kinesis.faults

    def transport(self, config: Config) -> KinesisTransport:  # noqa: ARG002 - `KinesisLifespan` passes it
        """Return a new transport to this Kinesis, for `KinesisLifespan(transport=double.transport)`."""
        return FakeTransport(self._kinesis)

    def user_records(self, stream: str) -> list[UserRecord]:
        """Return the stored user records, de-aggregated, in each shard's order."""
        user_records: list[UserRecord] = []
        with self._kinesis.changed:
            for stored in self._kinesis.records(stream):
                inside = decode(stored.data)
                user_records += [UserRecord(stored.partition_key, stored.data)] if inside is None else inside
        return user_records

    def wait_for(self, stream: str, *, count: int, timeout: float = 5.0) -> list[UserRecord]:
        """Wait in the test's thread until `count` user records are stored, and return them.

        Raises:
            TimeoutError: fewer are stored after `timeout` seconds.
        """
        with self._kinesis.changed:
            if not self._kinesis.changed.wait_for(lambda: len(self.user_records(stream)) >= count, timeout):
                found = len(self.user_records(stream))
                message = f"{found} user records are in stream {stream!r} after {timeout:g} s, not {count}"
                raise TimeoutError(message)
            return self.user_records(stream)

    def __enter__(self) -> Self:
        """Replace Kinesis.

        Raises:
            RuntimeError: another double is installed.
        """
        if KinesisLifespan.transport_override is not None:
            message = "another KinesisDouble is installed; leave its block first"
            raise RuntimeError(message)
        KinesisLifespan.transport_override = self.transport
        return self

    def __exit__(self, *_exc_info: object) -> None:
        """Restore the real transport."""
        KinesisLifespan.transport_override = None
