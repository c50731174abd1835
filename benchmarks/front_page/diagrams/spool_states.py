"""The states of a spool: those of its file, and those of a record in it."""

from benchmarks.front_page.colours import Colours, svg, text
from benchmarks.front_page.shapes import area, box, markers, style, way

__all__ = ["draw"]

_WIDTH, _HEIGHT = 520, 742
_TITLE = (
    "The states of a spool. The file: opening it fails with SpoolLocked, SpoolCorrupt or SpoolUnavailable, or it "
    "stores. While the disk or max_bytes is full it cannot store, and stores again within about a second after there "
    "is room. After a failed write or fsync the process must be restarted. A record in the file: claimed while its "
    "process sends it, in the backlog after a crash, an expiry, an open breaker or a close, replayed from there, a "
    "dead letter if it failed permanently, and deleted once Kinesis confirmed it."
)
_LEFT, _RIGHT = (20, 190), (310, 190)


def _file() -> str:
    return "".join(
        (
            area((2, 516), 2, 322),
            text(20, 28, "the file", "name start"),
            box(_LEFT, 44, "opening"),
            box(_RIGHT, 44, "refused", "SpoolLocked,", "SpoolCorrupt", height=76),
            box(_LEFT, 154, "stores", css="core"),
            box(_RIGHT, 144, "cannot store", "disk or max_bytes", "is full", css="disk", height=76),
            box(_LEFT, 250, "failed", "restart the process", css="disk"),
            way("M210 72H308") + way("M115 100V152"),
            way("M210 170H308") + way("M310 196H212", css="back"),
            text(260, 163, "full"),
            text(260, 215, "room"),
            way("M115 210V248"),
            way("M405 220V278H212"),
            text(340, 298, "a failed write or fsync"),
        )
    )


def _record() -> str:
    return "".join(
        (
            area((2, 516), 344, 396),
            text(20, 370, "a record in it", "name start"),
            box(_LEFT, 386, "claimed", "its process sends it", css="core"),
            box(_RIGHT, 386, "backlog", "it waits for replay", css="disk"),
            box(_RIGHT, 528, "dead letter", "with a reason", css="disk"),
            box(_LEFT, 656, "deleted", "Kinesis has it", css="outside"),
            way("M210 404H308", css="back") + way("M310 426H212"),
            text(260, 398, "crash"),
            text(260, 445, "replay"),
            text(405, 462, "also: expired, open"),
            text(405, 481, "breaker, close"),
            way("M115 442V654"),
            text(66, 560, "confirmed"),
            way("M180 442V540H308", css="back"),
            text(244, 533, "final failure"),
            way("M310 568H196V654"),
            text(256, 561, "redriven"),
            way("M405 584V654"),
            box(_RIGHT, 656, "purged", "by an operator"),
        )
    )


def draw(colours: Colours) -> str:
    """Return the SVG in these colours."""
    body = f"{markers(colours)}{_file()}{_record()}"
    return svg(_WIDTH, _HEIGHT, title=_TITLE, style=style(colours), body=body)
