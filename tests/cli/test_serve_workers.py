"""`kpl serve --workers`: several processes act as one gateway, under load, while they stop, and when one dies."""

import json
import os
import re
import resource
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from http.client import HTTPConnection, HTTPException
from itertools import count, pairwise
from pathlib import Path
from typing import Any, Self

import pytest

from kpl_core import decode
from kpl_core.testing import ErrorAnswer, Hang, When
from kpl_integrations.ingest.http.listening import listening_sockets
from kpl_integrations.ingest.tenants import new_api_key, stored_key
from tests.cli.conftest import Stream
from tests.support.kpl_process import Running, run, started
from tests.support.waiting import wait_until

pytestmark = [pytest.mark.long, pytest.mark.timeout(300)]

# Several processes start, on a machine that may be busy with other tests.
_SECONDS = 60
ADMIN = "an-admin-key-of-32-characters-xyz"
OUTAGE = ErrorAnswer("ServiceUnavailable", status=503)


class Gateway:
    """A running `kpl serve` of several workers; each request has its own connection."""

    def __init__(self, serve: Running) -> None:
        self.serve = serve
        self.port = int(serve.stdout.readline().rpartition(":")[2])

    def ask(self, method: str, path: str, body: Any = None, *, key: str = ADMIN) -> tuple[int, bytes]:
        """Return status and body; raise OSError or HTTPException if the worker died meanwhile."""
        connection = HTTPConnection("127.0.0.1", self.port, timeout=_SECONDS)
        headers = {"content-type": "application/json", "authorization": f"Bearer {key}"}
        with closing(connection):
            connection.request(method, path, None if body is None else json.dumps(body), headers)
            answer = connection.getresponse()
            return answer.status, answer.read()

    def post(self, stream: Stream, data: list[str], *, ack: str = "queued", key: str = "none") -> int:
        records = [{"partition_key": each, "data": each} for each in data]
        return self.ask("POST", f"/v1/streams/{stream.name}/records?ack={ack}", {"records": records}, key=key)[0]

    def end(self, *numbers: signal.Signals) -> int:
        """Send these signals; return the exit status."""
        for number in numbers:
            self.serve.process.send_signal(number)
        return self.serve.process.wait(_SECONDS)

    def stats(self) -> Any:
        return json.loads(self.ask("GET", "/v1/stats")[1])

    def counters(self) -> dict[str, float]:
        """Return the samples of all counters."""
        lines = self.ask("GET", "/metrics")[1].decode().splitlines()
        found = (line.rpartition(" ") for line in lines if re.match(r"kinesis_\w+_total(\{| )", line))
        return {name: float(value) for name, _, value in found}

    def pids(self) -> dict[str, int]:
        return {number: each["process_id"] for number, each in self.stats()["workers"].items()}

    def has_replaced(self, dead: set[int]) -> bool:
        """Return whether two workers run again, and none of the dead. A worker that is being killed may not answer."""
        with suppress(OSError, HTTPException):
            pids = self.pids().values()
            return len(pids) > 1 and not dead & set(pids)
        return False

    def all_accepted_some(self, workers: int = 2) -> bool:
        accepted = [each["accepted"] for each in self.stats()["workers"].values()]
        return len(accepted) == workers and all(accepted)

    def post_to_all(self, stream: Stream, prefix: str, *, ack: str, workers: int = 2) -> list[str]:
        """Post records until every worker accepted some; return their data."""
        given: list[str] = []
        while len(given) < 100 * workers or not self.all_accepted_some(workers):
            data = [f"{prefix} {len(given) + number}" for number in range(10)]
            assert self.post(stream, data, ack=ack) in {200, 202}
            given += data
        return given


@contextmanager
def gateway(stream: Stream, *options: str, workers: int = 2) -> Iterator[Gateway]:
    arguments = ("--workers", str(workers), "--port", "0", "--endpoint-url", stream.kinesis.endpoint_url)
    with started("serve", *arguments, *(options or ("--local",))) as serve:
        yield Gateway(serve)
        # Each test stops its gateway.
        assert serve.process.wait(_SECONDS) is not None


def stored(stream: Stream) -> list[str]:
    """Return the data of all user records in a stream."""
    found = []
    for _, data in stream.stored():
        inside = decode(data)
        found += [data.decode()] if inside is None else [each.data.decode() for each in inside]
    return found


def accounts(said: str) -> tuple[int, int]:
    """Return the accepted and delivered records of the last line."""
    match = re.search(r"stopped; ([\d,]+) accepted: ([\d,]+) delivered", said)
    assert match is not None, said
    accepted, delivered = (int(each.replace(",", "")) for each in match.groups())
    return accepted, delivered


class Load:
    """Posts from several threads until the block ends; each request has its own connection."""

    def __init__(self, running: Gateway, stream: Stream, *, ack: str) -> None:
        self._running, self._stream, self._ack = running, stream, ack
        self._numbers = count()
        self._ended = threading.Event()
        self.taken: list[str] = []
        self.statuses: Counter[int] = Counter()
        self._threads = [threading.Thread(target=self._run, daemon=True) for _ in range(4)]

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        for thread in self._threads:
            thread.join(_SECONDS)
            assert not thread.is_alive()

    def _run(self) -> None:
        while not self._ended.is_set():
            data = [f"load {next(self._numbers)}" for _ in range(10)]
            with suppress(OSError, HTTPException):
                status = self._running.post(self._stream, data, ack=self._ack)
                self.statuses[status] += 1
                if status in {200, 202}:
                    self.taken += data


def test_sigterm_under_load_drains_all_workers_and_stores_every_accepted_record(stream):
    with gateway(stream, "--local", "--drain-delay-seconds", "0.5") as running:
        with Load(running, stream, ack="queued") as load:
            wait_until(lambda: len(load.taken) > 500 and running.all_accepted_some(), "both workers to accept records")
            assert running.end(signal.SIGTERM) == 0
        said = running.serve.stderr.read()
    found = stored(stream)
    assert set(load.taken) <= set(found)
    # A request without an answer may have been accepted; no record was accepted and not stored.
    assert accounts(said) == (len(found), len(found))
    assert said.count("stopping: not ready") == 2
    assert set(load.statuses) <= {202, 503}


def test_each_worker_answers_with_the_sum_over_all_workers(stream):
    with gateway(stream) as running:
        given = running.post_to_all(stream, "sum", ack="delivered")
        for _ in range(20):
            stats = running.stats()
            assert stats["records"]["accepted"] == stats["records"]["delivered"] == len(given)
            assert stats["tenants"]["local"]["accepted_records"] == len(given)
            assert stats["streams"][stream.name]["delivered"] == len(given)
            assert sum(each["accepted"] for each in stats["workers"].values()) == len(given)
            counters = running.counters()
            assert counters["kinesis_producer_accepted_records_total"] == len(given)
            delivered = 'kinesis_producer_records_total{outcome="delivered",reason="",tier="normal"}'
            assert counters[delivered] == len(given)
        # Each worker answered some of these requests.
        answered = [each["requests"] for each in running.stats()["workers"].values()]
        assert all(answered)
        assert running.end(signal.SIGTERM) == 0


def test_a_killed_worker_is_replaced_and_no_answered_record_is_missing_and_no_counter_falls(stream):
    with gateway(stream) as running:
        before = running.pids()
        seen: list[dict[str, float]] = []
        with Load(running, stream, ack="delivered") as load:
            wait_until(running.all_accepted_some, "both workers to accept records")
            seen.append(running.counters())
            os.kill(before["1"], signal.SIGKILL)

            def is_replaced() -> bool:
                with suppress(OSError, HTTPException):
                    seen.append(running.counters())
                return running.has_replaced({before["1"]})

            wait_until(is_replaced, "a replacement")
            taken = len(load.taken)
            wait_until(
                lambda: running.all_accepted_some() and len(load.taken) > taken + 100,
                "the replacement to accept records",
            )
            seen.append(running.counters())
        stats = running.stats()
        assert stats["workers"]["1"]["deaths"] == 1
        assert running.pids()["0"] == before["0"]
        records = stats["records"]
        places = ("delivered", "spooled", "dead_lettered", "buffered", "lost")
        assert records["accepted"] == sum(records[place] for place in places) + sum(records["failed"].values())
        for earlier, later in pairwise(seen):
            assert {name: value for name, value in earlier.items() if later.get(name, 0.0) < value} == {}
        status = running.end(signal.SIGTERM)
        assert status == (1 if records["lost"] else 0)
        assert "worker 1 was ended by SIGKILL; it is replaced in" in running.serve.stderr.read()
    assert set(load.taken) <= set(stored(stream))


def test_what_killed_workers_accepted_after_their_last_report_is_lost_and_nothing_else(stream):
    with gateway(stream) as running:
        delivered = running.post_to_all(stream, "delivered", ack="delivered")
        pids = running.pids().values()
        # A stopped supervisor reads no report.
        running.serve.process.send_signal(signal.SIGSTOP)
        with stream.fault(Hang(), When(operation="PutRecords")):
            for number in range(20):
                assert running.post(stream, [f"lost {number} {record}" for record in range(10)]) == 202
            for pid in pids:
                os.kill(pid, signal.SIGKILL)
        running.serve.process.send_signal(signal.SIGCONT)
        wait_until(lambda: running.has_replaced(set(pids)), "new workers")
        records = running.stats()["records"]
        assert (records["accepted"], records["delivered"], records["lost"]) == (
            len(delivered) + 200,
            len(delivered),
            200,
        )
        assert b"\nkinesis_ingest_lost_records 200.0\n" in running.ask("GET", "/metrics")[1]
        assert running.end(signal.SIGTERM) == 1
        said = running.serve.stderr.read()
        assert "200 WorkerDied" in said
        lines = re.findall(r"worker \d died with (\d+) acknowledged records, which are lost", said)
        assert sum(map(int, lines)) == 200


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere the workers share one socket")
def test_no_connection_waits_while_one_worker_drains_and_is_replaced(stream, monkeypatch):
    """Its delay and its last answers take seconds, in which the kernel still deals it connections."""
    monkeypatch.setenv("KPL_INGEST_DRAIN_DELAY_SECONDS", "1")
    with gateway(stream) as running:
        pid = running.pids()["1"]
        os.kill(pid, signal.SIGTERM)
        longest = 0.0
        while not running.has_replaced({pid}):
            began = time.monotonic()
            # 503: the worker that stops takes no more records.
            assert running.post(stream, ["drained"]) in {202, 503}
            longest = max(longest, time.monotonic() - began)
        assert longest < 1.0
        assert running.end(signal.SIGTERM) == 0


def test_the_replacement_of_a_killed_worker_delivers_its_spool(stream, tmp_path):
    file = tmp_path / "gateway.toml"
    file.write_text(f"spool = '{tmp_path / 'spool.db'}'")
    with gateway(stream, "--local", "--config", str(file)) as running:
        with stream.fault(OUTAGE, When(operation="PutRecords")):
            given = running.post_to_all(stream, "spooled", ack="spooled")
            pids = running.pids()
            # An operator is writing the file for a later start.
            file.write_text("spool = ")
            for pid in pids.values():
                os.kill(pid, signal.SIGKILL)
            wait_until(lambda: running.has_replaced(set(pids.values())), "new workers")
        wait_until(lambda: set(given) <= set(stored(stream)), "the records of the dead workers")
        wait_until(
            lambda: running.stats()["records"]["spooled"] == running.stats()["records"]["buffered"] == 0,
            "all records to be delivered",
        )
        records = running.stats()["records"]
        assert records["lost"] == 0
        assert records["accepted"] == records["delivered"] == len(given)
        assert running.end(signal.SIGTERM) == 0
    assert sorted(each.name for each in tmp_path.glob("*.db")) == ["spool-0.db", "spool-1.db"]


def test_records_in_the_spool_of_a_killed_worker_are_lost_if_the_file_is_gone(stream, tmp_path):
    with gateway(stream, "--local", "--spool", str(tmp_path / "spool.db")) as running:
        with stream.fault(OUTAGE, When(operation="PutRecords")):
            given = running.post_to_all(stream, "spooled", ack="spooled")
            stats = running.stats()
            gone, pid = stats["workers"]["0"]["accepted"], stats["workers"]["0"]["process_id"]
            # A stopped supervisor starts no other worker.
            running.serve.process.send_signal(signal.SIGSTOP)
            os.kill(pid, signal.SIGKILL)
            for each in tmp_path.glob("spool-0.db*"):
                each.unlink()
            running.serve.process.send_signal(signal.SIGCONT)
            wait_until(lambda: running.has_replaced({pid}), "a new worker")
            records = running.stats()["records"]
            assert (records["accepted"], records["lost"], records["delivered"]) == (len(given), gone, 0)
        assert f"\nkinesis_ingest_lost_records {float(gone)}\n" in running.ask("GET", "/metrics")[1].decode()
        wait_until(
            lambda: running.stats()["records"]["delivered"] == len(given) - gone, "the records of the other worker"
        )
        assert running.end(signal.SIGTERM) == 1
        said = running.serve.stderr.read()
        assert f"worker 0 did not find {gone} acknowledged records in its spool, which are lost" in said
        assert f"{gone} WorkerDied" in said
    assert len(set(stored(stream))) == len(given) - gone


def tenants_file(folder: Path, **rates: str) -> tuple[Path, dict[str, str]]:
    """Write a file of these tenants; return its path, and their keys."""
    keys = {name: new_api_key() for name in rates}
    path = folder / "tenants.toml"
    write_tenants(path, keys, **rates)
    return path, keys


def write_tenants(path: Path, keys: dict[str, str], **rates: str) -> None:
    parts = [f'[[tenant]]\nid = "{name}"\napi_keys = ["{stored_key(keys[name])}"]\n{rates[name]}\n' for name in rates]
    # Replace the file in one step, as a careful editor does.
    path.with_suffix(".new").write_text("\n".join(parts))
    path.with_suffix(".new").replace(path)


def test_a_tenants_rate_holds_for_all_workers_together(stream, tmp_path, monkeypatch):
    """Bound: burst + 1.1 x rate x time, and one request by which each worker may exceed its part of the burst."""
    monkeypatch.setenv("KPL_INGEST_ADMIN_KEY", ADMIN)
    rate, burst_seconds, workers = 100, 0.5, 2
    path, keys = tenants_file(tmp_path, noisy=f"records_per_second = {rate}\nburst_seconds = {burst_seconds}")
    with gateway(stream, "--tenants", str(path)) as running:
        taken: list[int] = []
        statuses: set[int] = set()
        began_at = time.monotonic()

        def flood() -> None:
            while time.monotonic() < began_at + 6.0:
                status = running.post(stream, ["x"] * 5, key=keys["noisy"])
                statuses.add(status)
                taken.append(5 if status == 202 else 0)

        threads = [threading.Thread(target=flood) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(_SECONDS)
            assert not thread.is_alive()
        seconds = time.monotonic() - began_at
        assert running.all_accepted_some()
        assert running.stats()["tenants"]["noisy"]["accepted_records"] == sum(taken)
        running.end(signal.SIGINT)
    assert sum(taken) <= rate * burst_seconds + 1.1 * rate * seconds + workers * 5
    assert statuses == {202, 429}


def test_a_changed_tenants_file_reaches_every_worker(stream, tmp_path, monkeypatch):
    monkeypatch.setenv("KPL_INGEST_RELOAD_SECONDS", "0.1")
    path, keys = tenants_file(tmp_path, first="")
    with gateway(stream, "--tenants", str(path), workers=3) as running:
        assert running.post(stream, ["x"], key=keys["first"]) == 202
        keys["second"] = new_api_key()
        assert running.post(stream, ["x"], key=keys["second"]) == 401
        write_tenants(path, keys, second="")

        def has_reached_all() -> bool:
            """Return whether 30 connections in a row, which reach all three workers, see the new file."""
            known = {running.post(stream, ["x"], key=keys["second"]) for _ in range(30)}
            gone = {running.post(stream, ["x"], key=keys["first"]) for _ in range(30)}
            return (known, gone) == ({202}, {401})

        wait_until(has_reached_all, "all workers to read the new file")
        running.end(signal.SIGINT)


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    # A zombie still has a process id.
    with suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


def test_workers_drain_and_exit_when_their_supervisor_is_killed(stream):
    with gateway(stream) as running:
        given = running.post_to_all(stream, "orphan", ack="queued")
        pids = running.pids().values()
        running.serve.process.kill()
        wait_until(lambda: not any(is_alive(pid) for pid in pids), "the workers to exit")
    assert set(given) <= set(stored(stream))


def test_workers_that_cannot_start_make_the_command_fail_with_the_reason(stream, tmp_path):
    file = tmp_path / "no-folder"
    file.write_text("")
    options = ("--local", "--port", "0", "--workers", "2", "--endpoint-url", stream.kinesis.endpoint_url)
    with started("serve", *options, "--spool", str(file / "spool.db")) as serve:
        assert serve.process.wait(_SECONDS) == 3
        said = serve.stderr.read()
    assert "no-folder" in said
    assert "Traceback" not in said


def test_a_port_in_use_is_refused_although_workers_could_share_it(kpl):
    with listening_sockets("127.0.0.1", 0, 1)[0] as first:
        port = first.getsockname()[1]
        outcome = kpl("serve", "--local", "--workers", "2", "--port", str(port))
        assert outcome.status == 3
        assert f"port {port} of 127.0.0.1 cannot be used" in outcome.err


def test_a_signal_to_the_whole_process_group_is_one_request_to_stop(stream):
    """A service manager may signal every process, while the supervisor passes on its own signal."""
    delay_seconds = 2.0
    with gateway(stream, "--local", "--drain-delay-seconds", str(delay_seconds)) as running:
        given = running.post_to_all(stream, "group", ack="queued")
        pids = running.pids().values()
        signalled_at = time.monotonic()
        for pid in pids:
            os.kill(pid, signal.SIGTERM)
        assert running.end(signal.SIGTERM) == 0
        # A second request would have cut the delay short.
        assert time.monotonic() - signalled_at >= delay_seconds
        assert running.serve.stderr.read().count(f"closing in {delay_seconds:g} s") == 2
    assert set(given) <= set(stored(stream))


def test_a_second_sigterm_ends_the_drain(stream, monkeypatch):
    monkeypatch.setenv("KPL_INGEST_CLOSE_SECONDS", "600")
    monkeypatch.setenv("KPL_INGEST_RECORD_TTL_MS", "600000")
    with stream.fault(OUTAGE, When(operation="PutRecords")), gateway(stream) as running:
        # One request: after a few failures the circuit breaker would reject more.
        assert running.post(stream, [f"outage {number}" for number in range(10)]) == 202
        running.serve.process.send_signal(signal.SIGTERM)
        wait_until(lambda: not is_accepting(running), "the gateway to drain")
        assert running.end(signal.SIGTERM) == 1
        assert accounts(running.serve.stderr.read()) == (10, 0)


def is_accepting(running: Gateway) -> bool:
    with suppress(OSError, HTTPException):
        return running.ask("GET", "/readyz")[0] == 200
    return False


def test_a_disk_that_is_full_at_the_start_is_refused(stream):
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    # Each write to a file fails with EFBIG in the processes that are started meanwhile.
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, hard))
    try:
        outcome = run(
            "serve", "--workers", "2", "--port", "0", "--local", "--endpoint-url", stream.kinesis.endpoint_url
        )
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert outcome.status == 3
    assert "check the disks" in outcome.err


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux changes the limits of another process")
def test_on_a_disk_that_fills_up_the_sum_stays_exact_and_no_counter_falls_when_a_worker_is_killed(stream):
    with gateway(stream) as running:
        pids = running.pids()
        for pid in (running.serve.process.pid, *pids.values()):
            resource.prlimit(pid, resource.RLIMIT_FSIZE, (0, 0))
        given = running.post_to_all(stream, "full", ack="delivered")
        assert {running.stats()["records"]["delivered"] for _ in range(10)} == {len(given)}
        before = running.counters()
        os.kill(pids["1"], signal.SIGKILL)
        wait_until(lambda: running.has_replaced({pids["1"]}), "a replacement")
        after = running.counters()
        assert {name: value for name, value in before.items() if after.get(name, 0.0) < value} == {}
        assert running.stats()["records"]["delivered"] == len(given)
        assert running.end(signal.SIGTERM) == 0
    assert set(given) <= set(stored(stream))
