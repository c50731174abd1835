"""Every command on every page is run: here, by the gate, or by the test that the table names."""

import os
import re
import select
import signal
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

import kpl_core
from kpl_core.durability.dead_letters import DeadLetterQueue
from kpl_core.durability.spool import Spool, SpooledRecord, SpoolOptions
from kpl_integrations.ingest.tenants.credentials import new_api_key, stored_key
from kpl_integrations.local_kinesis import LocalKinesis, ThreadedLocalKinesis
from tests.support.waiting import wait_until

ROOT = Path(__file__).parents[2]
PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]
GATE = (ROOT / ".ci" / "run").read_text(encoding="utf-8")
MAKEFILE = (ROOT / "Makefile").read_text(encoding="utf-8")
PACKAGES = str(Path(next(iter(kpl_core.__path__))).parent)


# Commands that other files run: a pattern, and the file.
ELSEWHERE = {
    r"kpl demo|python -m pytest|pip install --.*": ".ci/run",
    r"python -m pytest test_app.py|pip install pytest httpx2": "tests/docs/test_tutorial.py",
    r"make \w+.*": ".ci/run",
    r"python3 -m venv .*": "tests/packaging/environment.py",
    r"pip install '(?:kpl-integrations|\.)\[.*\]'.*": "tests/packaging/test_each_extra.py",
    r"pip install (?:--target package )?kpl-integrations(?: .*)?": "tests/packaging/test_each_extra.py",
    r"(?:gunicorn|uvicorn) orders\w*:app .*|celery .*|python backfill.py .*": "tests/docs/test_framework_pages.py",
    r"(?:uvicorn|gunicorn|hypercorn|granian) .*app:app .*timeout.*": "tests/asgi/test_last_lines.py",
    r"export .*|uvicorn (?:app|stored):app .*|curl .*/orders[/ ].*": "tests/docs/test_tutorial.py",
    r"python -m benchmarks.*": "benchmarks",
    r"opentelemetry-instrument .*": "tests/otel/test_programs.py",
    r"kpl top .*": "tests/cli/test_top.py",
    r"curl -i http://127.0.0.1:8080/v1/streams/demo/records .*": "tests/ingest/app/test_gateway_examples.py",
    r"curl -s 'http://127.0.0.1:8080/readyz\?verbose'": "tests/ingest/readiness/test_readyz.py",
    # No Docker engine and no cluster here, as docs/howto/deploy.md says. These test what the commands read.
    r"docker .*": "tests/ingest/app/test_image_and_compose.py",
    r"kubectl .*|helm .*": "tests/interop/test_kubernetes.py",
    r"pip install amazon_kclpy==.*": "tests/support/installation.py",
    # The same emulators, by other commands.
    r"npm install kinesis-local.*|INITIALIZE_STREAMS=.*|.*\bmoto(?:_server|\[).*": "tests/interop/emulators.py",
    r"cd examples/consumers|JARS=.*|java -cp .*": "tests/interop/test_kcl_for_python.py",
    r"aws lambda .*": "tests/interop/test_lambda.py",  # its parameters: there is no AWS here
    r"umask 077|sqlite3 (?:MOVED|RECOVERED) .*": "tests/docs/test_runbook.py",
}
# Commands that run until they are interrupted.
RUNS_UNTIL_INTERRUPTED = r"kpl (?:local|serve|top|coordinate)\b|kpl tail (?!.*--no-follow)|tail -F "
SECONDS = 30


class Command(NamedTuple):
    place: str
    text: str


def _commands() -> Iterator[Command]:
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        for block in re.finditer(r"^```(?:sh|bash|console)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL):
            joined = re.sub(r"\s*\\\n\s*|(?<=\|)\n\s*", " ", block[1])
            for line in joined.splitlines():
                command = re.sub(r"\s+#.*$", "", line).strip()
                if command and not command.startswith("#"):
                    yield Command(str(page.relative_to(ROOT)), command)


COMMANDS = sorted(set(_commands()))
# Each command runs once, even if several pages have it.
HERE = {
    command.text: command.place
    for command in COMMANDS
    if not any(re.fullmatch(pattern, command.text) for pattern in ELSEWHERE)
}


@pytest.fixture
def kinesis() -> Iterator[ThreadedLocalKinesis]:
    """A Kinesis for one command: a late call of an earlier one would look like the start of this one."""
    with ThreadedLocalKinesis(LocalKinesis({"orders": 2, "clicks": 1})) as running:
        yield running


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a folder with the files that the pages mention."""
    (tmp_path / "access.log").write_text("GET /\n" * 10, encoding="utf-8")
    (tmp_path / "orders.ndjson").write_text('{"customer_id": "ada", "total": 12}\n' * 10, encoding="utf-8")
    tenant = f'[[tenant]]\nid = "acme"\napi_keys = ["{stored_key(new_api_key())}"]\n'
    (tmp_path / "tenants.toml").write_text(tenant, encoding="utf-8")
    settings = 'tenants = "tenants.toml"\nspool = "spool.db"\nspool_max_bytes = 2_000_000\n'
    (tmp_path / "gateway.toml").write_text(settings, encoding="utf-8")
    with Spool(SpoolOptions(path=tmp_path / "orders.spool")) as spool:
        queue = DeadLetterQueue(spool)
        record = SpooledRecord("orders", "ada", b"...", 1_700_000_000.0)
        for reason in ("invalid", "ttl"):
            queue.add_nowait([queue.letter(record, reason)]).result()
        spool.append_nowait([record], claim=True).result()
    return tmp_path


def _environment(kinesis: ThreadedLocalKinesis) -> dict[str, str]:
    return os.environ | {
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": PACKAGES,
        "AWS_ENDPOINT_URL_KINESIS": kinesis.endpoint_url,
        # A free port, even if a page names one.
        "KPL_INGEST_PORT": "0",
    }


def _has_started(process: subprocess.Popen[str], text: str, kinesis: ThreadedLocalKinesis) -> bool:
    """Return True if the command has put records (`kpl put`), or else has written output or called Kinesis."""
    assert process.stdout is not None
    calls = kinesis.call(lambda fake, _: fake.calls.copy())
    if "kpl put" in text:
        # `tail` may write a warning before the other command in the pipe can handle Ctrl-C.
        return calls["PutRecords"] > 0
    return bool(select.select([process.stdout], [], [], 0)[0] or calls)


def _wait_until_started(process: subprocess.Popen[str], text: str, kinesis: ThreadedLocalKinesis) -> None:
    wait_until(
        lambda: process.poll() is not None or _has_started(process, text, kinesis),
        "output or a call to Kinesis",
        seconds=SECONDS,
    )


def _run(text: str, folder: Path, kinesis: ThreadedLocalKinesis) -> tuple[int, str]:
    """Run a line in a shell; interrupt a lasting command by Ctrl-C once it has started."""
    with subprocess.Popen(
        # With a trap bash returns the status of the command; without, it sometimes ends by SIGINT itself.
        ["bash", "-o", "pipefail", "-c", f"trap : INT; {text}"],
        cwd=folder,
        env=_environment(kinesis),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    ) as process:
        try:
            if re.search(RUNS_UNTIL_INTERRUPTED, text):
                _wait_until_started(process, text, kinesis)
                if process.poll() is None:
                    os.killpg(process.pid, signal.SIGINT)
            output = process.communicate(timeout=SECONDS)[0]
        except BaseException:
            os.killpg(process.pid, signal.SIGKILL)
            raise
    return process.returncode, output


@pytest.mark.long
@pytest.mark.parametrize("text", HERE, ids=[f"{place}: {text}" for text, place in HERE.items()])
def test_a_command_on_a_page_runs_without_an_error(text: str, folder: Path, kinesis: ThreadedLocalKinesis) -> None:
    if "0193..." in text:
        listed = _run("kpl dlq list orders.spool --letters --json", folder, kinesis)[1]
        text = text.replace("0193...", re.findall(r'"id":\s*"([^"]+)"', listed)[0])
    # The port of a page may be in use on this machine.
    text = re.sub(r"kpl local\b", "kpl local --port 0", text)
    status, output = _run(text, folder, kinesis)
    assert status in ({0, 130} if re.search(RUNS_UNTIL_INTERRUPTED, text) else {0}), output
    assert "Traceback" not in output


def test_the_files_that_run_the_other_commands_exist() -> None:
    for command in COMMANDS:
        for pattern, place in ELSEWHERE.items():
            if re.fullmatch(pattern, command.text):
                assert (ROOT / place).exists()


@pytest.mark.parametrize("target", sorted({text.split()[1] for _, text in COMMANDS if text.startswith("make ")}))
def test_a_make_target_exists_and_the_gate_or_a_release_runs_it(target: str) -> None:
    assert re.search(rf"^{target}:", MAKEFILE, re.MULTILINE)
    release = (ROOT / "docs" / "releasing.md").read_text(encoding="utf-8")
    assert f" {target}" in GATE or f"make {target}" in release


@pytest.mark.parametrize(
    "extra",
    sorted(
        {
            extra
            for _, text in COMMANDS
            for extras in re.findall(r"(?:kpl-integrations|\.)\[([\w,]+)\]", text)
            for extra in extras.split(",")
        }
    ),
)
def test_an_extra_that_a_page_installs_exists(extra: str) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert extra in project["optional-dependencies"]
