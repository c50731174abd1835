"""What needs POSIX' `fcntl`, and what works on a system without it, such as Windows.

A child process in which the import fails stands for such a system: paths, signals and sockets stay those of this one.
"""

import subprocess
import sys

import pytest

WITHOUT = "import sys; sys.modules['fcntl'] = None\n"
SPOOLED = """
from kpl_core import Config, SpoolOptions
SPOOLED = Config(region="us-east-1", spool=SpoolOptions(path="/tmp/never-made"))
"""
DELIVERS = """
import anyio
from kpl_core import Producer
from kpl_core.testing import FakeKinesis
from kpl_core.testing.fake_transport import FakeTransport

async def main():
    async with Producer(transport=FakeTransport(FakeKinesis({"orders": 1}))) as producer:
        print((await (await producer.put("orders", partition_key="42", data=b"..."))).successful)

anyio.run(main)
"""


def run(program: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", WITHOUT + program], capture_output=True, text=True, check=False)


@pytest.mark.parametrize("module", ["asgi", "fastapi", "local_kinesis", "logging_handler", "otel"])
def test_an_adapter_can_be_imported(module):
    assert run(f"import kpl_integrations.{module}").stderr == ""


def test_a_producer_delivers():
    assert run(DELIVERS).stdout == "True\n"


FOLDER = """
import anyio
from kpl_core.coordination.stores import open_store
anyio.run(open_store, "file:///tmp/never-made")
"""


@pytest.mark.parametrize(
    ("program", "sentence"),
    [
        (FOLDER, "store is a file:// URL, which needs Python's module fcntl, and this Python on"),
        (DELIVERS.replace("Producer(", "Producer(SPOOLED, ", 1), "spool and dead_letters need Python's module fcntl"),
    ],
)
def test_what_needs_it_says_so(program, sentence):
    last = run(SPOOLED + program).stderr.splitlines()[-1]
    assert last.startswith(f"kpl_core.errors.ConfigError: {sentence}")


def test_the_gateway_cannot_be_imported():
    assert "fcntl" in run("import kpl_integrations.ingest").stderr.splitlines()[-1]
