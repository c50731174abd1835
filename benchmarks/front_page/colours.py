"""The project's own colours, light and dark, and what all pictures of the first pages do with them.

docs/site.css uses the same values. tests/docs/test_first_pages.py checks both, and each contrast.
"""

from dataclasses import dataclass
from xml.sax.saxutils import escape, quoteattr

__all__ = ["DARK", "LIGHT", "SCHEMES", "Colours", "contrast", "svg", "text"]

#: Fonts of the reader's system; a picture in an <img> may load none.
SANS = "system-ui, -apple-system, 'Segoe UI', 'DejaVu Sans', sans-serif"
MONO = "ui-monospace, SFMono-Regular, Menlo, Consolas, 'DejaVu Sans Mono', monospace"


@dataclass(frozen=True, slots=True)
class Colours:
    """One scheme. `page` is the background that the others are made for; the pictures do not paint it."""

    name: str
    page: str
    ink: str
    muted: str
    brand: str
    brand_soft: str
    surface: str
    line: str
    disk: str
    disk_soft: str


LIGHT = Colours(
    name="light",
    page="#ffffff",
    ink="#13272b",
    muted="#4a5d63",
    brand="#0b6b72",
    brand_soft="#e2f3f4",
    surface="#ffffff",
    line="#7d9499",
    disk="#8a5200",
    disk_soft="#fdf1dc",
)
DARK = Colours(
    name="dark",
    page="#0e191c",
    ink="#e6f0f2",
    muted="#a7babf",
    brand="#4cc4cc",
    brand_soft="#10393d",
    surface="#16262a",
    line="#6c858b",
    disk="#e3a94a",
    disk_soft="#3a2b0e",
)
SCHEMES = (LIGHT, DARK)


def _luminance(colour: str) -> float:
    """Return the relative luminance of `#rrggbb` (WCAG 2.2)."""
    parts = (int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5))
    red, green, blue = (part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def contrast(one: str, other: str) -> float:
    """Return the contrast of two colours `#rrggbb`, from 1 to 21 (WCAG 2.2)."""
    darker, lighter = sorted((_luminance(one), _luminance(other)))
    return (lighter + 0.05) / (darker + 0.05)


def svg(width: int, height: int, *, title: str, style: str, body: str) -> str:
    """Return a document of this size; `title` is what a screen reader says."""
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}" '
        f'role="img" aria-label={quoteattr(title)}>\n'
        f"<title>{escape(title)}</title>\n<style>{style}</style>\n{body}</svg>\n"
    )


def text(x: float, y: float, words: str, css: str = "") -> str:
    """Return a line of text; `css` is its class."""
    name = f' class="{css}"' if css else ""
    return f'<text{name} x="{x:g}" y="{y:g}">{escape(words)}</text>\n'
