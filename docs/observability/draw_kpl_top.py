"""Draw `kpl-top.svg`, the picture of `kpl top` in the documentation: `python docs/observability/draw_kpl_top.py`."""

import io
import math
import sys
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console

from kpl_integrations.cli.top import screen
from kpl_integrations.gateway_figures import RateTracker, StatsDocument

PICTURE = Path(__file__).parent / "kpl-top.svg"
LOOKS = 48


def gateway_at(look: int) -> dict[str, Any]:
    """Return the statistics of a gateway with rising traffic and one flooding tenant, at this snapshot."""
    delivered = sum(round(2_600 + 1_400 * math.sin(each / 7)) for each in range(look))
    flood = 900 * max(0, look - 30)
    return {
        "state": "open",
        "records": {
            "accepted": 1_284_000 + delivered + flood,
            "delivered": 1_284_000 + delivered,
            "failed": {},
            "spooled": 0,
            "dead_lettered": 3,
            "buffered": flood,
            "buffered_bytes": 1_100 * flood,
        },
        "room": {
            "outstanding_records": flood,
            "max_records": 100_000,
            "outstanding_bytes": 1_100 * flood,
            "max_bytes": 33_554_432,
        },
        "answers": {"202": 40 * look, "429": 6 * max(0, look - 30)},
        "refusals": {"share of the queue": 6 * max(0, look - 30)},
        "streams": {
            "orders": {
                "accepted": delivered + flood,
                "delivered": delivered,
                "failed": 0,
                "waiting": flood,
                "in_flight": 480,
                "buffered": flood,
                "breakers": {},
            },
            "clicks": {"accepted": 350 * look, "delivered": 350 * look, "in_flight": 120, "buffered": 35},
        },
        "tenants": {
            "bulk-import": {
                "requests": 12 * look,
                "accepted_records": 1_800 * look,
                "waiting_records": flood,
                "waiting_bytes": 1_100 * flood,
                "refused": {"share of the queue": 6 * max(0, look - 30)},
            },
            "shop": {
                "requests": 18 * look,
                "accepted_records": 900 * look,
                "waiting_records": 12,
                "waiting_bytes": 9_600,
            },
            "mobile": {"requests": 10 * look, "accepted_records": 350 * look},
        },
    }


def picture() -> str:
    """Return the SVG."""
    watch = RateTracker("http://127.0.0.1:8080")
    views = [watch.update(msgspec.convert(gateway_at(look), StatsDocument), float(look)) for look in range(LOOKS)]
    console = Console(record=True, width=100, file=io.StringIO(), force_terminal=True, color_system="truecolor")
    console.print(screen(views[-1]))
    return console.export_svg(title="kpl top", unique_id="kpl-top")


if __name__ == "__main__":
    PICTURE.write_text(picture(), encoding="utf-8")
    sys.stdout.write(f"drew {PICTURE}\n")
