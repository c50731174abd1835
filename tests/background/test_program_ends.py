"""Programs that end without closing their producer, each a process of its own."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import kpl_core
from kpl_integrations.local_kinesis import LocalKinesis, ThreadedLocalKinesis
from tests.support.consumers import read_stream

PROGRAM = """
import sys, threading
from kpl_core import BlockingProducer, Config

producer = BlockingProducer(Config(endpoint_url=sys.argv[1], region="us-east-1"))
producer.__enter__()

def put(name):
    for number in range(100):
        producer.put("orders", partition_key=str(number), data=f"{name}-{number}".encode())

def put_late(main_thread=threading.main_thread()):
    main_thread.join()
    put("late")

if "late" in sys.argv:
    threading.Thread(target=put_late).start()
put("early")
if "raises" in sys.argv:
    raise SystemExit(3)
"""

FORGOTTEN = """
import asyncio, sys
from kpl_core import Config, Producer

async def main():
    producer = await Producer(Config(endpoint_url=sys.argv[1], region="us-east-1")).__aenter__()
    for number in range(100):
        producer.put_nowait("orders", partition_key=str(number), data=b"forgotten")

asyncio.run(main())
"""


def end_of(endpoint_url: str, *arguments: str, program: str = PROGRAM) -> subprocess.CompletedProcess[str]:
    local = {"AWS_ACCESS_KEY_ID": "local", "AWS_SECRET_ACCESS_KEY": "local", "NO_PROXY": "127.0.0.1"}
    packages = str(Path(next(iter(kpl_core.__path__))).parent)
    return subprocess.run(
        [sys.executable, "-c", program, endpoint_url, *arguments],
        env={**os.environ, **local, "PYTHONPATH": packages},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


@pytest.mark.parametrize(
    ("how", "status", "names"),
    [((), 0, {"early"}), (("raises",), 3, {"early"}), (("late",), 0, {"early", "late"})],
    ids=["runs off its end", "exits with a status", "a thread outlives the main one"],
)
def test_records_are_delivered_when_the_program_never_closes_the_producer(
    how: tuple[str, ...], status: int, names: set[str]
) -> None:
    with ThreadedLocalKinesis(LocalKinesis({"orders": 2}, enforce_limits=False)) as local:
        ended = end_of(local.endpoint_url, *how)
        assert (ended.returncode, ended.stdout, ended.stderr) == (status, "", "")
        kept = local.call(lambda fake, now: read_stream(fake, "orders", now=now).kept)
    wanted = {f"{name}-{number}".encode() for name in names for number in range(100)}
    assert {data for _key, data in kept} == wanted


@pytest.mark.parametrize("run", ["asyncio.run(main())", "asyncio.new_event_loop().run_until_complete(main())"])
def test_a_loop_that_ends_with_records_outstanding_logs_a_warning(run: str) -> None:
    with ThreadedLocalKinesis(LocalKinesis({"orders": 2}, enforce_limits=False)) as local:
        ended = end_of(local.endpoint_url, program=FORGOTTEN.replace("asyncio.run(main())", run))
    said = ended.stderr
    assert ended.returncode == 0
    assert said.count("the event loop ended before its producer was closed, with 100 records outstanding") == 1
    assert "Traceback" not in said


INTERRUPTED = """
import atexit, signal, sys
atexit.register(lambda: print(producer.close(), end=""))
from kpl_core import BlockingProducer, Config
from kpl_core.testing import FakeKinesis, FakeTransport

producer = BlockingProducer(
    Config(), transport=FakeTransport(FakeKinesis({"orders": 1}), latency_seconds=float(sys.argv[1]))
)
with producer:
    for number in range(100):
        producer.put("orders", partition_key=str(number), data=b"x")
    def interrupt(*_):
        raise KeyboardInterrupt
    signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, 0.1)
"""


@pytest.mark.skipif(not hasattr(signal, "SIGALRM"), reason="there is no such signal on this system")
@pytest.mark.parametrize(("latency", "results"), [("1", "100 delivered, 0 failed"), ("60", "0 delivered, 100 failed")])
def test_a_close_that_ctrl_c_interrupts_goes_on_until_the_exit(latency: str, results: str) -> None:
    started = time.monotonic()
    ended = end_of(latency, program=INTERRUPTED)
    assert "KeyboardInterrupt" in ended.stderr
    assert f"100 accepted: {results}" in ended.stdout
    # What is lost is said.
    assert ("is closed" in ended.stderr) == ("100 failed" in results)
    assert time.monotonic() - started < 30
