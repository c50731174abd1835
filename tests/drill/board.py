"""The dashboard as an operator sees it: a page in a real Chromium, logged in with the admin key."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple

from playwright.sync_api import Page

from tests.support.chromium import chromium

# Where pictures of each fault are saved, if set.
PICTURES = os.environ.get("KPL_PICTURES")
_WINDOWS = {"desktop": (1400, 900), "phone": (390, 1160)}
_SCHEMES: Final[tuple[Literal["light", "dark"], ...]] = ("light", "dark")
_COLOURS = {"good": "green", "warn": "amber", "bad": "red", "": "no colour"}
# The answer of each card, with its remark.
QUESTIONS = {"lost": "lost", "late": "late", "cause": "cause", "suffers": "suffers", "hot": "hot shard"}
_READ = """() => ({
  state: document.getElementById("state").dataset.state,
  parts: Object.fromEntries([...document.querySelectorAll("#parts li")].map((each) =>
    [each.firstChild.textContent.trim().replace(" ", "_"), each.dataset.state])),
  texts: Object.fromEntries(["lost", "late", "cause", "suffers", "hot", "answers", "numbers"].map((id) =>
    [id, [id, `${id}-why`].map((each) => document.getElementById(each)?.innerText ?? "").filter((each) => each)
      .join(", ").replace(/\\s+/g, " ").trim()])),
  levels: Object.fromEntries(["lost", "late", "cause", "suffers", "hot"].map((id) =>
    [id, document.getElementById(id).dataset.level ?? ""])),
})"""


class Board(NamedTuple):
    """What the page shows at one instant: the state of the connection and of each part, and the text of each card."""

    state: str
    parts: dict[str, str]
    texts: dict[str, str]
    # Of the colour of each answer: good, warn, bad, or "" for none.
    levels: dict[str, str]

    def __str__(self) -> str:
        troubled = ", ".join(f"{part} {state}" for part, state in self.parts.items() if state != "ok")
        cards = [f"{name}: {self.texts[card]} ({_COLOURS[self.levels[card]]})" for card, name in QUESTIONS.items()]
        return "; ".join([f"parts: {troubled or 'all ok'}", *cards])


class OpenBoard:
    """A page that stays open."""

    def __init__(self, page: Page) -> None:
        self._page = page

    def look(self) -> Board:
        """Return what it shows now."""
        seen: dict[str, Any] = self._page.evaluate(_READ)
        return Board(**seen)

    def take_pictures(self, name: str) -> None:
        """Save pictures of it if they are wanted: on a desktop and a phone, light and dark."""
        for window, (width, height) in _WINDOWS.items() if PICTURES else ():
            self._page.set_viewport_size({"width": width, "height": height})
            for scheme in _SCHEMES:
                self._page.emulate_media(color_scheme=scheme)
                path = Path(str(PICTURES)) / f"{name.replace(' ', '-')}-{window}-{scheme}.png"
                self._page.screenshot(path=path, full_page=True)


@contextmanager
def opened_board(url: str, admin_key: str) -> Iterator[OpenBoard | None]:
    """Yield the dashboard of a gateway; None without a Chromium."""
    if shutil.which("chromium") is None:
        yield None
        return
    with chromium() as browser:
        # An expired certificate is one of the cases.
        page = browser.new_page(ignore_https_errors=True)
        page.goto(f"{url}/dashboard")
        page.fill("#key", admin_key)
        page.get_by_role("button", name="Log in").click()
        page.wait_for_selector("#state[data-state=open]")
        yield OpenBoard(page)
