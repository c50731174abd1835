"""Draw the pictures that need no run: `python -m benchmarks.front_page [FOLDER]`."""

import sys
from pathlib import Path

from benchmarks.front_page import architecture, comparison
from benchmarks.front_page.colours import SCHEMES

FOLDER = Path(__file__).parents[2] / "docs" / "pictures"


def main(folder: Path) -> None:
    """Write the pictures into `folder`."""
    for picture in (architecture, comparison):
        for colours in SCHEMES:
            path = folder / f"{picture.__name__.rpartition('.')[2]}-{colours.name}.svg"
            path.write_text(picture.draw(colours), encoding="utf-8")
            print(path)


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else FOLDER)
