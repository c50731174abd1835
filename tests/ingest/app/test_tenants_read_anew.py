"""The tenants are read anew while the gateway runs, whatever the application's own directory does."""

import logging

import anyio
import pytest

from kpl_core.testing import FakeKinesis
from kpl_core.testing.fake_transport import FakeTransport
from kpl_integrations.ingest.tenants import Tenant
from kpl_integrations.ingest.tenants.reload_trouble import QUIET_SECONDS, ReloadTrouble
from tests.ingest.app.scene import STREAM, Client, KnownTenants, open_gateway

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend() -> str:
    """Threads, in real time."""
    return "asyncio"


class Troubled(KnownTenants):
    """Fails as it is told, one exception a call, and knows one tenant more once that is over."""

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


async def test_a_directory_that_fails_keeps_its_tenants_is_told_once_for_each_kind_and_is_asked_again(caplog):
    lost = ConnectionError("the database is away")
    directory = Troubled(lost, lost, KeyError("rows"), lost, StopIteration(), ValueError("no such rate"), lost)
    with caplog.at_level(logging.INFO):
        async with open_gateway(FakeTransport(FakeKinesis({STREAM: 1})), directory, reload_seconds=0.001) as gateway:
            known = Client(gateway, "shop")
            with anyio.fail_after(30):
                while directory.by_id("newcomer") is None:
                    assert (await known.post({"partition_key": "k", "data": "d"})).status == 202
                    await anyio.sleep(0.001)
            assert (await Client(gateway, "newcomer").post({"partition_key": "k", "data": "d"})).status == 202
    told = [record for record in caplog.records if "could not be read anew" in record.getMessage()]
    assert len(told) == 4
    assert told[0].exc_info is not None
    assert told[0].exc_info[1] is lost


def test_each_kind_is_told_again_once_it_worked_and_a_minute_is_over(caplog):
    trouble = ReloadTrouble()
    trouble.failed(OSError("away"), now=100.0)
    trouble.failed(OSError("still away"), now=100.0 + 2 * QUIET_SECONDS)
    assert len(caplog.records) == 1, "nothing new was to be told"
    trouble.failed(ValueError("wrong"), now=300.0)
    assert len(caplog.records) == 2
    trouble.worked(now=301.0)
    trouble.failed(OSError("away again"), now=302.0)
    assert len(caplog.records) == 3
    trouble.failed(ValueError("wrong again"), now=303.0)
    assert len(caplog.records) == 3, "it was told a moment ago"
    trouble.worked(now=302.0 + QUIET_SECONDS)
    trouble.failed(ValueError("wrong again"), now=303.0 + QUIET_SECONDS)
    assert len(caplog.records) == 4
