"""The ends of a process, and what becomes of the records that it has put and not closed."""

from benchmarks.front_page.colours import Colours, svg, text
from benchmarks.front_page.shapes import box, markers, style, way

__all__ = ["draw"]

_TITLE = (
    "How a process ends, and what becomes of its records. At the end of the script, by sys.exit, an exception or "
    "Ctrl-C, they are delivered within 5 seconds. At SIGTERM with flush_on_sigterm=True they are delivered within 3 "
    "seconds; without that option they are lost. When a server ends, they are delivered by the server's shutdown or "
    "the interpreter's exit. At SIGKILL or os._exit they are lost, unless a write-ahead spool has them."
)
_END, _RECORDS = (2, 218), (276, 242)
_STEP = 74
#: The end and its detail; what becomes of the records, and how; the kind of the second box.
_ROWS = (
    ("end of the script", "sys.exit, exception, Ctrl-C", "delivered within 5 s", "threading's exit, atexit", "core"),
    ("SIGTERM", "flush_on_sigterm=True", "delivered within 3 s", "then the signal has its effect", "core"),
    ("SIGTERM", "without that option", "lost", "what was not yet sent", "disk"),
    ("end of a server", "SIGTERM, SIGINT", "delivered", "server's shutdown, or exit", "core"),
    ("SIGKILL, os._exit", "no code runs", "lost", "unless in a write-ahead spool", "disk"),
)


def draw(colours: Colours) -> str:
    """Return the SVG in these colours."""
    parts = [markers(colours), text(111, 18, "the process ends by"), text(397, 18, "its records are")]
    for number, (end, detail, result, how, css) in enumerate(_ROWS):
        y = 30 + _STEP * number
        parts += [
            box(_END, y, end, detail),
            way(f"M222 {y + 28}H274", css="back" if css == "disk" else "way"),
            box(_RECORDS, y, result, how, css=css),
        ]
    return svg(520, 30 + _STEP * len(_ROWS) - 16, title=_TITLE, style=style(colours), body="".join(parts))
