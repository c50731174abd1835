"""How many words of prose the pages have: `python -m benchmarks.page_words [PAGE ...]`.

A page of one task is read at one sitting: at most 900 words. Tables, code and pictures are looked at, and do not count.
"""

import re
import sys
from pathlib import Path

__all__ = ["MOST_WORDS", "prose_words"]

DOCS = Path(__file__).parents[1] / "docs"
#: The most words of a page of one task.
MOST_WORDS = 900

_CODE = re.compile(r"^( *)(```|~~~).*?^\1\2 *$", re.MULTILINE | re.DOTALL)
_TABLE_OR_COMMENT = re.compile(r"^\|.*$|^<!--.*?-->$", re.MULTILINE)
_PICTURE = re.compile(r"!\[[^\]]*\]\([^)]*\)")
_TARGET = re.compile(r"\]\([^)]*\)")
_WORD = re.compile(r"[A-Za-z0-9][\w'.:/-]*")


def prose_words(page: str) -> int:
    """Return the words of a page in Markdown, without its tables, code, pictures and the targets of its links."""
    for pattern in (_CODE, _TABLE_OR_COMMENT, _PICTURE):
        page = pattern.sub("", page)
    return len(_WORD.findall(_TARGET.sub("]", page)))


def main(paths: list[Path]) -> None:
    """Print the pages, the longest first."""
    found = sorted(((prose_words(path.read_text(encoding="utf-8")), path) for path in paths), reverse=True)
    for words, path in found:
        print(f"{words:6,}  {path.relative_to(DOCS)}{'  above the bound' if words > MOST_WORDS else ''}")


if __name__ == "__main__":
    main([Path(name).resolve() for name in sys.argv[1:]] or sorted(DOCS.rglob("*.md")))
