"""The gateway as a process, over HTTP: killed, stopped under load, and before a Kinesis that fails at random."""

import asyncio
import math
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import httpx
import pytest

from kpl_core import decode
from kpl_core.testing import ErrorAnswer, RecordError, When
from kpl_integrations.local_kinesis import LocalKinesis, ThreadedLocalKinesis

ROOT = Path(__file__).parents[2]
STREAM = "orders"
PATH = f"/v1/streams/{STREAM}/records"


@contextmanager
def serving(endpoint_url: str, *options: str) -> Iterator[tuple["subprocess.Popen[str]", str]]:
    """Run `kpl serve` against a Kinesis; yield the process and its address."""
    command = [sys.executable, "-m", "kpl_integrations.cli", "serve", "--local", "--port", "0"]
    process = subprocess.Popen(
        [*command, "--endpoint-url", endpoint_url, *options],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    with process:
        assert process.stdout is not None
        try:
            line = process.stdout.readline()
            assert line, process.stderr and process.stderr.read()
            yield process, line.split()[-1]
        finally:
            process.kill()


def consumed(kinesis: ThreadedLocalKinesis) -> dict[str, set[tuple[str, str]]]:
    """Return, for each data, the (shard, sequence number) pairs at which a consumer finds it."""
    places: dict[str, set[tuple[str, str]]] = {}
    for stored in kinesis.call(lambda fake, _: list(fake.records(STREAM))):
        users = decode(stored.data)
        for data in [stored.data] if users is None else [each.data for each in users]:
            places.setdefault(data.decode(), set()).add((stored.shard_id, stored.sequence_number))
    return places


async def load(url: str, *, ack: str, first: int, until: asyncio.Event, workers: int = 8) -> tuple[list[str], int]:
    """Post until stopped or unanswered; return the acknowledged data, and the number of rejections."""
    acknowledged: list[str] = []
    refused = 0

    async def work(client: httpx.AsyncClient, number: int) -> None:
        nonlocal refused
        own = first + number * 100_000
        while not until.is_set():
            body = {"records": [{"partition_key": f"key-{own % 50}", "data": str(own + each)} for each in range(20)]}
            try:
                answer = await client.post(f"{url}{PATH}?ack={ack}", json=body)
            except httpx.TransportError:
                return
            if answer.status_code == 202:
                acknowledged.extend(record["data"] for record in body["records"])
            else:
                assert answer.status_code in {429, 503}, answer.text
                refused += 1
                await asyncio.sleep(0.05)
            own += 20

    async with httpx.AsyncClient(timeout=30) as client:
        await asyncio.gather(*(work(client, number) for number in range(workers)))
    return acknowledged, refused


def _wait_until_replayed(url: str) -> None:
    """Wait until nothing is spooled or buffered, provided that it decreases every thirty seconds."""
    left, seen_at = math.inf, time.monotonic()
    while True:
        document = httpx.get(f"{url}/v1/stats").json()["records"]
        now_left = document["spooled"] + document["buffered"]
        if not now_left:
            return
        if now_left < left:
            left, seen_at = now_left, time.monotonic()
        assert time.monotonic() - seen_at < 30.0, f"{now_left:,} records are left, and the replay stands still"
        time.sleep(0.1)


@pytest.mark.timeout(300)
def test_no_record_acknowledged_as_spooled_is_lost_after_kills(tmp_path: Path, is_short: bool, capsys) -> None:
    chance = random.Random(os.environ.get("TESTS_CHAOS_SEED"))
    kills = 3 if is_short else 20
    spool = ("--spool", str(tmp_path / "spool.db"))
    acknowledged: list[str] = []

    async def until_killed(process: "subprocess.Popen[str]", url: str, first: int) -> list[str]:
        loading = asyncio.create_task(load(url, ack="spooled", first=first, until=asyncio.Event()))
        await asyncio.sleep(chance.uniform(0.2, 1.0))
        process.send_signal(signal.SIGKILL)
        return (await loading)[0]

    with ThreadedLocalKinesis(LocalKinesis({STREAM: 4})) as kinesis:
        kinesis.call(lambda fake, _: fake.faults.add(RecordError(), When(probability=0.05)))
        number = 0
        # A busy machine acknowledges fewer records before a kill; then there are more kills.
        while number < kills or len(acknowledged) <= kills * 100:
            assert number < 4 * kills, f"{len(acknowledged):,} acknowledged before {number} kills"
            with serving(kinesis.endpoint_url, *spool) as (process, url):
                acknowledged += asyncio.run(until_killed(process, url, number * 10_000_000))
            number += 1
        with serving(kinesis.endpoint_url, *spool) as (process, url):
            _wait_until_replayed(url)
            process.send_signal(signal.SIGTERM)
            process.wait(30)
        places = consumed(kinesis)
    with capsys.disabled():
        print(f"\n{number} kills: {len(acknowledged):,} acknowledged as spooled")  # noqa: T201
    assert not set(acknowledged) - places.keys()


@pytest.mark.timeout(120)
def test_sigterm_under_load_accounts_for_every_accepted_record(capsys) -> None:
    async def stopped_under_load(process: "subprocess.Popen[str]", url: str) -> tuple[list[str], set[int]]:
        readiness: set[int] = set()
        until = asyncio.Event()
        loading = asyncio.create_task(load(url, ack="queued", first=0, until=until))
        await asyncio.sleep(1.0)
        process.send_signal(signal.SIGTERM)
        await asyncio.sleep(0.3)
        async with httpx.AsyncClient() as client:
            readiness.add((await client.get(f"{url}/readyz")).status_code)
        acknowledged, _ = await loading
        return acknowledged, readiness

    with ThreadedLocalKinesis(LocalKinesis({STREAM: 2})) as kinesis:
        kinesis.call(lambda fake, _: fake.faults.add(RecordError(), When(probability=0.05)))
        with serving(kinesis.endpoint_url, "--drain-delay-seconds", "1") as (process, url):
            acknowledged, readiness = asyncio.run(stopped_under_load(process, url))
            status = process.wait(60)
            assert process.stderr is not None
            said = process.stderr.read()
        places = consumed(kinesis)
    found = re.search(r"stopped; ([\d,]+) accepted: ([\d,]+) delivered, ([\d,]+) failed", said)
    assert found is not None, said
    accepted, delivered, failed = (int(text.replace(",", "")) for text in found.groups())
    with capsys.disabled():
        print(f"\n{len(acknowledged):,} answered 202; {said.splitlines()[-1]}")  # noqa: T201
    assert readiness == {503}
    assert status == (1 if failed else 0)
    assert accepted == delivered + failed >= len(acknowledged)
    assert len(set(acknowledged) - places.keys()) <= failed
    assert delivered > 1_000


@pytest.mark.timeout(300)
def test_every_delivered_answer_is_true_under_random_faults(is_short: bool, capsys) -> None:
    total = 2_000 if is_short else 20_000

    async def ask(url: str) -> tuple[dict[str, tuple[str, str]], set[str]]:
        claimed: dict[str, tuple[str, str]] = {}
        denied: set[str] = set()
        places = asyncio.Semaphore(16)

        async def one(client: httpx.AsyncClient, first: int) -> None:
            body = {
                "records": [
                    {"partition_key": f"key-{each % 50}", "data": str(each)} for each in range(first, first + 10)
                ]
            }
            async with places:
                answer = await client.post(f"{url}{PATH}?ack=delivered", json=body)
            assert answer.status_code in {200, 502, 503, 504}, answer.text
            if answer.status_code == 503:
                # With the breaker open every record is reported as failed, which is compared with the stream like any
                # other failure.
                denied.update(record["data"] for record in body["records"])
                return
            for record, result in zip(body["records"], answer.json()["records"], strict=True):
                if "sequence_number" in result:
                    claimed[record["data"]] = (result["shard_id"], result["sequence_number"])
                else:
                    denied.add(record["data"])

        async with httpx.AsyncClient(timeout=60) as client:
            await asyncio.gather(*(one(client, first) for first in range(0, total, 10)))
        return claimed, denied

    with ThreadedLocalKinesis(LocalKinesis({STREAM: 4}, enforce_limits=False)) as kinesis:
        for effect, when in (
            (RecordError(), When(probability=0.3)),
            (RecordError("InternalFailure"), When(probability=0.3)),
            (ErrorAnswer("InternalFailure"), When(operation="PutRecords", probability=0.05)),
        ):
            kinesis.call(partial(lambda fake, _, effect, when: fake.faults.add(effect, when), effect=effect, when=when))
        os.environ["KPL_INGEST_RECORD_TTL_MS"] = "300"
        try:
            with serving(kinesis.endpoint_url) as (_, url):
                claimed, denied = asyncio.run(ask(url))
        finally:
            del os.environ["KPL_INGEST_RECORD_TTL_MS"]
        places = consumed(kinesis)
    with capsys.disabled():
        print(f"\n{len(claimed):,} said to be delivered, {len(denied):,} said not to be")  # noqa: T201
    assert len(claimed) + len(denied) == total
    assert denied
    wrong = [data for data, place in claimed.items() if place not in places.get(data, set())]
    assert not wrong
    # Every fault here reports truthfully that nothing was stored, so a record reported as lost must be lost.
    assert not denied & places.keys()
