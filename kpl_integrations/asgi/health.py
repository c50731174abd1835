"""Health and backpressure: `/livez`, `/readyz`, and 503 with Retry-After while the producer cannot accept records.

Readiness comes from what the producer knows about itself, never from a call to AWS. The core reports
backpressure with an exception; the middleware turns it into a response (RFC 9110 10.2.3, RFC 9457):

    rejections = RejectionMonitor()
    app = Starlette(
        middleware=[Middleware(HealthEndpoints), Middleware(BackpressureMiddleware, rejections=rejections)],
        lifespan=KinesisLifespan(config, checks={"rejections": rejection_check(rejections)}),
    )
"""

import math
import time
from collections.abc import Callable, Mapping
from typing import Any, Final, NamedTuple

import msgspec

from kpl_core import BufferFull, NotSpooled, Producer, ProducerClosed
from kpl_core.limits import RejectionMonitor
from kpl_core.options.validation import Bound, require_number
from kpl_integrations.asgi.protocol import (
    HEALTH_KEY,
    PROBLEM_JSON,
    ASGIApp,
    Message,
    Receive,
    Scope,
    Send,
    producer_of,
    retry_after_header,
    send_json,
)

DEFAULT_FULL_ABOVE: Final = 0.9
_METHODS: Final = frozenset({"GET", "HEAD"})
# The core's exception -> the problem's code and its detail for the client.
_PROBLEMS: Final = {
    BufferFull: ("buffer-full", "The service's record buffer is full; send this request again later."),
    NotSpooled: ("not-spooled", "The service's spool cannot store records; send this request again later."),
    ProducerClosed: ("shutting-down", "The service is shutting down; send this request again later."),
}
_SERVICE_UNAVAILABLE: Final = 503
# RFC 6455's registry: Try Again Later.
_TRY_AGAIN_LATER: Final = 1013
# ASGI's extension to reject a handshake with a response. Closing instead means 403, which is not backpressure.
_DENIAL: Final = "websocket.http.response"
# No response can follow these.
_RESPONSE_STARTS: Final = frozenset({"http.response.start", "websocket.http.response.start", "websocket.close"})


class ReadinessAnswer(NamedTuple):
    """The result of one readiness check; `detail` is shown in `/readyz`."""

    ready: bool
    detail: str


ReadinessCheck = Callable[[Producer], ReadinessAnswer]


class ProducerHealth:
    """The readiness of one producer.

    `checks` are more checks by name, such as `rejection_check`; each is synchronous and fast. The producer is not
    ready while its buffer is filled above the share `full_above`.
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
        """Return the result of every check by name."""
        detail = "draining: delivering accepted records" if self.is_draining else "accepting records"
        return {
            "intake": ReadinessAnswer(not self.is_draining, detail),
            "producer": self._producer_state(),
            **self._spool(),
            **{name: check(self._producer) for name, check in self._checks.items()},
        }

    def _producer_state(self) -> ReadinessAnswer:
        """Check whether the producer is open, and the circuit breakers of its streams are closed."""
        reasons = self._producer.unready()
        return ReadinessAnswer(not reasons, "; ".join(reasons) or "ready")

    def _spool(self) -> dict[str, ReadinessAnswer]:
        """Say whether the spool stores records. While puts are accepted without it, the producer is ready."""
        state = self._producer.spool_state
        if state is None:
            return {}
        if state.why is None:
            return {"spool": ReadinessAnswer(ready=True, detail="stores records")}
        meanwhile = "; degraded: records go straight to Kinesis" if state.failure == "bypass" else ""
        if not state.writes_ahead:
            meanwhile = "; degraded: records that are not delivered in time fail, unless dead letters take them"
        return {"spool": ReadinessAnswer(state.unready() is None, f"cannot store{meanwhile}")}

    def _buffer(self, producer: Producer) -> ReadinessAnswer:
        limit = producer.buffer_limit
        occupancy = max(limit.outstanding_records / limit.max_records, limit.outstanding_bytes / limit.max_bytes)
        return ReadinessAnswer(occupancy <= self._full_above, f"{occupancy:.1%} full")


def health_of(scope: Mapping[str, Any]) -> ProducerHealth:
    """Return the health of a scope's producer.

    Raises:
        MissingProducer: the application has no producer.
    """
    health: ProducerHealth | None = (scope.get("state") or {}).get(HEALTH_KEY)
    return ProducerHealth(producer_of(scope)) if health is None else health


def readiness_body(answers: Mapping[str, ReadinessAnswer]) -> tuple[int, dict[str, Any]]:
    """Return status and JSON body of a `/readyz` response."""
    is_ready = all(answer.ready for answer in answers.values())
    checks = {name: {"ready": answer.ready, "detail": answer.detail} for name, answer in answers.items()}
    return (200 if is_ready else 503), {"status": "ready" if is_ready else "not ready", "checks": checks}


class HealthEndpoints:
    """Middleware that answers `/livez` and `/readyz` with 200 or 503."""

    def __init__(self, app: ASGIApp, *, livez: str = "/livez", readyz: str = "/readyz") -> None:
        self._app = app
        self._livez = livez
        self._readyz = readyz

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer GET and HEAD requests for the two paths; pass everything else to the app."""
        is_get = scope["type"] == "http" and scope["method"] in _METHODS
        if is_get and scope["path"] == self._livez:
            await send_json(send, 200, msgspec.json.encode({"status": "alive"}))
        elif is_get and scope["path"] == self._readyz:
            status, body = readiness_body(health_of(scope).readiness())
            await send_json(send, status, msgspec.json.encode(body))
        else:
            await self._app(scope, receive, send)


def rejection_check(monitor: RejectionMonitor, *, clock: Callable[[], float] = time.monotonic) -> ReadinessCheck:
    """Return a readiness check: not ready while the monitor sees too many rejected requests.

    `clock` is the middleware's, in monotonic seconds. The monitor is not thread-safe: check and middleware run on the
    application's event loop.
    """

    def check(_producer: Producer) -> ReadinessAnswer:
        now = clock()
        return ReadinessAnswer(monitor.is_ready(now), f"{monitor.rejected_share(now):.1%} of requests refused")

    return check


class BackpressureMiddleware:
    """Turns `BufferFull`, `NotSpooled` and `ProducerClosed` of the app into 503, or close code 1013 of a WebSocket.

    `retry_after_seconds` is the value of `Retry-After`. `rejections` records every request, rejected or not, with
    the time `clock()`. If the response has already begun, the exception propagates to the server. Put this
    middleware outside `RequestOutboxMiddleware` (in Starlette: add it after).

    Raises:
        ConfigError: `retry_after_seconds` is not a whole number of seconds, at least 1.
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        retry_after_seconds: int = 1,
        rejections: RejectionMonitor | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._app = app
        require_number("retry_after_seconds", retry_after_seconds, Bound(1, math.inf, "seconds", whole=True))
        self._retry_after = retry_after_header(retry_after_seconds)
        self._rejections = rejections
        self._clock = clock

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Call the app, and respond with 503 if it raises backpressure."""
        if scope["type"] not in {"http", "websocket"}:
            await self._app(scope, receive, send)
            return
        has_begun = is_rejected = is_accepted = False

        async def watched_send(message: Message) -> None:
            nonlocal has_begun, is_accepted
            has_begun = has_begun or message["type"] in _RESPONSE_STARTS
            is_accepted = is_accepted or message["type"] == "websocket.accept"
            await send(message)

        async def send_denial(message: Message) -> None:
            await send({**message, "type": f"websocket.{message['type']}"})

        try:
            await self._app(scope, receive, watched_send)
        except (BufferFull, NotSpooled, ProducerClosed) as error:
            is_rejected = True
            if has_begun:
                raise
            code, detail = _PROBLEMS[type(error)]
            if scope["type"] == "http":
                await self._respond(send, code, detail)
            elif not is_accepted and _DENIAL in (scope.get("extensions") or {}):
                await self._respond(send_denial, code, detail)
            else:
                await send({"type": "websocket.close", "code": _TRY_AGAIN_LATER, "reason": code})
        finally:
            if self._rejections is not None:
                self._rejections.record(not is_rejected, self._clock())

    async def _respond(self, send: Send, code: str, detail: str) -> None:
        problem = {
            "type": "about:blank",
            "title": "Service Unavailable",
            "status": _SERVICE_UNAVAILABLE,
            "detail": detail,
            "code": code,
        }
        body = msgspec.json.encode(problem)
        await send_json(send, _SERVICE_UNAVAILABLE, body, content_type=PROBLEM_JSON, headers=[self._retry_after])
