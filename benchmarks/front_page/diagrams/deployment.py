"""A deployment of the gateway: a load balancer, pods with a volume each, and the store that they share."""

from benchmarks.front_page.colours import Colours, svg, text
from benchmarks.front_page.shapes import area, box, markers, style, way

__all__ = ["draw"]

_WIDTH, _HEIGHT = 520, 606
_TITLE = (
    "A deployment: clients send to a load balancer, which sends requests to each pod whose /readyz is 200. Each pod "
    "has workers that share its port, and a volume with a spool file for each worker. All pods send to Kinesis and "
    "share rates and limits through one store: Redis, S3 or DynamoDB. Prometheus reads /metrics of each pod."
)
_PODS = (2, 270)


def _pod(x: int, number: int) -> str:
    left, right = (x + 12, 108), (x + 128, 108)
    return "".join(
        (
            area((x, 248), 188, 228, css="core"),
            text(x + 12, 213, f"pod {number}", "name start"),
            box(left, 228, "worker 0", css="box", height=40) + box(right, 228, "worker 1", css="box", height=40),
            box((x + 12, 224), 318, "volume of this pod", "spool-0.db, spool-1.db", css="disk", height=84),
            way(f"M{x + 66} 268V316", css="back", both=True) + way(f"M{x + 182} 268V316", css="back", both=True),
        )
    )


def draw(colours: Colours) -> str:
    """Return the SVG in these colours."""
    body = "".join(
        (
            markers(colours),
            box((120, 280), 2, "clients", "HTTP, AWS SDKs, OTLP"),
            way("M260 58V88"),
            box((120, 280), 90, "load balancer", "to pods whose /readyz is 200", css="outside"),
            way("M190 146V186") + way("M330 146V186"),
            *(_pod(x, number) for number, x in enumerate(_PODS)),
            way("M160 416V446") + way("M285 416V446"),
            box((60, 240), 448, "Kinesis", "each pod sends to all shards", css="outside"),
            way("M391 448V418"),
            box((316, 150), 448, "Prometheus", "reads /metrics"),
            way("M30 416V546", both=True) + way("M490 416V546", both=True),
            box(
                (2, 516), 548, "one store: Redis, S3 or DynamoDB", "tenants' rates and the shards' limits, for all pods"
            ),
        )
    )
    return svg(_WIDTH, _HEIGHT, title=_TITLE, style=style(colours), body=body)
