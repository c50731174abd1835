"""Start a gateway in a child process, with limits on its CPU time and memory, for each line on standard input.

The line has the arguments of `serve` in JSON. The child prints its process id and its port. Records are accepted and
dropped, so its CPU time is that of requests.
"""

import asyncio
import json
import os
import resource
import signal
import sys

import cbor2  # noqa: F401 - imported once for all children
import zstandard  # noqa: F401

from benchmarks.instant_transport import InstantTransport
from kpl_integrations.ingest import IngestGateway, load_settings
from kpl_integrations.ingest.serving import GatewayServer, bound_socket
from kpl_integrations.ingest.tenants import AccessKey, CallableTenants, Tenant

CPU_SECONDS = 120
MEMORY_BYTES = 6 << 30


def directory(*, serves_unknown: bool) -> CallableTenants:
    streams = {"logs": "orders", "traces": "orders", "metrics": "orders"}
    tenants = {
        name: Tenant(id=name, streams=("orders", "orders-*"), otlp_streams=streams)  # type: ignore[arg-type]
        for name in ("busy", "quiet")
    }
    keys = {name.upper(): AccessKey(name.upper(), f"secret-{name}", tenant) for name, tenant in tenants.items()}
    return CallableTenants(
        lambda shown: tenants.get(shown.removeprefix("Bearer ")) if shown else "",
        unknown=Tenant(id="unknown", streams=("orders",)) if serves_unknown else None,
        tenants=list(tenants.values()),
        access_keys=keys,
    )


async def serve(settings: dict[str, object], *, serves_unknown: bool = False) -> None:
    loaded = load_settings(
        port=0,
        region="us-east-1",
        drain_delay_seconds=0,
        record_max_buffered_time_ms=10,
        admin_key="the-key-of-the-harness",
        **settings,
    )
    gateway = IngestGateway(loaded, directory(serves_unknown=serves_unknown), transport=InstantTransport(2))
    with bound_socket("127.0.0.1", 0) as listening:
        server = GatewayServer(gateway, listening)
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, server.stop)
        report = await server.run(started=lambda: print(os.getpid(), server.url.rpartition(":")[2], flush=True))
        print("complete" if report.complete and not report.failed_total else report, flush=True)


def main() -> None:
    # The kernel reaps the children.
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    for line in sys.stdin:
        if os.fork() == 0:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            resource.setrlimit(resource.RLIMIT_CPU, (CPU_SECONDS, CPU_SECONDS))
            resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
            asyncio.run(serve(**json.loads(line)))
            os._exit(0)


if __name__ == "__main__":
    main()
