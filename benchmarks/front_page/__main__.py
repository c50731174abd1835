"""Draw the pictures that need no run: `python -m benchmarks.front_page [FOLDER]`."""

import sys
from importlib import import_module
from pathlib import Path
from types import ModuleType

from benchmarks.front_page import comparison
from benchmarks.front_page.colours import SCHEMES

FOLDER = Path(__file__).parents[2] / "docs" / "pictures"

_DIAGRAMS = (
    "acknowledgement",
    "architecture",
    "asgi",
    "configuration",
    "deployment",
    "invariant",
    "journey",
    "leases",
    "log_handler",
    "opentelemetry",
    "outbox",
    "policies",
    "process_end",
    "sizing",
    "spool_states",
)
PICTURES = (comparison, *(import_module(f"benchmarks.front_page.diagrams.{name}") for name in _DIAGRAMS))


def name_of(picture: ModuleType) -> str:
    """Return the name of a picture's files, such as `spool-states`."""
    return picture.__name__.rpartition(".")[2].replace("_", "-")


def main(folder: Path) -> None:
    """Write the pictures into `folder`."""
    for picture in PICTURES:
        for colours in SCHEMES:
            path = folder / f"{name_of(picture)}-{colours.name}.svg"
            path.write_text(picture.draw(colours), encoding="utf-8")
            print(path)


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else FOLDER)
