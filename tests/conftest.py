"""What every test can rely on: both async backends, virtual time, and no way to a real account.

An async test is marked `@pytest.mark.anyio` and runs on asyncio and on trio, in real time. A
module or folder whose tests wait asks for virtual time by

    @pytest.fixture
    def anyio_backend(virtual_time_backend: Backend) -> Backend:
        return virtual_time_backend

and one that speaks through sockets of asyncio only returns "asyncio" there.
"""

import gc
import os
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, settings

from tests.virtual_time import Backend, virtual_time_backend as backend_in_virtual_time

# No deadlines: the machine is shared, and slowness is measured by benchmarks/, not by luck. In CI
# the examples are the same in each run, so that red means a change and never a throw of dice.
settings.register_profile("dev", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("ci", settings.get_profile("dev"), derandomize=True, print_blob=True)
# Which branches are taken shows in few examples, and measuring slows each.
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


def pytest_collection_finish() -> None:
    """Keep thousands of tests and their modules out of every full collection to come: they stay until the end."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True, scope="session")
def _no_real_account() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as environment:
        for name in [name for name in os.environ if name.startswith("AWS_")]:
            environment.delenv(name)
        for name, value in _NO_ACCOUNT.items():
            environment.setenv(name, value)
        yield


@pytest.fixture(scope="module", params=["asyncio", "trio"])
def anyio_backend(request: pytest.FixtureRequest) -> str:
    """Run on both backends in real time; of module scope, so that an async fixture may be too."""
    name: str = request.param
    return name


@pytest.fixture(params=["asyncio", "trio"])
def virtual_time_backend(request: pytest.FixtureRequest) -> Backend:
    """Run on both backends, with a clock that starts at 0.0 and jumps from timer to timer."""
    return backend_in_virtual_time(request.param)
