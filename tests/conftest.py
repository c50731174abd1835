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
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, settings

from tests.virtual_time import Backend, virtual_time_backend as backend_in_virtual_time

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


def pytest_collection_finish() -> None:
    """Exclude the tests and their modules from later garbage collections: they are used until the end."""
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
    """Run on both backends in real time. It has module scope, so that async fixtures may have it."""
    name: str = request.param
    return name


@pytest.fixture(params=["asyncio", "trio"])
def virtual_time_backend(request: pytest.FixtureRequest) -> Backend:
    """Run on both backends, with a clock that starts at 0.0 and jumps from timer to timer."""
    return backend_in_virtual_time(request.param)
