"""A `RejectionMonitor` between the requests that were refused and `/readyz`, which tells whoever sends them.

    rejections = RejectionMonitor()
    app = Starlette(
        middleware=[Middleware(HealthEndpoints), Middleware(BackpressureMiddleware, rejections=rejections)],
        lifespan=KinesisLifespan(config, checks={"rejections": rejection_check(rejections)}),
    )

The monitor reads no clock, and is not thread-safe: both ends run in the application's loop, and take its time.
"""

import time
from collections.abc import Callable

from kpl_core import Producer
from kpl_core.limits import RejectionMonitor
from kpl_integrations.asgi.health import ReadinessAnswer, ReadinessCheck

__all__ = ["rejection_check"]


def rejection_check(monitor: RejectionMonitor, *, clock: Callable[[], float] = time.monotonic) -> ReadinessCheck:
    """Return a check of readiness: no backpressure in the monitor's eyes; `clock` is the middleware's, in seconds."""

    def check(_producer: Producer) -> ReadinessAnswer:
        now = clock()
        return ReadinessAnswer(monitor.is_ready(now), f"{monitor.rejected_share(now):.1%} of requests refused")

    return check
