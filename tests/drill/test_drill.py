"""The drill's cases that no quicker test has from end to end: a full disk, TLS, Kinesis, and a killed worker."""

import re
from pathlib import Path

import pytest

from tests.drill.__main__ import drill
from tests.drill.cases import CASES, Case, NotRun
from tests.support.chromium import needs_chromium
from tests.support.prometheus_server import needs_prometheus

PAGE = (Path(__file__).parents[2] / "docs" / "drill.md").read_text(encoding="utf-8")
RUN = {"spool full", "certificate expired", "Kinesis denied", "a shard throttled", "a worker killed"}


@pytest.mark.long
@pytest.mark.timeout(400)
@needs_prometheus
@needs_chromium
@pytest.mark.parametrize("case", [case for case in CASES if case.name in RUN], ids=lambda case: case.name)
def test_all_that_is_said_about_a_broken_part_is_true_and_ends_by_itself(case: Case, tmp_path: Path) -> None:
    try:
        drilled = drill(case, tmp_path)
    except NotRun as reason:
        pytest.skip(f"not run: {reason}")
    assert not drilled.problems, "\n".join([*drilled.lines, *drilled.problems])


def test_the_page_has_what_each_case_prints() -> None:
    said = ["client", "/readyz", "alert", "dashboard", "log", "doctor", "end", "trace"]
    shown = dict(re.findall(r"^## (.+)\n\n\| \| \|\n\| --- \| --- \|\n((?:\|.*\n)+)", PAGE, re.MULTILINE))
    assert [name.lower() for name in shown] == [case.name.lower() for case in CASES]
    for case, rows in zip(CASES, shown.values(), strict=True):
        assert re.findall(r"^\| (\S+) \|", rows, re.MULTILINE) == said
        assert f"| alert | {case.alert} is " in rows
