"""README.md and docs/index.md: their pictures are what the scripts draw, and both pages say the same."""

import re
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from benchmarks.front_page import comparison, demo
from benchmarks.front_page.__main__ import PICTURES as DRAWN_PICTURES, name_of
from benchmarks.front_page.colours import DARK, LIGHT, SCHEMES, Colours, contrast
from benchmarks.front_page.comparison import PANELS, Panel
from kpl_integrations.cli.demo import LOAD, DemoRecords

ROOT = Path(__file__).parents[2]
PICTURES = ROOT / "docs" / "pictures"
DRAWN = sorted(PICTURES.glob("*.svg"))
README = (ROOT / "README.md").read_text(encoding="utf-8")
INDEX = (ROOT / "docs" / "index.md").read_text(encoding="utf-8")
COMPARISON = (ROOT / "docs" / "comparison.md").read_text(encoding="utf-8")
RESULTS = (ROOT / "docs" / "benchmarks" / "results.md").read_text(encoding="utf-8")
CSS = (ROOT / "docs" / "site.css").read_text(encoding="utf-8")


@pytest.mark.parametrize("colours", SCHEMES, ids=lambda colours: colours.name)
@pytest.mark.parametrize("picture", DRAWN_PICTURES, ids=name_of)
def test_a_picture_is_what_its_script_draws_now(picture, colours: Colours) -> None:
    path = PICTURES / f"{name_of(picture)}-{colours.name}.svg"
    assert path.read_text(encoding="utf-8") == picture.draw(colours), "run: python -m benchmarks.front_page"


@pytest.mark.parametrize("path", DRAWN, ids=lambda path: path.stem)
def test_a_picture_loads_nothing_and_says_what_it_shows(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert len(text) <= 60_000
    picture = ET.fromstring(text)  # noqa: S314 - our own
    title = picture.find("{*}title")
    assert title is not None
    assert picture.get("aria-label") == title.text
    assert "".join(text.split("http://www.w3.org/2000/svg")).find("://") < 0
    assert not re.search(r"@import|@font-face|<script|<image|<foreignObject|\bon\w+=|url\((?!#)", text)


@pytest.mark.parametrize(("name", "columns"), demo.COLUMNS.items())
def test_the_recording_is_one_of_a_run_in_which_nothing_was_lost(name: str, columns: int) -> None:
    text = (PICTURES / f"{name}.svg").read_text(encoding="utf-8")
    last = ET.fromstring(text).find("{*}g[@class='last']")  # noqa: S314 - our own
    assert last is not None
    said = [each.text or "" for each in last]
    assert said[-1] == "lost 0: every record was read back unchanged"
    assert said[said.index("records") + 1] == "200,000"
    assert "of 1 MiB/s each, which limits the rate" in " ".join(said)
    # Each line ends within the terminal.
    width = float(re.findall(r'viewBox="0 0 (\d+)', text)[0])
    ends = [float(x) + float(length) for x, length in re.findall(r' x="([\d.]+)"[^>]* textLength="([\d.]+)"', text)]
    assert len(ends) > 100
    assert max(ends) <= width - 14
    assert columns * 8 < width
    rate = next(float(each.partition(" ")[0].replace(",", "")) for each in said if each.endswith(" a second"))
    for page in (README, INDEX):
        assert "about 8,000 records a second" in page
    assert rate == pytest.approx(8_000, rel=0.05)


def test_the_rate_of_the_demo_is_that_of_its_shards() -> None:
    records = DemoRecords(4_096, seed=0)
    mean = sum(len(key) + len(data) + 10 for key, data in map(records.record, range(4_096))) / 4_096
    assert LOAD * 4 * 1024 * 1024 / mean == pytest.approx(8_000, rel=0.05)
    for page in (README, INDEX):
        assert f"sends at {LOAD * 100:.0f} % of that" in " ".join(page.split())


@pytest.mark.parametrize("panel", PANELS, ids=lambda panel: panel.title)
def test_a_bar_is_an_outline_where_the_page_says_that_the_producer_does_less(panel: Panel) -> None:
    notes = {
        name: " ".join(re.findall(rf"^\* {re.escape(name)} \(.*?\): (.*)$", RESULTS, re.MULTILINE))
        for name in (program.name for program in panel.programs)
    }
    # Both Go producers have one sentence.
    go = re.search(r"The Go producers are (.*?)\. ", " ".join(COMPARISON.split()))
    assert go is not None
    for program in panel.programs:
        note = go[1] if "Go producer" in program.name else notes[program.name]
        assert program.is_bare is bool(re.search(r"\bno (aggregation, )?retr(y|ies)", note)), program.name


def test_what_the_pages_say_of_the_experts_program_is_measured() -> None:
    row = re.search(
        r"^\| kpl_core, compiled put_many\(\) \| [\d,]+ \| ([\d.]+) \[.*?\] \| [\d,]+ \| ([\d.]+) \[",
        COMPARISON,
        re.MULTILINE,
    )
    assert row is not None
    for page in (README, INDEX):
        assert f"has {row[1]} times its rate, and {row[2]} times with unique keys." in page
    _, bars = comparison.measured(PANELS[0])
    assert [bar.program.name for bar in bars[:2]] == ["kpl_core, compiled put_many()", "expert Go producer"]
    for panel in PANELS[1:]:
        assert comparison.measured(panel)[1][0].program.is_ours
    listed = re.search(r"an expert's Go producer ([\d,]+) over TLS", README)
    assert listed is not None
    expert = next(bar for bar in bars if bar.program.name == "expert Go producer")
    assert float(listed[1].replace(",", "")) == pytest.approx(expert.median, rel=0.01)


def _tree(page: str) -> str:
    """Return the tree of adapters, with the links of the site."""
    section = page.partition("\n## Which adapter do I need?\n")[2].partition("\n\n## ")[0]
    return "\n".join(line for line in section.splitlines() if re.match(" *- | {6}", line)).replace("](docs/", "](")


def test_both_pages_have_the_same_tree_of_adapters() -> None:
    assert _tree(README).count("\n") >= 20
    assert _tree(README) == _tree(INDEX)


def test_the_tree_leads_to_every_page_about_an_adapter() -> None:
    linked = {*re.findall(r"\(howto/([\w-]+)\.md\)", _tree(INDEX))}
    # These are about what one does with an adapter that is chosen.
    about_use = {"aws", "dashboard", "deploy", "metrics", "policies", "process-end", "tenants"}
    about_use |= {"spool-and-dead-letters", "traces"}
    for divided in (
        "asgi",
        "coordination",
        "ingest",
        "logging",
        "opentelemetry",
        "policies",
        "process-end",
        "producer",
    ):
        about_use |= {path.stem for path in (ROOT / "docs" / "howto").glob(f"{divided}-*.md")}
    assert linked == {path.stem for path in (ROOT / "docs" / "howto").glob("*.md")} - about_use


@pytest.mark.parametrize("name", ["architecture", "comparison"])
def test_each_page_has_its_pictures_for_light_and_dark(name: str) -> None:
    readme = re.search(
        rf'<picture>\n  <source media="\(prefers-color-scheme: dark\)" srcset="docs/pictures/{name}-dark.svg">\n'
        rf'  <img alt="([^"]+)" src="docs/pictures/{name}-light.svg" width="520">\n</picture>',
        README,
    )
    assert readme is not None
    texts = {
        re.findall(rf"^!\[(.+)\]\(pictures/{name}-{each}.svg#only-{each}\)$", INDEX, re.MULTILINE)[0]
        for each in ("light", "dark")
    }
    assert len(texts) == 1
    assert len(readme[1]) > 100


def _variables(scheme: str) -> dict[str, str]:
    rule = re.search(rf'^\[data-md-color-scheme="{scheme}"\] {{\n(.*?)^}}', CSS, re.MULTILINE | re.DOTALL)
    assert rule is not None
    return dict(re.findall(r"--md-([\w-]+): (#\w{6});", rule[1]))


@pytest.mark.parametrize(("scheme", "colours"), [("default", LIGHT), ("slate", DARK)])
def test_the_site_has_the_colours_of_the_pictures_and_enough_contrast(scheme: str, colours: Colours) -> None:
    found = _variables(scheme)
    assert found["typeset-a-color"] == colours.brand
    assert found["accent-fg-color"] == colours.disk
    page = found.get("default-bg-color", "#ffffff")
    assert page == colours.page
    for link in ("typeset-a-color", "accent-fg-color"):
        assert contrast(found[link], page) >= 4.5
    # The theme paints the tabs of the header with this opacity.
    opacity = re.search(r"\.md-tabs__link {\n  opacity: (0\.\d+);", CSS)
    assert opacity is not None
    head, words = found["primary-fg-color"], found["primary-bg-color"]
    mixed = [
        round(float(opacity[1]) * int(words[at : at + 2], 16) + (1 - float(opacity[1])) * int(head[at : at + 2], 16))
        for at in (1, 3, 5)
    ]
    assert contrast("#" + "".join(f"{part:02x}" for part in mixed), head) >= 4.5


def test_the_logo_has_the_colours_of_the_site_and_is_its_icon() -> None:
    logo = (PICTURES / "logo.svg").read_text(encoding="utf-8")
    assert {*re.findall(r'"(#\w{6})"', logo)} == {LIGHT.brand, "#ffffff"}
    settings = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    assert "  logo: pictures/logo.svg\n  favicon: pictures/logo.svg\n" in settings
    assert '<img alt="" src="docs/pictures/logo.svg"' in README
