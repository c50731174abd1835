"""Every command as a newcomer runs it: on a terminal and in a pipe, with --json, and with an error."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
import typer

from kpl_core.durability.dead_letters import DeadLetterQueue
from kpl_core.durability.spool import Spool, SpooledRecord, SpoolOptions
from kpl_integrations.cli.app import app
from kpl_integrations.ingest.tenants import OpenTenants, Tenant
from kpl_integrations.local_kinesis import LocalKinesis, ThreadedLocalKinesis
from tests.support.kpl_process import in_a_terminal, run, without_escape_codes
from tests.support.running_gateway import running_gateway

ESCAPE = "\x1b"
BAR = "━"


class Place(NamedTuple):
    """The resources that the commands are run on."""

    kinesis: str
    gateway: str
    lines: str
    spool: str

    def filled_in(self, command: str) -> list[str]:
        return command.format(**self._asdict()).split()


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    folder: Path = tmp_path_factory.mktemp("newcomer")
    lines = folder / "lines.txt"
    # Enough records for a visible bar.
    lines.write_text("".join(f"line {number}\n" for number in range(40_000)))
    spool = folder / "orders.spool"
    with Spool(SpoolOptions(path=spool)) as opened:
        queue = DeadLetterQueue(opened)
        letter = queue.letter(SpooledRecord("orders", "key", b"data", 1_700_000_000.0), "ttl")
        queue.add_nowait([letter]).result()
    with (
        ThreadedLocalKinesis(LocalKinesis({"orders": 4}, enforce_limits=False)) as kinesis,
        running_gateway(OpenTenants(Tenant(id="local")), {"orders": 1}) as gateway,
    ):
        yield Place(kinesis.endpoint_url, gateway.url, str(lines), str(spool))


class Trial(NamedTuple):
    """A command; whether it shows a progress bar; how to request JSON ("" has none); what ends it on a terminal."""

    command: str
    bar: bool = False
    as_json: str = "--json"
    ends_by: str = ""


# By the name of the command, all of them.
TRIALS = {
    "demo": Trial("demo --records 8000 --no-split", bar=True),
    "local": Trial("local --port 0", as_json="", ends_by="In Python"),
    "serve": Trial("serve --local --port 0", as_json="", ends_by="In another terminal"),
    "put": Trial("put orders {lines} --endpoint-url {kinesis}", bar=True),
    "tail": Trial("tail orders --from-start --no-follow --limit 5 --endpoint-url {kinesis}"),
    "top": Trial("top {gateway} --interval 0.1 --count 1"),
    "doctor": Trial("doctor orders --endpoint-url {kinesis}"),
    "spool": Trial("spool count {spool}"),
    "dlq": Trial("dlq list {spool}"),
    "keys": Trial("keys new"),
}
# The error, the exit status, and words of the one sentence.
FAILURES = [
    ("demo --records 0", 2, "greater than or equal to 1"),
    ("local --port 99999", 2, "or equal to 65535"),
    ("serve", 2, "tenants"),
    ("put missing {lines} --endpoint-url {kinesis}", 3, "has no stream 'missing'"),
    ("put orders nowhere.txt --endpoint-url {kinesis}", 4, "nowhere.txt"),
    ("tail orders --endpoint-url http://127.0.0.1:9", 3, "cannot be reached; check --endpoint-url"),
    ("top http://127.0.0.1:9", 3, "no gateway answers"),
    ("spool count nowhere.spool", 4, "nowhere.spool is not a file"),
    ("dlq show {spool} none", 4, "there is no letter 'none'"),
    ("keys check nowhere.toml", 4, "nowhere.toml"),
]


def test_every_command_is_tried():
    commands = typer.main.get_command(app).commands  # type: ignore[attr-defined] # a group, not any command
    # `coordinate` has its own test, because it is a server for other processes.
    assert set(commands) - {"coordinate"} == set(TRIALS)


@pytest.mark.parametrize("name", TRIALS)
def test_on_a_terminal_a_long_command_has_a_bar_and_every_command_ends_well(place, name):
    trial = TRIALS[name]
    status, shown, _ = in_a_terminal(
        *place.filled_in(trial.command), after=trial.ends_by, typed="\x03" * bool(trial.ends_by)
    )
    assert status == 0, shown
    assert (BAR in shown and f"{ESCAPE}[" in shown) or not trial.bar, shown
    assert without_escape_codes(shown).strip()


@pytest.mark.parametrize("name", [name for name, trial in TRIALS.items() if not trial.ends_by])
def test_in_a_pipe_there_are_no_bars_and_no_escape_codes(place, name):
    status, out, err = run(*place.filled_in(TRIALS[name].command))
    assert status == 0, err
    assert ESCAPE not in out + err
    # The gateway's buffer is drawn as a bar too, as part of the result.
    assert BAR not in err
    assert out.strip()


@pytest.mark.parametrize("name", [name for name, trial in TRIALS.items() if trial.as_json])
def test_json_is_valid_json_and_nothing_else_is_on_stdout(place, name):
    trial = TRIALS[name]
    status, out, err = run(*place.filled_in(trial.command), trial.as_json)
    assert status == 0, err
    assert all(isinstance(json.loads(line), dict) for line in out.splitlines())


@pytest.mark.parametrize(("command", "status", "words"), FAILURES)
def test_an_error_is_one_sentence_with_the_fix_and_no_traceback(place, command, status, words):
    ended = run(*place.filled_in(command))
    assert (ended.status, ended.out) == (status, "")
    assert words in re.sub(r"[\s│]+", " ", ended.err)
    assert "Traceback" not in ended.err
    # Errors that typer detects are printed in typer's own box.
    assert ended.err.count("\n") == 1 or "Usage:" in ended.err
