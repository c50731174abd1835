"""The hooks of a process that ends: SIGTERM, after which an application's own handler still runs, and uvicorn."""

import asyncio
import gc
import logging
import math
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from kpl_core import BlockingProducer, Config, ConfigError
from kpl_core.background.process_end import (
    NOT_ADMITTED,
    ProcessListener,
    WeakList,
    begin_last_flushes,
    listen,
    watch_uvicorn,
)
from kpl_core.background.sigterm import flush_on_sigterm
from kpl_core.testing import FakeKinesis, FakeTransport
from tests.support.running_program import environment

BEGINNING = """
import signal, sys, threading, time
from kpl_core.background import sigterm
from kpl_core import BlockingProducer, BufferFull, Config
from kpl_core.background.process_end import Intake, ProcessListener, listen
from kpl_core.background.sigterm import flush_before_sigterm, flush_on_sigterm

class Listener(ProcessListener):
    def begin_last_flush(self, share=1.0, seconds=None):
        return lambda: print("flushed", flush=True)

def say(*_):
    print("mine", flush=True)

def say_and_exit(*_):
    say()
    sys.exit(3)

def chain():
    before = signal.getsignal(signal.SIGTERM)

    def chained(*arguments):
        say()
        before(*arguments)

    signal.signal(signal.SIGTERM, chained)

def in_a_thread(call):
    thread = threading.Thread(target=call)
    thread.start()
    thread.join()

def be_terminated():
    signal.raise_signal(signal.SIGTERM)
    while sigterm._current is not None:
        time.sleep(0.01)

def be_slow(seconds):
    print("slow", flush=True)
    time.sleep(seconds)

listener = Listener()
"""
LISTEN = "listen(listener); "
TERMINATED = -signal.SIGTERM
# What the program does before SIGTERM, what it prints, and its exit status. A program that goes on is flushed once
# more when it exits.
PROGRAMS = [
    (LISTEN + "flush_before_sigterm()", "flushed\n", TERMINATED),
    ("flush_before_sigterm()", "", TERMINATED),
    (LISTEN + "signal.signal(signal.SIGTERM, say); flush_before_sigterm()", "mine\nflushed\n", 0),
    (LISTEN + "in_a_thread(flush_before_sigterm)", "", TERMINATED),
    (LISTEN + "flush_on_sigterm(True)", "flushed\n", TERMINATED),
    (LISTEN + "flush_on_sigterm(True); flush_on_sigterm(True)", "flushed\n", TERMINATED),
    (LISTEN + "signal.signal(signal.SIGTERM, say); flush_on_sigterm(True)", "flushed\nmine\nflushed\n", 0),
    (LISTEN + "signal.signal(signal.SIGTERM, say_and_exit); flush_on_sigterm(True)", "flushed\nmine\nflushed\n", 3),
    (LISTEN + "signal.signal(signal.SIGTERM, signal.SIG_IGN); flush_on_sigterm(True)", "flushed\nflushed\n", 0),
    (LISTEN + "flush_on_sigterm(2.5); flush_on_sigterm(None); flush_on_sigterm(False)", "flushed\n", TERMINATED),
    (LISTEN + "flush_on_sigterm(False); flush_on_sigterm(None)", "", TERMINATED),
    (
        LISTEN + "signal.signal(signal.SIGTERM, say); flush_on_sigterm(True); chain(); flush_on_sigterm(True)",
        "flushed\nmine\nmine\nflushed\n",
        0,
    ),
]
needs_sigterm = pytest.mark.skipif(sys.platform == "win32", reason="no SIGTERM to handle")


def end_of(program: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", program], env=environment(), capture_output=True, text=True, timeout=60, check=False
    )


@needs_sigterm
@pytest.mark.parametrize(("does", "prints", "status"), PROGRAMS)
def test_a_program_is_flushed_before_sigterm_and_its_own_handler_still_runs(
    does: str, prints: str, status: int
) -> None:
    ended = end_of(f"{BEGINNING}\n{does}\nbe_terminated()")
    assert (ended.stdout, ended.stderr, ended.returncode) == (prints, "", status)


@needs_sigterm
def test_the_opt_in_is_refused_outside_of_the_main_thread() -> None:
    ended = end_of(f"{BEGINNING}\nin_a_thread(lambda: flush_on_sigterm(True))")
    assert "Python sets signal handlers in the main thread only" in ended.stderr


ENDLESS = BEGINNING.replace('print("flushed", flush=True)', "time.sleep(3600)") + LISTEN


@needs_sigterm
def test_a_flush_that_never_ends_delays_the_signal_only_for_its_bound_and_what_is_left_is_on_stderr() -> None:
    program = f"{ENDLESS} Listener.undelivered = lambda _: (7, 'records'); flush_on_sigterm(0.1); be_terminated()"
    ended = end_of(program)
    assert ended.returncode == TERMINATED
    assert re.fullmatch(
        r"kpl_core: not delivered \d+\.\d s after SIGTERM: 7 records; lost if the process ends now\n", ended.stderr
    )


@needs_sigterm
def test_a_second_signal_ends_the_process_during_the_flush_of_the_first() -> None:
    program = f"{ENDLESS} flush_on_sigterm(3600); signal.raise_signal(signal.SIGTERM); be_terminated()"
    assert end_of(program).returncode == TERMINATED


@needs_sigterm
@pytest.mark.parametrize(
    ("handler", "prints", "status"),
    [("signal.SIG_DFL", "slow\nflushed\n", TERMINATED), ("say", "slow\nflushed\nmine\nslow\nflushed\n", 0)],
)
def test_a_program_that_is_at_its_end_during_the_flush_does_what_the_signal_would_have_done(
    handler: str, prints: str, status: int
) -> None:
    """uvicorn raises the signal as the last thing it does; its program ended with status 0 if the flush took longer."""
    program = BEGINNING.replace("lambda: print(", "lambda: be_slow(0.3) or print(")
    ended = end_of(
        f"{program}\nsignal.signal(signal.SIGTERM, {handler}); {LISTEN}flush_on_sigterm(True)\n"
        "signal.raise_signal(signal.SIGTERM)"
    )
    assert (ended.stdout, ended.stderr, ended.returncode) == (prints, "", status)


@needs_sigterm
def test_a_signal_that_interrupts_code_with_a_lock_that_the_flush_needs_is_flushed() -> None:
    """The handler waited for the flush, which waited for the lock of the code that the handler had interrupted."""
    program = (
        BEGINNING.replace(
            'lambda: print("flushed", flush=True)', 'lambda: lock.acquire() and print("flushed", flush=True)'
        )
        + f"lock = threading.Lock()\n{LISTEN}flush_on_sigterm(True)\n"
        + "with lock: signal.raise_signal(signal.SIGTERM)\ntime.sleep(60)"
    )
    ended = end_of(program)
    assert (ended.stdout, ended.stderr, ended.returncode) == ("flushed\n", "", TERMINATED)


@needs_sigterm
def test_the_flush_has_everything_that_was_accepted_before_the_puts_stopped() -> None:
    program = f"""{BEGINNING}
class Saying(Intake):
    def stop(self):
        print("stopped", flush=True)

Listener.intake = Saying(threading.Condition())
{LISTEN}flush_on_sigterm(True)
be_terminated()
"""
    ended = end_of(program)
    assert (ended.stdout, ended.returncode) == ("stopped\nflushed\n", TERMINATED), ended.stderr


@needs_sigterm
def test_a_put_that_waits_with_a_lock_that_a_callback_needs_costs_no_record() -> None:
    """The callback stopped the sender, and so everything behind its record was lost."""
    program = f"""{BEGINNING}
from kpl_core.testing import FakeKinesis, FakeTransport
lock = threading.Lock()
transport = FakeTransport(FakeKinesis({{"orders": 2}}), latency_seconds=0.05)
config = Config(region="us-east-1", record_max_buffered_time_ms=500, collection_max_count=1, aggregation_enabled=False)
producer = BlockingProducer(config, transport=transport, flush_on_sigterm=True).__enter__()

def called_back(_):
    with lock:
        pass

def work():
    while True:
        try:
            with lock:
                delivery = producer.put_nowait("orders", partition_key="k", data=b"x")
        except BufferFull:
            return
        delivery.add_done_callback(called_back)
        time.sleep(0.005)

threading.Thread(target=work, daemon=True).start()
time.sleep(1.2)
be_terminated()
"""
    ended = end_of(program)
    assert (ended.stderr, ended.returncode) == ("", TERMINATED)


@needs_sigterm
def test_a_flush_that_logs_does_not_wait_for_its_own_line() -> None:
    program = f"""{BEGINNING}
import logging
from kpl_core.testing import FakeKinesis, FakeTransport
from kpl_integrations.logging_handler import KinesisHandler
transport = FakeTransport(FakeKinesis({{"logs": 1}}))
logging.getLogger().addHandler(KinesisHandler("logs", transport=lambda _: transport, flush_on_sigterm=True))
logging.warning("first")

def export():
    logging.warning("exporting")
    print("exported", flush=True)

exporting = threading.Thread(target=export)
Listener.begin_last_flush = lambda *_, **__: None if exporting.ident else exporting.start() or exporting.join
{LISTEN}be_terminated()
"""
    ended = end_of(program)
    said = f"kpl_core: log records refused: 1; {NOT_ADMITTED}\n"
    assert (ended.stdout, ended.stderr, ended.returncode) == ("exported\n", said, TERMINATED)


@needs_sigterm
def test_a_handler_that_was_set_later_and_calls_this_one_begins_one_flush_however_late() -> None:
    """The main thread was in C code when the signal was raised again, so that each signal began a new flush."""
    program = f"""{BEGINNING}
import hashlib
{LISTEN}flush_on_sigterm(True)
chain()
signal.raise_signal(signal.SIGTERM)
while True:
    hashlib.pbkdf2_hmac("sha256", b"x", b"y", 400_000)
"""
    ended = end_of(program)
    assert (ended.stderr, ended.returncode) == ("", TERMINATED)
    # The signal is raised again until our handler has run, so the other one may be interrupted by itself.
    before, _, after = ended.stdout.partition("flushed\n")
    assert before == "mine\n"
    assert "mine" in after
    assert "flushed" not in after


@needs_sigterm
def test_a_forked_child_flushes_at_sigterm_as_its_parent_does() -> None:
    program = f"""{BEGINNING}
import os
{LISTEN}flush_on_sigterm(True)
child = os.fork()
if not child:
    be_terminated()
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
be_terminated()
"""
    ended = end_of(program)
    assert (ended.stdout, ended.returncode) == (f"flushed\n{TERMINATED}\nflushed\n", TERMINATED), ended.stderr


@needs_sigterm
def test_puts_go_on_if_the_application_has_replaced_the_handler_during_the_flush() -> None:
    program = f"""{BEGINNING}
class Saying(Intake):
    def go_on(self):
        print("goes on", flush=True)

Listener.intake = Saying(threading.Condition())
Listener.begin_last_flush = lambda *_: lambda: time.sleep(0.05)
{LISTEN}flush_on_sigterm(True)
signal.raise_signal(signal.SIGTERM)
signal.signal(signal.SIGTERM, say)
time.sleep(2)
"""
    ended = end_of(program)
    assert (ended.stdout, ended.returncode) == ("mine\ngoes on\n", 0), ended.stderr


@pytest.mark.parametrize("within", [0, -1, math.nan, math.inf, "yes"])
def test_a_bound_that_is_no_number_of_seconds_above_0_is_rejected(within: Any) -> None:
    with pytest.raises(ConfigError, match="it must be True, False, None or a number of seconds above 0"):
        flush_on_sigterm(within)


def test_the_shutdown_of_uvicorn_flushes_after_its_own_work(monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[str] = []

    class Server:
        async def shutdown(self, sockets: object = None) -> None:
            events.append(f"shut down with {sockets}")

    class Listener(ProcessListener):
        def begin_last_flush(self, share: float = 1.0, seconds: float | None = None) -> Callable[[], object]:
            return lambda: events.append(f"flushed with share {share}")

    monkeypatch.setitem(sys.modules, "uvicorn.server", SimpleNamespace(Server=Server))
    listener = Listener()
    listen(listener)
    watch_uvicorn()
    asyncio.run(Server().shutdown(sockets="sockets"))
    assert events == ["shut down with sockets", "flushed with share 1.0"]


@pytest.mark.parametrize(
    ("captured", "reports"),
    [([signal.SIGTERM], 1), ([signal.SIGINT, signal.SIGTERM], 1), ([signal.SIGINT], 0), ([], 0), (None, 1)],
)
def test_what_is_not_delivered_is_reported_if_uvicorn_raises_sigterm_again(
    captured: list[signal.Signals] | None, reports: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server that its program stops, or Ctrl-C, leaves the process to end by itself, which closes the listeners."""

    class Server:
        async def shutdown(self) -> None:
            """End as uvicorn does."""

    class Listener(ProcessListener):
        def end_by_signal(self) -> None:
            reported.append(self)

    reported: list[Listener] = []
    monkeypatch.setitem(sys.modules, "uvicorn.server", SimpleNamespace(Server=Server))
    listener = Listener()
    listen(listener)
    server = Server()
    if captured is not None:
        vars(server)["_captured_signals"] = captured
    asyncio.run(server.shutdown())
    assert reported == [listener] * reports


def test_a_uvicorn_without_a_shutdown_coroutine_is_left_alone_with_one_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class Server:
        def shutdown(self) -> str:
            return "its own"

    monkeypatch.setitem(sys.modules, "uvicorn.server", SimpleNamespace(Server=Server))
    with caplog.at_level(logging.WARNING, logger="kpl_core"):
        watch_uvicorn()
        watch_uvicorn()
    assert Server().shutdown() == "its own"
    assert caplog.text.count("uvicorn.Server has no coroutine `shutdown`") == 1


def test_a_listener_that_fails_does_not_stop_the_flush_of_the_others(caplog: pytest.LogCaptureFixture) -> None:
    flushed: list[str] = []

    class Failing(ProcessListener):
        def begin_last_flush(self, share: float = 1.0, seconds: float | None = None) -> Callable[[], object]:
            raise RuntimeError(share)

    class FailingLater(ProcessListener):
        def begin_last_flush(self, share: float = 1.0, seconds: float | None = None) -> Callable[[], object]:
            return lambda: 1 // 0

    class Flushing(ProcessListener):
        def begin_last_flush(self, share: float = 1.0, seconds: float | None = None) -> Callable[[], object]:
            return lambda: flushed.append("flushed")

    listeners = [Failing(), FailingLater(), Flushing()]
    for listener in listeners:
        listen(listener)
    for wait in begin_last_flushes():
        wait()
    assert flushed == ["flushed"]
    assert caplog.text.count("a sender could not be flushed") == 2


def test_a_uvicorn_that_is_imported_after_the_producer_started_is_hooked(monkeypatch: pytest.MonkeyPatch) -> None:
    class Server:
        async def shutdown(self) -> None:
            """End as uvicorn does."""

    with BlockingProducer(Config(), transport=FakeTransport(FakeKinesis({"orders": 1}))) as orders:
        orders.flush(30)
        monkeypatch.setitem(sys.modules, "uvicorn.server", SimpleNamespace(Server=Server))
        assert orders.put("orders", partition_key="k", data=b"x").result(30).successful
        assert getattr(Server, "kpl_flushes", False)


class Owner:
    """An object in a cycle, which only the garbage collector ends."""

    def __init__(self) -> None:
        self.itself = self


def test_listeners_may_be_collected_while_their_list_is_copied():
    """With a callback that removed them, CPython 3.11 crashed: it collects while it copies."""
    owners, before = WeakList[Owner](), gc.get_threshold()
    gc.set_threshold(3, 1, 1)
    try:
        for number in range(500):
            owners.add(Owner())
            if number % 5 == 0:
                assert len(owners.referenced()) <= number + 1
    finally:
        gc.set_threshold(*before)
    gc.collect()
    assert owners.referenced() == []
