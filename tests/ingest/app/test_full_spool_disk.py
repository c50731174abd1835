"""`kpl serve --spool` on a disk that is full and has room again: nothing is acknowledged and then thrown away."""

import itertools
import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.kpl_process import Running, started
from tests.support.small_disk import MIB, fill_disk, free_disk, mounted_disk
from tests.support.waiting import wait_until

pytestmark = [pytest.mark.long, pytest.mark.timeout(120)]
DISK_BYTES = 64 * MIB
HUNDRED = {"records": [{"partition_key": f"k{number}", "data": "x" * 100} for number in range(100)]}


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    with mounted_disk(tmp_path, size_bytes=DISK_BYTES) as disk:
        yield disk


class Gateway:
    """What a client, a probe and a scrape hear from a running `kpl serve`."""

    def __init__(self, serve: Running, client: httpx.Client) -> None:
        self.url = serve.stdout.readline().rsplit(maxsplit=1)[-1]
        self._client = client

    def put(self, ack: str) -> httpx.Response:
        return self._client.post(f"{self.url}/v1/streams/orders/records?ack={ack}", json=HUNDRED)

    def workers(self) -> dict[str, int]:
        """The process of each worker that runs."""
        workers = self._client.get(f"{self.url}/v1/stats").json()["workers"]
        return {number: each["process_id"] for number, each in workers.items()}

    def spool_check(self) -> tuple[int, str, dict[str, Any]]:
        answer = self._client.get(f"{self.url}/readyz")
        document = answer.json()
        return answer.status_code, document["status"], document["checks"]["spool"]

    def metric(self, name: str) -> float:
        found = re.search(rf"^{name}(?:\{{.*\}})? (\S+)$", self._client.get(f"{self.url}/metrics").text, re.MULTILINE)
        assert found is not None, name
        return float(found[1])

    def stores(self) -> bool:
        return bool(self.spool_check()[2]["detail"] == "stores records")


@pytest.fixture
def arguments(disk: Path) -> tuple[str, ...]:
    return ("serve", "--local", "--port", "0", "--stream", "orders:4", "--spool", str(disk / "spool.db"))


STORES = (200, "ready", {"ready": True, "detail": "stores records"})
FAILING, BYPASSED = "kinesis_producer_spool_failing", "kinesis_producer_spool_bypassed_records_total"


def test_queued_and_delivered_go_straight_to_kinesis_while_the_disk_is_full(
    disk: Path, arguments: tuple[str, ...]
) -> None:
    with started(*arguments) as serve, httpx.Client(timeout=20) as client:
        gateway = Gateway(serve, client)
        assert gateway.put("spooled").status_code == 202
        assert gateway.spool_check() == STORES
        assert (gateway.metric(FAILING), gateway.metric(BYPASSED)) == (0, 0)
        fill_disk(disk)
        assert [gateway.put("queued").status_code for _ in range(13)] == [202] * 13
        wait_until(lambda: gateway.metric(FAILING) == 1, "the metric shows the full disk")
        delivered = gateway.put("delivered")
        assert (delivered.status_code, delivered.json()["delivered"]) == (200, 100)
        refused = gateway.put("spooled")
        assert refused.status_code == 503
        assert "the disk that holds it is full" in refused.json()["detail"]
        assert refused.headers["retry-after"]
        detail = "cannot store; records go straight to Kinesis, and requests with ack=spooled get 503"
        assert gateway.spool_check() == (200, "ready", {"ready": True, "detail": detail})
        wait_until(lambda: gateway.metric("kinesis_producer_outstanding_records") == 0, "all are delivered")
        assert gateway.metric("kinesis_producer_accepted_records_total") == 1_500
        assert gateway.metric("kinesis_producer_lost_records_total") == 0
        assert gateway.metric(BYPASSED) == 1_400
        free_disk(disk, size_bytes=DISK_BYTES)
        wait_until(gateway.stores, "the spool stores again")
        assert gateway.spool_check() == STORES
        assert gateway.metric(FAILING) == 0
        assert gateway.put("spooled").status_code == 202
        serve.process.terminate()
        assert serve.end() == 0
        said = serve.stderr.read()
    assert said.count("the spool cannot store; until it can, records go straight to Kinesis") == 1
    assert said.count("the spool stores again, after") == 1
    assert "1,600 accepted: 1,600 delivered, 0 failed, 0 buffered" in said


def test_with_refuse_every_request_gets_503_until_the_disk_has_room(
    disk: Path, arguments: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KPL_INGEST_SPOOL_FAILURE", "refuse")
    with started(*arguments) as serve, httpx.Client(timeout=20) as client:
        gateway = Gateway(serve, client)
        # Its write is over, unlike that of a queued one.
        assert gateway.put("spooled").status_code == 202
        fill_disk(disk)
        # The one that finds out was accepted, so it is delivered.
        assert gateway.put("queued").status_code == 202
        wait_until(lambda: not gateway.stores(), "the spool has failed")
        for ack in ("queued", "delivered", "spooled"):
            refused = gateway.put(ack)
            assert refused.status_code == 503
            assert "the disk that holds it is full" in refused.json()["detail"]
        assert gateway.spool_check() == (503, "not ready", {"ready": False, "detail": "cannot store; puts are refused"})
        free_disk(disk, size_bytes=DISK_BYTES)
        wait_until(gateway.stores, "the spool stores again")
        assert [gateway.put(ack).status_code for ack in ("queued", "delivered", "spooled")] == [202, 200, 202]
        serve.process.terminate()
        assert serve.end() == 0
        said = serve.stderr.read()
    assert said.count("the spool cannot store; until it can, puts are refused") == 1
    assert "500 accepted: 500 delivered, 0 failed, 0 buffered" in said


@pytest.mark.timeout(240)
def test_a_worker_that_dies_on_a_full_disk_is_started_again_until_there_is_room(
    disk: Path, arguments: tuple[str, ...]
) -> None:
    with started(*arguments, "--workers", "2") as serve, httpx.Client(timeout=20) as client:
        gateway = Gateway(serve, client)
        fill_disk(disk)
        victim = gateway.workers()["1"]
        os.kill(victim, signal.SIGKILL)
        said = list(itertools.takewhile(lambda line: "worker 1 exited with status" not in line, serve.stderr))
        # It cannot open its spool, and is started again and again. The other one accepts all connections meanwhile.
        assert [gateway.put("queued").status_code for _ in range(20)] == [202] * 20
        free_disk(disk, size_bytes=DISK_BYTES)
        wait_until(lambda: len(gateway.workers()) == 2 and gateway.workers()["1"] != victim, "a replacement")
        wait_until(gateway.stores, "the spool stores again")
        serve.process.terminate()
        assert serve.end() == 0
        said += serve.stderr
    assert any("spool-1.db: the disk that holds it is full" in line for line in said), said
    assert said[-1] == "stopped; 2,000 accepted: 2,000 delivered, 0 failed, 0 buffered\n"
