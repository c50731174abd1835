"""Run one gateway with tenants for `benchmarks.ingest_floods`: python flood_server.py ENDPOINT_URL [--cpu N].

The shards have their real limits. The API key of each tenant is its id. It is a program of its own, so that the
gateway of another checkout can be measured: it imports only what that has. Prints its port, serves until its
standard input closes.
"""

import argparse
import asyncio
import os
import signal
import sys
from functools import partial

import anyio

from kpl_integrations.ingest import IngestGateway, load_settings
from kpl_integrations.ingest.serving import GatewayServer, bound_socket
from kpl_integrations.ingest.tenants import CallableTenants, Tenant


def gateway(endpoint_url: str) -> IngestGateway:
    tenants = [Tenant(id=f"quiet-{number}") for number in range(20)]
    tenants += [Tenant(id="flood"), Tenant(id="single", aggregation=False)]
    directory = CallableTenants(
        {f"Bearer {tenant.id}": tenant for tenant in tenants}.get,  # type: ignore[arg-type] # None is not a key of it
        tenants=tenants,
    )
    settings = load_settings(region="us-east-1", endpoint_url=endpoint_url)
    return IngestGateway(settings, directory)


async def serve(endpoint_url: str) -> None:
    parent_gone = anyio.Event()
    asyncio.get_running_loop().add_reader(sys.stdin.fileno(), parent_gone.set)
    with bound_socket("127.0.0.1", 0) as listening:
        port = listening.getsockname()[1]
        async with anyio.create_task_group() as tasks:
            server = GatewayServer(gateway(endpoint_url), listening)
            tasks.start_soon(partial(server.run, started=lambda: print(port, flush=True)))
            await parent_gone.wait()
            server.stop(signal.SIGINT)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("endpoint_url")
    parser.add_argument("--cpu", type=int, default=None)
    arguments = parser.parse_args()
    if arguments.cpu is not None:
        os.sched_setaffinity(0, {arguments.cpu})
    anyio.run(serve, arguments.endpoint_url, backend_options={"use_uvloop": True})
