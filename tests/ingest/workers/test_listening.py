"""Several listening sockets of one gateway share a port; a second gateway cannot join them."""

import asyncio
import errno
import os
import signal
import socket
import sys
from contextlib import closing

import pytest
import uvloop

from kpl_integrations.ingest.http import listening
from kpl_integrations.ingest.http.listening import SpareSockets, bound_socket, listening_sockets
from kpl_integrations.ingest.serving import GatewayServer
from tests.support.gateway_scene import gateway_of, kinesis
from tests.support.waiting import until


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere the workers share one socket")
def test_the_kernel_deals_new_connections_to_all_sockets():
    sockets = listening_sockets("127.0.0.1", 0, 2)
    port = sockets[0].getsockname()[1]
    assert [each.getsockname()[1] for each in sockets] == [port, port]
    clients = [socket.create_connection(("127.0.0.1", port), timeout=10) for _ in range(64)]
    accepted = [0, 0]
    for number, each in enumerate(sockets):
        each.setblocking(False)
        while True:
            try:
                each.accept()[0].close()
            except BlockingIOError:
                break
            accepted[number] += 1
    for each in [*clients, *sockets]:
        each.close()
    assert sum(accepted) == 64
    assert all(accepted)


@pytest.mark.parametrize("count", [1, 3])
def test_a_second_gateway_cannot_share_the_port(count):
    sockets = listening_sockets("127.0.0.1", 0, 2)
    port = sockets[0].getsockname()[1]
    with pytest.raises(OSError, match="in use"):
        listening_sockets("127.0.0.1", port, count)
    with pytest.raises(OSError, match="in use"):
        _ = bound_socket("127.0.0.1", port)
    for each in sockets:
        each.close()


LOOPS = pytest.mark.parametrize("factory", [asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"])


@LOOPS
def test_a_worker_accepts_from_the_socket_of_another_while_it_should(factory):
    """Also what waited there before, and from a socket that does not listen. Nothing is reset when it ends."""

    async def run() -> None:
        with bound_socket("127.0.0.1", 0) as spare:
            address = spare.getsockname()
            served: list[socket.socket] = []
            spares = SpareSockets({1: spare.dup(), 2: bound_socket("127.0.0.1", 0)})
            spares.start(served.append)
            spares.accept_from([7])
            spares.accept_from([1])
            clients = [socket.create_connection(address, timeout=10) for _ in range(20)]
            await until(lambda: len(served) == 20)
            spares.accept_from([])
            waiting = [socket.create_connection(address, timeout=10) for _ in range(20)]
            await asyncio.sleep(0.05)
            assert len(served) == 20
            spares.accept_from([1, 2])
            await until(lambda: len(served) == 40)
            spares.close()
            spares.accept_from([1])
            for each, client in zip(
                sorted(served, key=lambda each: each.getpeername()),
                sorted([*clients, *waiting], key=lambda each: each.getsockname()),
                strict=True,
            ):
                client.sendall(b"x")
                each.settimeout(10)
                assert each.recv(1) == b"x"
                each.close()
                client.close()

    with asyncio.Runner(loop_factory=factory) as runner:
        runner.run(run())


@LOOPS
def test_without_descriptors_a_worker_accepts_the_connections_of_another_later(factory, monkeypatch, caplog):
    class Full(socket.socket):
        failures = 0

        def accept(self) -> tuple[socket.socket, object]:
            if self.failures < 2:
                Full.failures += 1
                raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
            return super().accept()

    monkeypatch.setattr(listening, "_PAUSE_SECONDS", 0.01)

    async def run() -> None:
        with bound_socket("127.0.0.1", 0) as spare:
            served: list[socket.socket] = []
            spares = SpareSockets({1: Full(fileno=spare.detach())})
            spares.start(served.append)
            spares.accept_from([1])
            address = next(iter(spares._sockets.values())).getsockname()  # noqa: SLF001 - it was bound above
            with closing(socket.create_connection(address, timeout=10)):
                await until(lambda: served)
            spares.close()
            served[0].close()

    with asyncio.Runner(loop_factory=factory) as runner:
        runner.run(run())
    assert Full.failures == 2
    assert caplog.messages == ["connections of worker 1 cannot be accepted: Too many open files"] * 2


@pytest.mark.anyio
@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_a_worker_that_starts_never_makes_its_socket_blocking(anyio_backend, monkeypatch):
    """Another worker accepts from the same socket at that moment. A blocking `accept` would stop all its clients."""
    timeouts: list[float | None] = []
    set_timeout = socket.socket.settimeout

    def noted(own: socket.socket, seconds: float | None) -> None:
        if own.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN) or own.getsockname()[1] == port:
            timeouts.append(seconds)
        set_timeout(own, seconds)

    with bound_socket("127.0.0.1", 0) as inherited:
        port = inherited.getsockname()[1]
        monkeypatch.setattr(socket.socket, "settimeout", noted, raising=False)
        # As a worker gets it: Python does not know that the socket is not blocking.
        server = GatewayServer(gateway_of(kinesis()), socket.socket(fileno=os.dup(inherited.fileno())))
        started = asyncio.Event()
        running = asyncio.create_task(server.run(started=started.set))
        await asyncio.wait_for(started.wait(), 20)
        server.stop(signal.SIGINT)
        await asyncio.wait_for(running, 20)
    assert timeouts
    assert set(timeouts) == {0.0}
