"""HTTP/2 over sockets: asyncio and uvloop, prior knowledge and ALPN, beside HTTP/1.1 on the same port."""

import asyncio
import ssl
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
import uvloop

from kpl_integrations.ingest.http.certificate import ServerCertificate
from kpl_integrations.ingest.tenants import OpenTenants, Tenant
from tests.ingest.served import served
from tests.support.certificates import certificate_pair, days_from_now, needs_openssl
from tests.support.gateway_scene import STREAM, gateway_of, kinesis
from tests.support.producer_scene import stored
from tests.support.waiting import until

PATH = f"/v1/streams/{STREAM}/records"
LOOPS: dict[str, Callable[[], asyncio.AbstractEventLoop]] = {
    "asyncio": asyncio.new_event_loop,
    "uvloop": uvloop.new_event_loop,
}


def gateway(**settings: Any) -> Any:
    return gateway_of(kinesis(), OpenTenants(Tenant(id="local")), record_max_buffered_time_ms=5, **settings)


async def puts_and_reads(client: httpx.AsyncClient, url: str, version: str) -> None:
    body = {"data": "x" * 200_000}
    answers = await asyncio.gather(
        *[client.post(f"{url}{PATH}?ack=delivered", json=body) for _ in range(3)],
        *[client.get(f"{url}{path}") for path in ("/livez", "/metrics", "/dashboard", "/openapi.json")],
    )
    assert {answer.http_version for answer in answers} == {version}
    assert {answer.status_code for answer in answers[:3]} == {200}
    assert {answer.status_code for answer in answers[3:]} == {200}
    # The dashboard's stream goes on while other requests are answered.
    async with client.stream("GET", f"{url}/dashboard/events") as events:
        assert (await anext(events.aiter_text())).startswith(("event:", "data:", "retry:"))
        assert (await client.get(f"{url}/livez")).status_code == 200


@pytest.mark.parametrize("loop", LOOPS)
def test_http_2_without_asking_and_http_1_share_a_port(loop: str) -> None:
    async def run() -> None:
        served_gateway = gateway()
        async with served(served_gateway) as server:
            for is_2, version in [(True, "HTTP/2"), (False, "HTTP/1.1")]:
                async with httpx.AsyncClient(http1=not is_2, http2=is_2) as client:
                    await puts_and_reads(client, server.url, version)

    with asyncio.Runner(loop_factory=LOOPS[loop]) as runner:
        runner.run(run())


@needs_openssl
@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("is_on", [True, False])
def test_a_client_chooses_http_2_in_the_tls_handshake(tmp_path: Path, loop: str, is_on: bool) -> None:
    certificate, key = certificate_pair(tmp_path, "one", days_from_now(-1), days_from_now(90))
    trust = ssl.create_default_context(cafile=str(certificate))
    trust.check_hostname = False

    async def run() -> None:
        files = {"tls_certificate": certificate, "tls_key": key}
        served_gateway = gateway(http2=is_on, **files)
        async with served(served_gateway) as server:
            for is_2 in (True, False):
                async with httpx.AsyncClient(verify=trust, http2=is_2) as client:
                    await puts_and_reads(client, server.url, "HTTP/2" if is_2 and is_on else "HTTP/1.1")

    with asyncio.Runner(loop_factory=LOOPS[loop]) as runner:
        runner.run(run())


@needs_openssl
def test_a_renewed_certificate_still_offers_http_2(tmp_path: Path) -> None:
    pair = certificate_pair(tmp_path, "one", days_from_now(-1), days_from_now(90))
    renewed = certificate_pair(tmp_path, "two", days_from_now(-1), days_from_now(190))

    async def run() -> None:
        served_gateway = gateway(tls_certificate=pair[0], tls_key=pair[1])
        async with served(served_gateway) as server:
            for new, old in zip(renewed, pair, strict=True):
                new.replace(old)
            assert isinstance(served_gateway.certificate, ServerCertificate)
            served_gateway.certificate.reload_if_changed(always=True)
            trust = ssl.create_default_context(cafile=str(pair[0]))
            trust.check_hostname = False
            async with httpx.AsyncClient(verify=trust, http2=True) as client:
                assert (await client.get(f"{server.url}/livez")).http_version == "HTTP/2"

    asyncio.run(run())


def test_a_server_that_stops_answers_the_requests_of_its_connections_and_closes_them() -> None:
    async def run() -> int:
        transport = kinesis()
        # No record leaves before all requests are there: on a busy machine they come slowly.
        served_gateway = gateway_of(transport, OpenTenants(Tenant(id="local")), record_max_buffered_time_ms=20_000)
        async with httpx.AsyncClient(http1=False, http2=True) as client:
            async with served(served_gateway) as server:
                assert (await client.get(f"{server.url}/livez")).status_code == 200
                url = f"{server.url}{PATH}?ack=delivered"
                asked = [asyncio.create_task(client.post(url, json={"data": str(n)})) for n in range(50)]
                await until(lambda: served_gateway.producer.buffer_limit.outstanding_records >= 50)
            answers = await asyncio.gather(*asked)
        assert [each.status_code for each in answers] == [200] * 50
        return len(stored(transport, STREAM))

    assert asyncio.run(run()) == 50


@pytest.mark.long
def test_curl_speaks_http_2_to_it() -> None:
    async def run() -> None:
        async with served(gateway()) as server:
            command = ["curl", "-s", "--http2-prior-knowledge", "-w", " %{http_version}", f"{server.url}/livez"]
            found = await asyncio.to_thread(subprocess.run, command, capture_output=True, timeout=20, check=False)
            assert found.stdout == b'{"status":"alive"} 2'

    asyncio.run(run())
