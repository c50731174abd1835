"""Liveness and readiness, from what the producer knows about itself: never a call to AWS.

Alive: the loop turns. Ready: it takes records, and there is room for them.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, NamedTuple

import msgspec

from kpl_core import Producer
from kpl_integrations.asgi.connection_state import HEALTH_KEY, producer_of
from kpl_integrations.asgi.protocol import ASGIApp, Receive, Scope, Send
from kpl_integrations.asgi.responses import send_json

__all__ = ["HealthEndpoints", "ProducerHealth", "ReadinessAnswer", "ReadinessCheck", "health_of"]

DEFAULT_FULL_ABOVE: Final = 0.9


class ReadinessAnswer(NamedTuple):
    """What one check says, and the words for whoever reads `/readyz`."""

    ready: bool
    detail: str


ReadinessCheck = Callable[[Producer], ReadinessAnswer]


class ProducerHealth:
    """What is known about one producer's fitness to serve.

    `checks` are further questions by name, as `rejection_check` is one; each is synchronous and quick.
    `full_above` is the share of the buffer above which new work should go elsewhere.
    """

    def __init__(
        self,
        producer: Producer,
        *,
        checks: Mapping[str, ReadinessCheck] | None = None,
        full_above: float = DEFAULT_FULL_ABOVE,
    ) -> None:
        self._producer = producer
        self._checks: dict[str, ReadinessCheck] = {"buffer": self._buffer, **(checks or {})}
        self._full_above = full_above
        self.is_draining = False

    def readiness(self) -> dict[str, ReadinessAnswer]:
        """Return every check's answer by its name."""
        detail = "closing: what was accepted is being delivered" if self.is_draining else "takes records"
        return {
            "intake": ReadinessAnswer(not self.is_draining, detail),
            "producer": self._own_word(),
            **{name: check(self._producer) for name, check in self._checks.items()},
        }

    def _own_word(self) -> ReadinessAnswer:
        """Return what the producer says of itself: its state, and the breakers of whole streams."""
        reasons = self._producer.unready()
        return ReadinessAnswer(not reasons, "; ".join(reasons) or "well")

    def _buffer(self, producer: Producer) -> ReadinessAnswer:
        limit = producer.buffer_limit
        occupancy = max(limit.outstanding_records / limit.max_records, limit.outstanding_bytes / limit.max_bytes)
        return ReadinessAnswer(occupancy <= self._full_above, f"{occupancy:.1%} full")


def health_of(scope: Mapping[str, Any]) -> ProducerHealth:
    """Return the health of a scope's producer.

    Raises:
        MissingProducer: no lifespan that opens a producer ran for this application.
    """
    health: ProducerHealth | None = (scope.get("state") or {}).get(HEALTH_KEY)
    return ProducerHealth(producer_of(scope)) if health is None else health


def readiness_body(answers: Mapping[str, ReadinessAnswer]) -> tuple[int, dict[str, Any]]:
    """Return status and JSON body of a readiness answer."""
    is_ready = all(answer.ready for answer in answers.values())
    checks = {name: {"ready": answer.ready, "detail": answer.detail} for name, answer in answers.items()}
    return (200 if is_ready else 503), {"status": "ready" if is_ready else "not ready", "checks": checks}


class HealthEndpoints:
    """Middleware that answers `/livez` and `/readyz` itself, with 200 or 503, and passes on all else."""

    def __init__(self, app: ASGIApp, *, livez: str = "/livez", readyz: str = "/readyz") -> None:
        self._app = app
        self._livez = livez
        self._readyz = readyz

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer GET and HEAD of the two paths."""
        is_asked = scope["type"] == "http" and scope["method"] in _METHODS
        if is_asked and scope["path"] == self._livez:
            await send_json(send, 200, msgspec.json.encode({"status": "alive"}))
        elif is_asked and scope["path"] == self._readyz:
            status, body = readiness_body(health_of(scope).readiness())
            await send_json(send, status, msgspec.json.encode(body))
        else:
            await self._app(scope, receive, send)


_METHODS: Final[Sequence[str]] = ("GET", "HEAD")
