"""The decision records: one page each, and a sentence for each dependency."""

import re
import tomllib
from itertools import chain
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
RECORDS = sorted((ROOT / "docs" / "decisions").glob("*.md"))
LONGEST_RECORD_LINES = 90


@pytest.mark.parametrize("record", RECORDS, ids=lambda record: record.stem)
def test_a_record_has_context_decision_and_consequences_on_one_page(record: Path) -> None:
    text = record.read_text(encoding="utf-8")
    number = int(record.stem.partition("-")[0])
    assert text.startswith(f"# {number}. ")
    chapters = re.findall(r"^## (.+)$", text, re.MULTILINE)
    assert [chapter for chapter in chapters if chapter != "Measured"] == ["Context", "Decision", "Consequences"]
    assert len(text.splitlines()) <= LONGEST_RECORD_LINES


def test_records_are_numbered_without_gaps() -> None:
    numbers = [record.name.partition("-")[0] for record in RECORDS]
    assert numbers == [f"{number:04}" for number in range(1, len(numbers) + 1)]


def test_every_dependency_has_its_sentence() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    requirements = chain(
        project["build-system"]["requires"],
        project["project"]["dependencies"],
        *project["project"]["optional-dependencies"].values(),
        *project["dependency-groups"].values(),
        *(
            hook.get("dependencies", ())
            for hook in project["tool"]["hatch"]["build"]["targets"]["wheel"]["hooks"].values()
        ),
    )
    names = {
        re.split(r"[\[<>=~!; ]", requirement, maxsplit=1)[0]
        for requirement in requirements
        if isinstance(requirement, str)
    }
    (page,) = (record for record in RECORDS if record.stem.endswith("-dependencies"))
    explained = set(re.findall(r"`([\w-]+)`", page.read_text(encoding="utf-8")))
    assert names - explained - {project["project"]["name"]} == set()
