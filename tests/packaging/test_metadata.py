"""The metadata of a release: URLs, authors, and a README whose links work on an index of packages."""

import re
import subprocess
import sys
import zipfile
from email.parser import Parser
from pathlib import Path
from typing import Any

import hatch_build

ROOT = Path(__file__).parents[2]
OWNER, REPOSITORY = "The Owner", "https://example.org/owner/name"


def fields(**config: str) -> dict[str, Any]:
    metadata: dict[str, Any] = {"version": "1.2.3"}
    hatch_build.CustomMetadataHook(str(ROOT), {"owner": "", "repository": "", **config}).update(metadata)
    return metadata


def asked(folder: Path) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, str(ROOT / ".ci" / "may-release"), str(folder)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_links_of_the_readme_lead_to_the_files_of_the_release() -> None:
    text = "[a](docs/a.md#part) ![b](docs/b.png) [c](https://c.example) [d](#here) [![e](e.svg)](f.md)"
    assert hatch_build.with_absolute_links(text, "https://x/blob/v1") == (
        "[a](https://x/blob/v1/docs/a.md#part) ![b](https://x/blob/v1/docs/b.png?raw=true) [c](https://c.example) "
        "[d](#here) [![e](https://x/blob/v1/e.svg?raw=true)](https://x/blob/v1/f.md)"
    )
    picture = '<source srcset="b.svg"><img src="docs/c.svg" alt="d"><a href="e.md"><a href="https://c.example">'
    assert hatch_build.with_absolute_links(picture, "https://x/blob/v1") == (
        '<source srcset="https://x/blob/v1/b.svg?raw=true"><img src="https://x/blob/v1/docs/c.svg?raw=true" alt="d">'
        '<a href="https://x/blob/v1/e.md"><a href="https://c.example">'
    )
    readme = fields(owner=OWNER, repository=f"{REPOSITORY}/")["readme"]["text"]
    links = re.findall(r"""(?:\]\(|(?:href|src|srcset)=")([^)"\s]+)""", readme)
    assert len(links) > 20
    assert [link for link in links if not link.startswith(("https://", "#"))] == []
    files = {
        link.removeprefix(f"{REPOSITORY}/blob/v1.2.3/").partition("#")[0].removesuffix("?raw=true") for link in links
    }
    assert [name for name in files if not name.startswith("http") and not (ROOT / name).exists()] == []


def test_without_an_owner_nothing_is_claimed() -> None:
    for given in ({}, {"owner": OWNER}, {"repository": REPOSITORY}):
        found = fields(**given)
        assert found["readme"]["text"] == (ROOT / "README.md").read_text(encoding="utf-8")
        assert "urls" not in found


def test_the_urls_are_of_the_repository() -> None:
    found = fields(owner=OWNER, repository=REPOSITORY)
    assert found["authors"] == [{"name": OWNER}]
    assert {*found["urls"]} == {"Source", "Documentation", "Changelog", "Issues"}
    assert all(url.startswith(REPOSITORY) for url in found["urls"].values())


def test_files_without_an_owner_may_not_be_published(dist: Path, wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [each for each in archive.namelist() if each.endswith(".dist-info/METADATA")]
        metadata = Parser().parsestr(archive.read(name).decode())
    assert metadata["Description-Content-Type"] == "text/markdown"
    done = asked(dist)
    is_owned = metadata.get_all("Project-URL") is not None
    assert ("names no owner" in done.stderr) is not is_owned
    if not is_owned:
        assert done.returncode == 1


def test_an_empty_folder_may_not_be_published(tmp_path: Path) -> None:
    done = asked(tmp_path)
    assert done.returncode == 1
    assert "0 pure wheels; run make dist" in done.stderr
