"""Every page is in the site's navigation, every link works, and every Python block on every page runs."""

import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

import kpl_core
from kpl_integrations.local_kinesis import LocalKinesis, ThreadedLocalKinesis

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = sorted(DOCS.rglob("*.md"))
OUTSIDE = sorted(ROOT.glob("*.md"))
PACKAGES = str(Path(next(iter(kpl_core.__path__))).parent)
# The programs of these pages run one by one, in test_howto.py, test_howto_policies.py, test_tutorial.py and
# test_framework_pages.py.
RUN_ELSEWHERE = {
    DOCS / "configuration.md",
    DOCS / "howto" / "batch.md",
    DOCS / "howto" / "celery.md",
    DOCS / "howto" / "consuming.md",
    DOCS / "howto" / "django.md",
    DOCS / "howto" / "fastapi.md",
    DOCS / "howto" / "flask.md",
    DOCS / "howto" / "lambda.md",
    DOCS / "howto" / "litestar.md",
    DOCS / "howto" / "topics.md",
    DOCS / "howto" / "policies.md",
    DOCS / "howto" / "policies-threads.md",
    DOCS / "howto" / "producer.md",
    DOCS / "howto" / "producer-streams.md",
    DOCS / "howto" / "producer-threads.md",
    DOCS / "howto" / "testing.md",
    DOCS / "tutorial.md",
}


def _text(page: Path) -> str:
    return page.read_text(encoding="utf-8")


def _anchors(page: Path) -> set[str]:
    titles = re.findall(r"^#+ (.+)$", _text(page), re.MULTILINE)
    plain = (re.sub(r"\[(.+?)\]\(.+?\)", r"\1", title) for title in titles)
    return {re.sub(r"\s+", "-", re.sub(r"[^\w\s-]", "", title).strip().lower()) for title in plain}


def _broken_links(page: Path) -> Iterator[str]:
    prose = re.sub(r"^```.*?^```$", "", _text(page), flags=re.MULTILINE | re.DOTALL)
    # A page may have links and pictures in HTML too, such as one picture for light and one for dark pages.
    for markdown, html in re.findall(r"""\]\(([^)\s]+)\)|<[^>]* (?:href|src|srcset)="([^"\s]+)\"""", prose):
        target = markdown or html
        path, _, anchor = target.partition("#")
        if path.startswith(("http://", "https://", "mailto:")):
            continue
        found = (page.parent / path) if path else page
        if not found.exists() or (anchor and found.suffix == ".md" and anchor not in _anchors(found)):
            yield target


@pytest.mark.parametrize("page", [*OUTSIDE, *PAGES], ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_works(page: Path) -> None:
    assert list(_broken_links(page)) == []


def test_every_page_is_in_the_navigation_once() -> None:
    navigation = _text(ROOT / "mkdocs.yml").partition("\nnav:\n")[2]
    named = re.findall(r"^\s+- (?:[^:\n]+: )?([\w/.-]+\.md)$", navigation, re.MULTILINE)
    assert sorted(named) == sorted(str(page.relative_to(DOCS)) for page in PAGES)


def test_the_changelog_has_the_form_of_keep_a_changelog() -> None:
    headings = re.findall(r"^(##+ .+)$", _text(ROOT / "CHANGELOG.md"), re.MULTILINE)
    version = r"## \[\d+\.\d+\.\d+\] - (unreleased|\d{4}-\d\d-\d\d)"
    kind = r"### (Added|Changed|Deprecated|Removed|Fixed|Security)"
    project = tomllib.loads(_text(ROOT / "pyproject.toml"))["project"]
    assert headings[0].startswith(f"## [{project['version']}] - ")
    assert [heading for heading in headings if not re.fullmatch(f"{version}|{kind}", heading)] == []
    if sum(heading.startswith("## ") for heading in headings) == 1:
        # Nothing has been released before, so no user sees a change.
        assert headings[1:] == ["### Added"]


def _programs(page: Path) -> list[str]:
    """Return the page's Python blocks, except code titled "before"."""
    found = re.findall(r"^```python(?: title=\"(.*?)\")?\n(.*?)^```$", _text(page), re.MULTILINE | re.DOTALL)
    return [code for title, code in found if not title.startswith("before")]


WITH_PROGRAMS = [page for page in PAGES if page not in RUN_ELSEWHERE and _programs(page)]


@pytest.fixture(scope="module")
def kinesis() -> Iterator[ThreadedLocalKinesis]:
    with ThreadedLocalKinesis(LocalKinesis({"orders": 4, "logs": 1})) as running:
        yield running


@pytest.mark.long
@pytest.mark.parametrize("page", WITH_PROGRAMS, ids=lambda page: str(page.relative_to(DOCS)))
def test_the_python_on_a_page_prints_what_its_comments_promise(
    page: Path, kinesis: ThreadedLocalKinesis, tmp_path: Path
) -> None:
    programs = _programs(page)
    for number, code in enumerate(programs):
        (tmp_path / f"block_{number}.py").write_text(code, encoding="utf-8")
    # One interpreter per page, because imports would take most of the time.
    runner = "import runpy, sys\nfor path in sys.argv[1:]:\n    runpy.run_path(path, run_name='__main__')\n"
    ended = subprocess.run(
        [sys.executable, "-c", runner, *sorted(map(str, tmp_path.glob("block_*.py")))],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": PACKAGES, "AWS_ENDPOINT_URL_KINESIS": kinesis.endpoint_url},
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    promised = [line for code in programs for line in re.findall(r"print\(.*\)  # (.+)$", code, re.MULTILINE)]
    assert [line for line in promised if line not in ended.stdout.splitlines()] == []


def test_each_card_of_the_dashboard_names_a_section_of_the_runbook() -> None:
    page = (ROOT / "kpl_integrations" / "ingest" / "dashboard" / "page.html").read_text(encoding="utf-8")
    titles = re.findall(r"<h2( data-section=\"([^\"]+)\")?>", page)
    assert len(titles) > 10
    assert {section for _, section in titles} <= _anchors(ROOT / "docs" / "runbook.md")
