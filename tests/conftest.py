"""The fixtures of all tests: both async backends, virtual time, and an environment without a real AWS account.

An async test is marked `@pytest.mark.anyio` and runs on asyncio and on trio, in real time. A module or folder whose
tests wait overrides the fixture, for virtual time:

    @pytest.fixture
    def anyio_backend(virtual_time_backend: Backend) -> Backend:
        return virtual_time_backend

A module that uses asyncio's sockets returns "asyncio" there.
"""

import gc
import os
import sys
import tomllib
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

from tests.support.virtual_time import Backend, virtual_time_backend as backend_in_virtual_time

# No deadlines: other programs may use the machine, and benchmarks/ measures the speed. In CI the examples are the same
# in each run, so that a failure means that the code has changed.
settings.register_profile("dev", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("ci", settings.get_profile("dev"), derandomize=True, print_blob=True)
# A few examples take all branches, and measuring makes each of them slower.
settings.register_profile("coverage", settings.get_profile("ci"), max_examples=25)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "dev"))

_NO_ACCOUNT = {
    "AWS_ACCESS_KEY_ID": "testing",
    "AWS_SECRET_ACCESS_KEY": "testing",
    "AWS_DEFAULT_REGION": "us-east-1",
    "AWS_CONFIG_FILE": os.devnull,
    "AWS_SHARED_CREDENTIALS_FILE": os.devnull,
    "AWS_EC2_METADATA_DISABLED": "true",
    "NO_PROXY": "127.0.0.1,localhost",
    "no_proxy": "127.0.0.1,localhost",
}


_UNSTEADY = tomllib.loads(Path(__file__).with_name("unsteady.toml").read_text(encoding="utf-8"))
# Without such tests it would cost each test a message between processes.
pytest_plugins = ["pytest_rerunfailures"] if _UNSTEADY.get("unsteady") else []


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Exclude the tests and their modules from garbage collections: they are used until the end."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.collect()
        gc.freeze()
        gc.enable()


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(
    collector: pytest.Collector,
) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    """Let each worker process begin with other modules, so that in a fresh clone each module is compiled once.

    pytest writes the compiled module to disk, where the other workers find it.
    """
    report = yield
    worker = _worker_number(collector.config)
    if worker and isinstance(collector, pytest.Directory):
        middle = len(report.result) // 2
        report.result = report.result[::-1] if worker == 1 else [*report.result[middle:], *report.result[:middle]]
    return report


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Let the tests of unsteady.toml, and no others, run a second time if they fail.

    In worker processes also restore one order, because pytest-xdist requires the same order in all of them.
    """
    unsteady = {entry["test"] for entry in _UNSTEADY.get("unsteady", ())}
    for item in items:
        if item.nodeid.partition("[")[0] in unsteady:
            item.add_marker(pytest.mark.flaky(reruns=1))
    if _worker_number(config) is not None:
        items.sort(key=lambda item: item.path)


def _worker_number(config: pytest.Config) -> int | None:
    """Return None in the only process of a run, else the number of this worker of pytest-xdist, from 0."""
    worker: str | None = getattr(config, "workerinput", {}).get("workerid")
    return None if worker is None else int(worker.removeprefix("gw"))


@pytest.fixture(autouse=True, scope="session")
def _no_real_account() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as environment:
        for name in [name for name in os.environ if name.startswith("AWS_")]:
            environment.delenv(name)
        for name, value in _NO_ACCOUNT.items():
            environment.setenv(name, value)
        yield


@pytest.fixture(autouse=True, scope="session")
def _service_models_are_parsed_once() -> Iterator[None]:
    """Let botocore parse each of its JSON files once in a process. Each new session parses 300 KB of them otherwise."""
    with pytest.MonkeyPatch.context() as patch:
        if loaders := sys.modules.get("botocore.loaders"):
            load_file, parsed = loaders.JSONFileLoader.load_file, dict[str, Any]()

            def load_once(self: object, path: str) -> Any:
                if (found := parsed.get(path)) is None:
                    found = load_file(self, path)
                    if found is not None:  # a missing file may appear later
                        parsed[path] = found
                return found

            patch.setattr(loaders.JSONFileLoader, "load_file", load_once)
        yield


@pytest.fixture(scope="module", params=["asyncio", "trio"])
def anyio_backend(request: pytest.FixtureRequest) -> str:
    """Run on both backends in real time. It has module scope, so that async fixtures may have it."""
    name: str = request.param
    return name


@pytest.fixture(params=["asyncio", "trio"])
def virtual_time_backend(request: pytest.FixtureRequest) -> Backend:
    """Run on both backends, with a clock that starts at 0.0 and jumps from timer to timer."""
    return backend_in_virtual_time(request.param)
