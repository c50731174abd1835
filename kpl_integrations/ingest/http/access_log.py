"""The access log of the gateway: one line for a share of the requests, off by default."""

import json
import logging
import random
import time
from collections.abc import Callable, Mapping
from typing import Any, Final, NamedTuple

from kpl_integrations.asgi.protocol import Message, Scope, Send
from kpl_integrations.ingest.decoding.json_text import printable
from kpl_integrations.ingest.http.correlation import LOG_FIELDS

_log: Final = logging.getLogger("kpl_integrations.ingest.access")


LogAnswer = Callable[[int, Mapping[str, str]], None]
"""Logs an answer: its status, and what is known of its request."""


class _Request(NamedTuple):
    client: str
    method: str
    target: str
    received_bytes: int | None = None


class AccessLog:
    """Logs each request with the probability `share`.

    Client, method, target, status and milliseconds are fields, and the request's id. Tenant, stream and the id of its
    trace are, as far as they are known.
    """

    def __init__(
        self,
        share: float,
        *,
        clock: Callable[[], float] = time.perf_counter,
        chance: Callable[[], float] = random.random,
    ) -> None:
        self._share = share
        self._clock = clock
        self._chance = chance

    def watch(self, scope: Scope, send: Send) -> Send:
        """Return a `send` that logs the answer to this request, if the request is chosen."""
        if self._chance() >= self._share:
            return send
        began = self._clock()
        # Without the query, which may have secrets.
        raw_path: bytes = scope.get("raw_path") or scope["path"].encode()
        target = raw_path.decode("latin-1").partition("?")[0]
        request = _Request((scope.get("client") or ("",))[0], scope["method"], target)

        async def watched(message: Message) -> None:
            if message["type"] == "http.response.start":
                self._write(request, message["status"], began, scope[LOG_FIELDS]() if LOG_FIELDS in scope else {})
            await send(message)

        return watched

    def begin(self, client: str, target: str, received_bytes: int) -> "LogAnswer | None":
        """Return what logs a POST of the fast path when its status is known; None if it is not chosen."""
        if self._chance() >= self._share:
            return None
        request, began = _Request(client, "POST", target, received_bytes), self._clock()
        return lambda status, known: self._write(request, status, began, known)

    def _write(self, request: _Request, status: int, began: float, known: Mapping[str, str]) -> None:
        milliseconds = round(1e3 * (self._clock() - began), 3)
        fields: dict[str, Any] = {
            "client": printable(request.client),
            "method": printable(request.method),
            "target": printable(request.target),
            "status": status,
            "milliseconds": milliseconds,
        }
        if request.received_bytes is not None:
            fields["received_bytes"] = request.received_bytes
        fields |= {name: printable(value) for name, value in known.items()}
        text = " ".join(f"{name}={json.dumps(value)}" for name, value in fields.items())
        _log.info("request %s", text, extra={"fields": fields})
