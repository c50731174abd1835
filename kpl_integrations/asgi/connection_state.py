"""Where a request finds its producer: in the lifespan's state, under one key."""

from collections.abc import Mapping
from typing import Any, Final

from kpl_core import KplError, Producer

__all__ = ["HEALTH_KEY", "STATE_KEY", "MissingProducer", "producer_of"]

STATE_KEY: Final = "kinesis"
HEALTH_KEY: Final = "kinesis_health"


class MissingProducer(KplError, RuntimeError):  # noqa: N818 - reads as a sentence where it is raised
    """No lifespan that opens a producer ran for this application; the message says why and what to do."""


def producer_of(scope: Mapping[str, Any]) -> Producer:
    """Return the producer of an HTTP or WebSocket scope.

    Raises:
        MissingProducer: none was opened for this application.
    """
    producer: Producer | None = (scope.get("state") or {}).get(STATE_KEY)
    if producer is None:
        raise MissingProducer(_why_it_is_missing(scope))
    return producer


def _why_it_is_missing(scope: Mapping[str, Any]) -> str:
    root_path = scope.get("root_path", "")
    # Starlette's Mount moves the root path and keeps the server's own under another name.
    if root_path != scope.get("app_root_path", root_path):
        return (
            f"this connection has no state[{STATE_KEY!r}]; it was answered by an app mounted at {root_path!r}, and a "
            f"mounted app's lifespan never runs: give KinesisLifespan to the outermost app, whose state the mounted "
            f"ones share, or wrap the outermost app in KinesisASGI"
        )
    return (
        f"this connection has no state[{STATE_KEY!r}], so no KinesisLifespan ran: give it to the outermost app "
        f"(`lifespan=KinesisLifespan(config)`), let the server run lifespans (uvicorn: not `--lifespan off`), and in "
        f"a test enter the client (`with TestClient(app)`)"
    )
