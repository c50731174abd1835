"""What the crew does when a worker cannot be started, or never lives; the workers are shells."""

import errno
import os
import socket
import sys

import anyio
import pytest

from kpl_core.backoff import ExponentialBackoff
from kpl_core.coordination.stores.file import FileStore
from kpl_integrations.ingest.http.listening import BACKLOG, listening_sockets
from kpl_integrations.ingest.workers import crew as crew_module
from kpl_integrations.ingest.workers.burial import Burial
from kpl_integrations.ingest.workers.crew import Crew
from kpl_integrations.ingest.workers.door import Door
from kpl_integrations.ingest.workers.seat import Seat

DIES = "read briefing; echo ready; exit 3"
only_linux = pytest.mark.skipif(sys.platform != "linux", reason="elsewhere the sockets are one")


@pytest.fixture(autouse=True)
def _no_pauses(monkeypatch):
    monkeypatch.setattr(crew_module, "_RESTART_BACKOFF", ExponentialBackoff(base_seconds=0.0, cap_seconds=0.0))


def crew_of(tmp_path, script, briefing, sockets):
    seats = [Seat(worker=number, life=1, count=1, folder=str(tmp_path)) for number in range(len(sockets))]
    burial = Burial(FileStore(tmp_path / "totals"))
    command = ["/bin/sh", "-c", script]
    return Crew(command, briefing, sockets=sockets, seats=seats, burial=burial, grace_seconds=30)


@pytest.mark.anyio
async def test_a_worker_that_cannot_be_started_for_a_moment_is_tried_again(tmp_path, monkeypatch, caplog):
    tries = []
    really_open = anyio.open_process

    async def sometimes(*args, **given):
        tries.append(args)
        if len(tries) == 2:
            raise OSError(errno.EAGAIN, os.strerror(errno.EAGAIN))
        return await really_open(*args, **given)

    def briefing(seat, descriptor):
        if seat.life == 3:
            crew.stop()
        return b"die\n"

    monkeypatch.setattr(anyio, "open_process", sometimes)
    crew = crew_of(tmp_path, DIES, briefing, listening_sockets("127.0.0.1", 0, 1))
    with anyio.fail_after(30):
        await crew.run()
    assert len(tries) == 3
    assert f"worker 0 could not be started: {os.strerror(errno.EAGAIN)}" in caplog.messages


@only_linux
@pytest.mark.anyio
async def test_after_eight_quick_deaths_nobody_waits_in_the_line_of_a_worker_that_may_never_come(tmp_path, caplog):
    sockets = listening_sockets("127.0.0.1", 0, 1)
    port = sockets[0].getsockname()[1]
    seen = []

    def briefing(seat, descriptor):
        with socket.socket(fileno=os.dup(descriptor)) as given:
            listens = given.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
            seen.append((seat.life, given.getsockname()[1] == port, bool(listens)))
        if seat.life == 10:
            crew.stop()
        return b"die\n"

    crew = crew_of(tmp_path, DIES, briefing, sockets)
    with anyio.fail_after(30):
        await crew.run()
    assert seen == [(life, True, life <= 8) for life in range(1, 11)]
    assert sum("died 8 times in a row" in each for each in caplog.messages) == 1


@only_linux
def test_a_door_that_is_shut_leaves_all_connections_to_the_others_until_the_next_life_listens():
    sockets = listening_sockets("127.0.0.1", 0, 2)
    port = sockets[0].getsockname()[1]

    def taken_by(listening):
        clients = [socket.create_connection(("127.0.0.1", port), timeout=10) for _ in range(64)]
        listening.setblocking(False)
        taken = 0
        while True:
            try:
                listening.accept()[0].close()
            except BlockingIOError:
                break
            taken += 1
        for each in clients:
            each.close()
        return taken

    door = Door(sockets[0])
    assert door.descriptor() == sockets[0].fileno()
    door.shut()
    door.shut()
    assert taken_by(sockets[1]) == 64
    with socket.socket(fileno=os.dup(door.descriptor())) as next_life:
        assert taken_by(sockets[1]) == 64
        next_life.listen(BACKLOG)
        assert 0 < taken_by(next_life) < 64
    door.close()
    sockets[1].close()
