"""The supervisor with real processes: workers that die, cannot start, never stop or die in the middle of a report."""

import errno
import json
import os
import socket
import stat
import sys
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path

import anyio
import anyio.lowlevel
import pytest

from kpl_core.backoff_formula import ExponentialBackoff
from kpl_integrations.ingest.http.listening import BACKLOG, listening_sockets
from kpl_integrations.ingest.stats import GatewayTotals
from kpl_integrations.ingest.workers import supervisor as supervisor_module
from kpl_integrations.ingest.workers.link import Descriptors, WorkerIdentity
from kpl_integrations.ingest.workers.peer_stats import ANSWER_SECONDS
from kpl_integrations.ingest.workers.supervisor import Supervisor, WorkerFailed, WorkerSocket
from kpl_integrations.ingest.workers.totals import decode_totals
from tests.support.waiting import until

DIES = ("/bin/sh", "-c", "read instructions; echo ready >&0; exit 3")
FAKE_WORKER = (sys.executable, "-m", "tests.ingest.workers.fake_worker")
# Python processes start slowly while other tests run.
_SECONDS = 60
# Each test starts several processes.
pytestmark = [pytest.mark.long, pytest.mark.timeout(180)]
only_linux = pytest.mark.skipif(sys.platform != "linux", reason="elsewhere the workers share one socket")


@pytest.fixture(autouse=True)
def _no_backoff(monkeypatch):
    monkeypatch.setattr(supervisor_module, "_RESTART_BACKOFF", ExponentialBackoff(base_seconds=0.0, cap_seconds=0.0))
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[3]))


class Workers:
    """A supervisor of fake workers; `orders` are, for each worker number, those of its first, second ... process."""

    def __init__(
        self,
        *orders: Sequence[Mapping[str, object]],
        grace_seconds: float = 30,
        sockets: Sequence[socket.socket] = (),
        drains: Sequence[str] = (),
    ) -> None:
        self.orders = [list(each) for each in orders]
        self.started = [0] * len(orders)
        self.supervisor = Supervisor(
            FAKE_WORKER,
            self._instructions,
            sockets=sockets,
            identities=[
                WorkerIdentity(worker=number, count=2, folder="/nowhere", drains=drains[number] if drains else "")
                for number in range(len(orders))
            ],
            grace_seconds=grace_seconds,
        )

    def _instructions(self, identity: WorkerIdentity, descriptors: Descriptors) -> bytes:
        del descriptors
        orders = self.orders[identity.worker]
        order = orders[min(self.started[identity.worker], len(orders) - 1)]
        self.started[identity.worker] += 1
        return json.dumps({"worker": identity.worker, "accepted": 1, "tenants": 1, "then": "wait"} | {**order}).encode()

    async def run_until(self, condition: Callable[[], bool]) -> GatewayTotals:
        """Run until the condition holds; stop and return the sum over all workers."""

        async def stop() -> None:
            await until(condition)
            self.supervisor.stop()

        with anyio.fail_after(_SECONDS):
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(stop)
                totals = await self.supervisor.run()
        return totals


def asked(result: Path) -> tuple[float, GatewayTotals]:
    """Return the longest wait in seconds and the last sum that a fake worker wrote."""
    seconds, _, totals = result.read_bytes().partition(b" ")
    return float(seconds), decode_totals(totals)


def accepted(totals: GatewayTotals) -> int:
    return totals.stats.records.accepted


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.mark.anyio
async def test_a_worker_that_dies_in_the_middle_of_a_report_keeps_its_last_whole_report():
    workers = Workers([{"accepted": 7, "then": "tear"}, {"accepted": 2}], [{"accepted": 3}])
    totals = await workers.run_until(lambda: workers.started[0] == 2 and accepted(workers.supervisor.totals()) == 12)
    assert accepted(totals) == 12
    assert totals.stats.workers["0"].deaths == 1


@pytest.mark.anyio
async def test_the_sum_never_falls_while_one_worker_dies_again_and_again():
    workers = Workers([{"then": "die"}, {"then": "die"}, {"then": "die"}, {}], [{"accepted": 3}])
    seen = [0]

    def is_over() -> bool:
        seen.append(accepted(workers.supervisor.totals()))
        return workers.started[0] == 4 and seen[-1] == 3 + 1 + 3

    totals = await workers.run_until(is_over)
    assert seen == sorted(seen)
    assert accepted(totals) == 7


@pytest.mark.anyio
async def test_processes_with_the_same_id_are_counted_separately():
    """The invented reports all name one process id, as if the system had given a dead process's id to the next."""
    workers = Workers([{"accepted": 5, "then": "die"}, {"accepted": 2}], [{"accepted": 3}])
    totals = await workers.run_until(lambda: accepted(workers.supervisor.totals()) == 10)
    assert accepted(totals) == 10


@pytest.mark.anyio
async def test_a_worker_that_asks_gets_the_sum_of_ten_thousand_tenants(tmp_path):
    result = tmp_path / "sum.json"
    other = {"accepted": 2, "tenants": 10_000}
    workers = Workers([{"accepted": 3, "tenants": 10_000, "then": "ask", "result": str(result)}], [other], [other])
    await workers.run_until(result.exists)
    stats = asked(result)[1].stats
    assert len(stats.tenants) == 10_000
    # The others are included once they have reported for the first time.
    assert {each.accepted_records for each in stats.tenants.values()} <= {3, 5, 7}
    assert stats.records.accepted == sum(each.accepted_records for each in stats.tenants.values())


@pytest.mark.anyio
async def test_a_worker_that_hangs_keeps_its_last_report_and_is_killed_after_the_grace(tmp_path, caplog):
    result = tmp_path / "sum.json"
    workers = Workers([{"then": "hang"}], [{"accepted": 4, "then": "ask", "result": str(result)}], grace_seconds=0.5)
    totals = await workers.run_until(lambda: result.exists() and accepted(workers.supervisor.totals()) == 5)
    assert accepted(totals) == 5
    assert "worker 0 did not stop within 0.5 s and is killed" in caplog.messages
    assert "worker 0 was ended by SIGKILL while stopping" in caplog.messages


@pytest.mark.anyio
async def test_two_workers_that_ask_at_once_both_get_the_sum(tmp_path):
    results = [tmp_path / name for name in ("one", "other")]
    orders = [
        {"accepted": number, "then": "ask", "times": 200, "result": str(result)}
        for number, result in enumerate(results, 1)
    ]
    await Workers([orders[0]], [orders[1]]).run_until(lambda: all(result.exists() for result in results))
    for longest, totals in map(asked, results):
        assert longest < ANSWER_SECONDS
        # The other may have started after the last question.
        assert accepted(totals) in {1, 2, 3}
    assert max(accepted(asked(result)[1]) for result in results) == 3


@pytest.mark.anyio
async def test_a_hung_worker_delays_each_question_by_half_a_second_at_most_however_often_it_is_asked(tmp_path):
    result = tmp_path / "sum.json"
    workers = Workers(
        [{"then": "hang"}], [{"accepted": 4, "then": "ask", "times": 6, "result": str(result)}], grace_seconds=0.5
    )
    await workers.run_until(lambda: result.exists() and accepted(workers.supervisor.totals()) == 5)
    longest, totals = asked(result)
    assert longest < ANSWER_SECONDS
    assert accepted(totals) in {4, 5}


@pytest.mark.anyio
async def test_a_report_that_cannot_be_read_does_not_make_old_figures_look_new(caplog):
    workers = Workers([{"accepted": 2, "then": "garble"}], grace_seconds=0.5)

    def silent_seconds() -> float:
        found = workers.supervisor.totals().stats.workers.values()
        return max((each.silent_seconds for each in found), default=0.0)

    assert accepted(await workers.run_until(lambda: silent_seconds() > 2.0)) == 2
    assert "the report of worker 0 cannot be read" in caplog.text


@pytest.mark.anyio
async def test_a_worker_that_dies_before_its_sum_arrives_disturbs_no_other(tmp_path, caplog):
    result = tmp_path / "sum.json"
    asking = {"accepted": 4, "then": "ask", "times": 20, "result": str(result)}
    workers = Workers([{"then": "ask and die"}] * 5 + [{"accepted": 2}], [asking])
    totals = await workers.run_until(lambda: result.exists() and accepted(workers.supervisor.totals()) == 5 + 2 + 4)
    assert totals.stats.workers["0"].deaths == 5
    assert asked(result)[0] < ANSWER_SECONDS
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


@pytest.mark.anyio
async def test_a_new_worker_shows_the_sum_of_all_even_if_the_supervisor_does_not_answer(tmp_path, monkeypatch):
    """A worker that replaces a dead one would show its own counts only, and the sum in `/metrics` would fall."""

    async def no_answer(*_: object) -> None:
        await anyio.lowlevel.checkpoint()

    monkeypatch.setattr(Supervisor, "_answer", no_answer)
    result = tmp_path / "sum.json"
    workers = Workers([{"accepted": 7, "then": "die"}, {"accepted": 2, "then": "ask", "result": str(result)}], [{}])
    await workers.run_until(result.exists)
    assert accepted(asked(result)[1]) in {7, 7 + 1}


@pytest.mark.anyio
async def test_a_worker_without_a_socket_that_ends_in_order_is_not_replaced():
    workers = Workers([{}])
    assert accepted(await workers.run_until(lambda: accepted(workers.supervisor.totals()) == 1)) == 1
    assert workers.started == [1]


@pytest.mark.anyio
async def test_a_drainer_that_has_ended_is_no_worker_and_is_not_reported_as_silent(monkeypatch, caplog):
    """The log told the operator to kill the process, whose id may belong to another one."""
    workers = Workers([{"accepted": 5, "then": "end"}], [{"accepted": 3}], drains=("spool.db", "spool-1.db"))
    seen = [0]

    def is_over() -> bool:
        totals = workers.supervisor.totals()
        seen.append(accepted(totals))
        if (seen[-1], list(totals.stats.workers)) != (8, ["1"]):
            return False
        # A fake worker reports once, so the one that lives is silent. One that is about to exit could be, too.
        monkeypatch.setattr(supervisor_module, "SILENT_SECONDS", 0.2)
        return "the drainer of spool-1.db has not reported" in caplog.text

    assert accepted(await workers.run_until(is_over)) == 8
    assert seen == sorted(seen)
    (silent,) = (each for each in caplog.messages if "has not reported" in each)
    assert silent.startswith("the drainer of spool-1.db has")


def supervisor_of(command, instructions, sockets):
    identities = [WorkerIdentity(worker=number, count=1, folder="/nowhere") for number in range(len(sockets))]
    return Supervisor(command, instructions, sockets=sockets, identities=identities, grace_seconds=30)


@pytest.mark.anyio
async def test_a_worker_that_cannot_begin_stops_the_gateway_with_its_status():
    command = ("/bin/sh", "-c", "read instructions; exit 3")
    supervisor = supervisor_of(command, lambda *_: b"{}", listening_sockets("127.0.0.1", 0, 2))
    with anyio.fail_after(_SECONDS), pytest.raises(WorkerFailed, match="exited with status 3"):
        await supervisor.run()


@pytest.mark.anyio
async def test_a_worker_that_cannot_be_started_for_a_moment_is_started_again(monkeypatch, caplog):
    attempts = []
    really_open = anyio.open_process

    async def sometimes(*args, **given):
        attempts.append(args)
        if len(attempts) == 2:
            raise OSError(errno.EAGAIN, os.strerror(errno.EAGAIN))
        return await really_open(*args, **given)

    def instructions(identity, descriptors):
        if len(attempts) == 3:
            supervisor.stop()
        return b"{}"

    monkeypatch.setattr(anyio, "open_process", sometimes)
    supervisor = supervisor_of(DIES, instructions, listening_sockets("127.0.0.1", 0, 1))
    with anyio.fail_after(_SECONDS):
        await supervisor.run()
    assert len(attempts) == 3
    assert f"worker 0 could not be started: {os.strerror(errno.EAGAIN)}" in caplog.messages


@pytest.mark.anyio
async def test_a_worker_that_starts_while_the_gateway_stops_gets_sockets(monkeypatch):
    """It got the numbers of sockets that were closed meanwhile, which other files may have."""
    really_open = anyio.open_process
    others: list[int] = []
    passed: list[bool] = []

    async def slowly(*args, pass_fds, **given):
        supervisor.stop()
        others.extend(descriptor for _ in range(10) for descriptor in os.pipe())
        passed.extend(stat.S_ISSOCK(os.fstat(each).st_mode) for each in pass_fds[1:])
        return await really_open(*args, pass_fds=pass_fds, **given)

    monkeypatch.setattr(anyio, "open_process", slowly)
    supervisor = supervisor_of(DIES, lambda *_: b"{}", listening_sockets("127.0.0.1", 0, 2))
    with anyio.fail_after(_SECONDS):
        await supervisor.run()
    for each in others:
        os.close(each)
    assert len(passed) >= 2
    assert all(passed)


@only_linux
@pytest.mark.anyio
async def test_another_worker_accepts_from_the_socket_of_a_dead_one_until_its_replacement_listens(tmp_path):
    notes = tmp_path / "notes"
    notes.touch()
    workers = Workers(
        [{"then": "note", "result": str(notes)}],
        [{"then": "die"}, {"then": "die"}, {"then": "wait"}],
        sockets=listening_sockets("127.0.0.1", 0, 2),
    )

    def lines():
        return notes.read_text().splitlines()

    await workers.run_until(lambda: workers.started[1] == 3 and len(lines()) > 1 and lines()[-1] == "[]")
    assert "[1]" in lines()
    # Each order changes something.
    assert all(one != other for one, other in pairwise(lines()))


@only_linux
@pytest.mark.anyio
async def test_another_worker_accepts_once_a_dying_one_has_no_connection_though_its_status_is_not_known(tmp_path):
    notes = tmp_path / "notes"
    notes.touch()
    workers = Workers(
        [{"then": "note", "result": str(notes)}],
        [{"then": "disconnect"}],
        sockets=listening_sockets("127.0.0.1", 0, 2),
        grace_seconds=0.5,
    )

    def is_taken_over():
        # The first order may also say that the other one has not started yet.
        return accepted(workers.supervisor.totals()) == 2 and notes.read_text() in {"[1]\n", "[1]\n[]\n[1]\n"}

    await workers.run_until(is_taken_over)
    assert workers.started[1] == 1


@only_linux
@pytest.mark.anyio
async def test_after_eight_quick_deaths_the_socket_listens_no_more_until_a_worker_does(caplog):
    sockets = listening_sockets("127.0.0.1", 0, 1)
    port = sockets[0].getsockname()[1]
    seen = []

    def instructions(identity, descriptors):
        with socket.socket(fileno=os.dup(descriptors.sockets[0])) as given:
            listens = given.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
            seen.append((given.getsockname()[1] == port, bool(listens)))
        if len(seen) == 10:
            supervisor.stop()
        return b"{}"

    supervisor = supervisor_of(DIES, instructions, sockets)
    with anyio.fail_after(_SECONDS):
        await supervisor.run()
    assert seen == [(True, start <= 8) for start in range(1, 11)]
    assert sum("died 8 times in a row" in each for each in caplog.messages) == 1


@only_linux
@pytest.mark.anyio
async def test_when_the_last_of_several_dying_workers_ends_connections_to_all_of_them_are_refused(
    tmp_path, monkeypatch, caplog
):
    """The one that died first could not be abandoned: the other still had its socket."""
    monkeypatch.setattr(supervisor_module, "_MAX_QUICK_DEATHS", 1)
    monkeypatch.setattr(supervisor_module, "_RESTART_BACKOFF", ExponentialBackoff(base_seconds=60, cap_seconds=60))
    sockets = listening_sockets("127.0.0.1", 0, 2)
    port = sockets[0].getsockname()[1]
    end = tmp_path / "end"

    def instructions(identity, descriptors):
        return b"dies" if identity.worker == 1 else b"lives"

    lives = f'while [ "$way" = lives ] && [ ! -e "{end}" ]; do sleep 0.02; done'
    supervisor = supervisor_of(("/bin/sh", "-c", f"read way; echo ready >&0; {lives}; exit 3"), instructions, sockets)

    def is_refused():
        try:
            socket.create_connection(("127.0.0.1", port), timeout=10).close()
        except ConnectionRefusedError:
            return True
        return False

    with anyio.fail_after(_SECONDS):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(supervisor.run)
            await until(lambda: "worker 1 exited with status 3; it is replaced in 60 s" in caplog.messages)
            assert not is_refused()
            end.touch()
            await until(lambda: "worker 0 exited with status 3; it is replaced in 60 s" in caplog.messages)
            refused = is_refused()
            supervisor.stop()
    assert refused


@only_linux
@pytest.mark.anyio
async def test_a_socket_that_a_starting_worker_has_stays_open():
    """It would keep the socket open, and once it listens it would not accept the connections that wait there."""
    sockets = listening_sockets("127.0.0.1", 0, 2)
    first = os.fstat(sockets[0].fileno())
    same = []

    def instructions(identity, descriptors):
        if identity.worker == 1:
            return b"starts and never listens"
        same.append(os.path.samestat(os.fstat(descriptors.sockets[0]), first))
        if len(same) == 12:
            supervisor.stop()
        return b"dies"

    waits = 'while read order; do case "$order" in stop*) exit 0;; esac; done'
    command = ("/bin/sh", "-c", f'read way; [ "$way" = dies ] && echo ready >&0 && exit 3; {waits}')
    supervisor = supervisor_of(command, instructions, sockets)
    with anyio.fail_after(_SECONDS):
        await supervisor.run()
    assert same == [True] * 12


@only_linux
def test_an_abandoned_socket_leaves_all_connections_to_the_others_until_the_next_worker_listens():
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

    worker_socket = WorkerSocket(sockets[0])
    assert worker_socket.descriptor() == sockets[0].fileno()
    worker_socket.abandon()
    worker_socket.abandon()
    assert taken_by(sockets[1]) == 64
    with socket.socket(fileno=os.dup(worker_socket.descriptor())) as next_socket:
        assert taken_by(sockets[1]) == 64
        next_socket.listen(BACKLOG)
        assert 0 < taken_by(next_socket) < 64
    worker_socket.close()
    sockets[1].close()
