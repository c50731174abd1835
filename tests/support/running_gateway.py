"""A gateway in a separate thread in front of a local Kinesis, for clients that use its address."""

import asyncio
import dataclasses
import signal
import threading
from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any, NamedTuple

from kpl_core import Config, ProducerReport, decode
from kpl_integrations.ingest import IngestGateway, load_settings
from kpl_integrations.ingest.admission.tenant_account import TenantFairness
from kpl_integrations.ingest.serving import GatewayServer, bound_socket
from kpl_integrations.ingest.tenants import AccessKey, CallableTenants, Tenant, TenantDirectory
from kpl_integrations.local_kinesis import LocalKinesis, ThreadedLocalKinesis

__all__ = ["RunningGateway", "StoredUserRecord", "key_directory", "running_gateway"]


class StoredUserRecord(NamedTuple):
    """A user record as a consumer reads it, and its Kinesis record."""

    partition_key: str
    data: bytes
    shard_id: str
    sequence_number: str


class RunningGateway:
    """The running gateway, its address and its Kinesis."""

    def __init__(self, gateway: IngestGateway, url: str, kinesis: ThreadedLocalKinesis) -> None:
        self.gateway = gateway
        self.url = url
        self.kinesis = kinesis
        self.report: ProducerReport | None = None

    def kinesis_records(self, stream: str) -> int:
        """Return how many Kinesis records a stream holds."""
        return len(self.kinesis.call(lambda fake, _: fake.records(stream)))

    def user_records(self, stream: str) -> list[StoredUserRecord]:
        """Return all user records of a stream, shard by shard."""
        found: list[StoredUserRecord] = []
        for record in self.kinesis.call(lambda fake, _: fake.records(stream)):
            inside = decode(record.data)
            users = (
                [(record.partition_key, record.data)] if inside is None else [(u.partition_key, u.data) for u in inside]
            )
            found += [StoredUserRecord(key, data, record.shard_id, record.sequence_number) for key, data in users]
        return found


@contextmanager
def running_gateway(
    directory: TenantDirectory,
    streams: Mapping[str, int],
    *,
    config: Mapping[str, Any] | None = None,
    **settings: Any,
) -> Iterator[RunningGateway]:
    """Serve on a free port until the end of the block, then shut down; `report` has the final counts."""
    with ThreadedLocalKinesis(LocalKinesis(streams)) as kinesis:
        given = {"record_max_buffered_time_ms": 20, "drain_delay_seconds": 0, "port": 0, **settings}
        found = load_settings(region="us-east-1", endpoint_url=kinesis.endpoint_url, **given)
        options: Config = dataclasses.replace(
            found.producer_config(TenantFairness(directory)),
            aws_access_key_id="local",
            aws_secret_access_key="local",
            **(config or {}),
        )
        gateway = IngestGateway(found, directory, config=options)
        with bound_socket(found.host, found.port) as listening:
            server = GatewayServer(gateway, listening)
            running = RunningGateway(gateway, server.url, kinesis)
            started: Future[asyncio.AbstractEventLoop] = Future()

            async def serve() -> None:
                loop = asyncio.get_running_loop()
                running.report = await server.run(started=lambda: started.set_result(loop))

            thread = threading.Thread(target=lambda: asyncio.run(serve()), name="gateway", daemon=True)
            thread.start()
            loop = started.result(timeout=30)
            try:
                yield running
            finally:
                loop.call_soon_threadsafe(server.stop, signal.SIGINT)
                thread.join(timeout=30)


def key_directory(*keys: AccessKey, **others: Tenant) -> CallableTenants:
    """Return a directory of tenants with AWS-style keys, and of `others` by their API keys."""
    return CallableTenants(
        lambda authorization: others.get((authorization or "").removeprefix("Bearer ")),
        tenants=[key.tenant for key in keys] + list(others.values()),
        access_keys={key.access_key_id: key for key in keys},
    )
