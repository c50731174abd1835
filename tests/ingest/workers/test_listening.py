"""Several listening sockets of one gateway share a port; a second gateway cannot join them."""

import socket
import sys

import pytest

from kpl_integrations.ingest.http.listening import bound_socket, listening_sockets


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
