"""The programs on the pages about rates and fairness run and print what their comments promise."""

import re
from functools import partial
from pathlib import Path

import anyio
import pytest

from kpl_core.fairness import FairQueue
from kpl_core.limits.overflow_limiter import OVERFLOW
from kpl_core.records.user_record import TIERS
from kpl_integrations.local_kinesis import LocalKinesis, ThreadedLocalKinesis
from tests.support.virtual_time import run_in_virtual_time

HOWTO = Path(__file__).parents[2] / "docs" / "howto"
STREAMS, THREADS = ((HOWTO / name).read_text(encoding="utf-8") for name in ("policies.md", "policies-threads.md"))
PROGRAMS = re.findall(r"^```python\n(.*?)^```$", STREAMS + THREADS, re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("code", PROGRAMS, ids=range(len(PROGRAMS)))
def test_a_program_on_the_page_prints_what_its_comments_promise(
    code: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    if "Producer(" in code:
        with ThreadedLocalKinesis(LocalKinesis({"orders": 1})) as kinesis:
            monkeypatch.setenv("AWS_ENDPOINT_URL_KINESIS", kinesis.endpoint_url)
            exec(compile(code, "a page", "exec"), {"__name__": "__main__"})  # noqa: S102 - our own documentation
    else:
        # A program that measures a rate prints the same on a busy machine.
        monkeypatch.setattr(anyio, "run", partial(run_in_virtual_time, backend="asyncio"))
        exec(compile(code, "a page", "exec"), {"__name__": "__main__"})  # noqa: S102 - our own documentation
    printed = capsys.readouterr()
    assert printed.err == ""
    promised = re.findall(r"print\(.*\)  # (.+)$", code, re.MULTILINE)
    assert [line for line in promised if line not in printed.out.splitlines()] == []


def test_the_overflow_table_matches_the_limiter() -> None:
    words = {"queued": "waits as", "downgraded": "waits as", "diverted": "the fallback handler", "refused": "refused"}
    for (overflow, tier), (verdict, waits_in) in OVERFLOW.items():
        (row,) = re.findall(rf'^\| `"{overflow}"` \| (.+?) \| (.+?) \| (.+?) \|$', THREADS, re.MULTILINE)
        assert row[TIERS.index(tier)] == " ".join(filter(None, [words[verdict], waits_in]))


def test_a_thousand_new_flows_are_each_served_once_before_any_second_turn() -> None:
    queue: FairQueue[str] = FairQueue(weight_of=lambda flow: 1_000 if flow == "heavy" else 1)
    for flow in ["heavy", *map(str, range(1_000))]:
        for _ in range(2):
            queue.push(flow, flow, 1)

    assert len({queue.pop() for _ in range(1_001)}) == 1_001
