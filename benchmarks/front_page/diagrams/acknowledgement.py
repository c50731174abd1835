"""The life of an acknowledgement of the gateway: queued, spooled, delivered, and where each record can end."""

from benchmarks.front_page.colours import Colours, svg, text
from benchmarks.front_page.shapes import area, box, markers, style, way

__all__ = ["draw"]

_WIDTH, _HEIGHT = 520, 660
_TITLE = (
    "The life of an acknowledgement. A request is rejected before anything is queued, or its records are in memory: "
    "202 queued. With a spool they are then in its file: 202 spooled. Then they are sent, and Kinesis answers: 200 "
    "delivered. A record in memory is lost at kill -9, and counted if there are several workers; one in the spool is "
    "delivered by the next process. A record without an answer in time stays in the spool, or becomes a dead letter, "
    "or fails. A record that Kinesis rejects becomes a dead letter or fails."
)
# Left edge and width: what the client gets, where the record is, where it can end.
_CLIENT, _RECORD, _END = (2, 124), (146, 166), (346, 172)
_CLIENT_X, _CENTRE = 64, 229


def _records() -> str:
    return "".join(
        (
            text(_CLIENT_X, 20, "client gets", "name"),
            text(_CENTRE, 20, "the record is", "name"),
            text(432, 20, "and can end", "name"),
            box(_RECORD, 36, "a request", "credentials, rates,", "format, room", height=76),
            box(_RECORD, 146, "in memory", css="core"),
            box(_RECORD, 276, "in the spool", "with --spool only", css="disk"),
            box(_RECORD, 404, "on its way", "sent, and retried", css="core"),
            box(_RECORD, 532, "answered", "by Kinesis", css="outside"),
            way("M229 112V144") + way("M229 202V274") + way("M229 332V402") + way("M229 460V530"),
        )
    )


def _answers() -> str:
    return "".join(
        (
            box(_CLIENT, 146, "202", "queued"),
            box(_CLIENT, 276, "202", "spooled"),
            box(_CLIENT, 532, "200", "delivered", "each result", height=76),
            way("M146 174H128") + way("M146 304H128") + way("M146 560H128"),
            text(_CLIENT_X, 424, "one of three,"),
            text(_CLIENT_X, 443, "chosen by ack"),
        )
    )


def _ends() -> str:
    return "".join(
        (
            box(_END, 36, "rejected", "4xx or 503:", "nothing is queued", height=76),
            box(_END, 136, "kill -9: lost", "without a spool;", "--workers counts it", height=76),
            box(_END, 266, "kill -9: kept", "the next process", "delivers it", css="disk", height=76),
            box(_END, 385, "not answered", "it stays in the spool,", "or is a dead letter,", "else failed", height=95),
            box(_END, 522, "rejected", "by Kinesis: a dead", "letter, else failed", height=76),
            way("M312 74H344") + way("M312 174H344") + way("M312 304H344", css="back") + way("M312 432H344"),
            way("M312 560H344"),
            area((2, 516), 624, 34),
            text(260, 646, "While the process runs, each record is counted."),
        )
    )


def draw(colours: Colours) -> str:
    """Return the SVG in these colours."""
    body = f"{markers(colours)}{_records()}{_answers()}{_ends()}"
    return svg(_WIDTH, _HEIGHT, title=_TITLE, style=style(colours), body=body)
