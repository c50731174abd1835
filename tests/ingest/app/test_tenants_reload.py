"""The gateway reloads the tenants while it runs, and survives every exception of the directory."""

import logging

import anyio
import pytest

from kpl_core.testing import FakeKinesis
from kpl_core.testing.fake_transport import FakeTransport
from kpl_integrations.ingest.tenants import Tenant
from kpl_integrations.ingest.tenants.tenant import QUIET_SECONDS, ReloadFailureLog
from tests.support.gateway_scene import STREAM, Client, KnownTenants, open_gateway

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend() -> str:
    """Threads, in real time."""
    return "asyncio"


class FailingTenants(KnownTenants):
    """Raises the given exceptions, one at each reload. The next reload adds one tenant."""

    def __init__(self, *errors: Exception) -> None:
        super().__init__(Tenant(id="shop"))
        self._errors = list(errors)

    def reload_if_changed(self) -> bool:
        if self._errors:
            raise self._errors.pop(0)
        if self.by_id("newcomer") is None:
            self.change(Tenant(id="newcomer"))
            return True
        return False


async def test_a_failing_directory_keeps_its_tenants_is_logged_once_for_each_exception_type_and_is_called_again(caplog):
    lost = ConnectionError("the database is away")
    directory = FailingTenants(lost, lost, KeyError("rows"), lost, StopIteration(), ValueError("no such rate"), lost)
    with caplog.at_level(logging.INFO):
        async with open_gateway(FakeTransport(FakeKinesis({STREAM: 1})), directory, reload_seconds=0.001) as gateway:
            known = Client(gateway, "shop")
            with anyio.fail_after(30):
                while directory.by_id("newcomer") is None:
                    assert (await known.post({"partition_key": "k", "data": "d"})).status == 202
                    await anyio.sleep(0.001)
            assert (await Client(gateway, "newcomer").post({"partition_key": "k", "data": "d"})).status == 202
    logged = [record for record in caplog.records if "reloading the tenants failed" in record.getMessage()]
    assert len(logged) == 4
    assert logged[0].exc_info is not None
    assert logged[0].exc_info[1] is lost


def test_an_exception_type_is_logged_again_after_a_success_and_a_minute(caplog):
    failures = ReloadFailureLog()
    failures.failed(OSError("away"), now=100.0)
    failures.failed(OSError("still away"), now=100.0 + 2 * QUIET_SECONDS)
    assert len(caplog.records) == 1, "the same exception type"
    failures.failed(ValueError("wrong"), now=300.0)
    assert len(caplog.records) == 2
    failures.succeeded(now=301.0)
    failures.failed(OSError("away again"), now=302.0)
    assert len(caplog.records) == 3
    failures.failed(ValueError("wrong again"), now=303.0)
    assert len(caplog.records) == 3, "logged less than a minute ago"
    failures.succeeded(now=302.0 + QUIET_SECONDS)
    failures.failed(ValueError("wrong again"), now=303.0 + QUIET_SECONDS)
    assert len(caplog.records) == 4
