"""The programs of the how-to page run unchanged, and its tables agree with the code."""

import re
from pathlib import Path

import pytest

from kpl_core.durability.spool.envelope import DeadLetter
from kpl_core.records.record_result import INCURABLE, REASONS

HOWTO = Path(__file__).parents[3] / "docs" / "howto" / "spool-and-dead-letters.md"
TEXT = HOWTO.read_text(encoding="utf-8")
PROGRAMS = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)


@pytest.mark.parametrize("program", PROGRAMS, ids=["spool", "dead letters"])
def test_each_documented_program_runs(
    program: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    exec(compile(program, str(HOWTO), "exec"), {})  # noqa: S102 - our own text
    assert capsys.readouterr().out in {"1 record to replay\n", "{'rate_limited': 1}\n"}


def test_the_documented_reasons_are_those_of_the_code() -> None:
    rows = dict(re.findall(r"^\| `(\w+)` \| .* \| (yes|no) \|$", TEXT, re.MULTILINE))
    assert rows == {reason: "no" if reason in INCURABLE else "yes" for reason in REASONS}


def test_every_field_of_the_envelope_is_documented() -> None:
    for field in DeadLetter.__struct_fields__:
        assert f"`{field}`" in TEXT
