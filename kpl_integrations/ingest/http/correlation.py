"""What names a request elsewhere: its id (X-Request-Id) and its place in a trace (W3C Trace Context, level 1 and 2).

Every answer of the gateway has an id. The client's is taken if it is harmless in a log line, else replaced. A new id is
random, so that it does not tell a client how many requests others send.

A `traceparent` that is malformed is ignored, as section 3.3 of the recommendation asks. Its sampled flag causes cost
elsewhere, so the flag of a client without verified credentials is cleared.
"""

import os
import re
from collections.abc import Iterable, Mapping
from random import Random
from typing import Final, NamedTuple, Protocol

from kpl_integrations.asgi.protocol import Header, Scope, Send, adding

REQUEST_ID_HEADER: Final = b"x-request-id"
CORRELATING: Final = (REQUEST_ID_HEADER, b"traceparent", b"tracestate")
"""The names of the header fields of a `Correlation`, in its order."""
# Keys of a scope. The second is a callable that returns what a log line says of the request.
REQUEST_ID: Final = "kpl_integrations.request_id"
LOG_FIELDS: Final = "kpl_integrations.log_fields"
_ID: Final = re.compile(rb"[A-Za-z0-9._-]{1,128}")
_ID_BITS: Final = 96
# Not the module's, whose state a program may have set to repeat a run. Workers are forked.
_chance: Final = Random()  # noqa: S311 - an id is not a secret
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_chance.seed)
getrandbits: Final = _chance.getrandbits
_TRACEPARENT: Final = re.compile(rb"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-[ -~]*)?")
_VERSION: Final = b"00"
_NO_VERSION: Final = b"ff"
_LONGEST_TRACEPARENT: Final = 256
# "sampled" of level 1 and "random" of level 2. Other bits have no meaning yet.
_SAMPLED: Final = 0x01
_KNOWN_FLAGS: Final = 0x03
# As many characters as every system has to pass on (section 3.3.1.5).
_TRACESTATE: Final = re.compile(rb"[ -~]{1,512}")


class Correlation(NamedTuple):
    """The received values of X-Request-Id, traceparent and tracestate, not checked yet."""

    request_id: bytes | None = None
    traceparent: bytes | None = None
    tracestate: bytes | None = None


class TraceContext(NamedTuple):
    """A place in a trace: a valid `traceparent` of version 00, and a `tracestate`, which may be empty."""

    traceparent: str
    tracestate: str = ""

    @property
    def trace_id(self) -> str:
        """Return the id of the trace, in 32 hexadecimal digits."""
        return self.traceparent[3:35]


class RequestSpan(Protocol):
    """A started span of a request, over OpenTelemetry or a double."""

    traceparent: str
    tracestate: str

    def end(self, status: int | None, attributes: Mapping[str, str]) -> None:
        """End it with the status of the answer; None: there was no answer."""


class RequestSpans(Protocol):
    """Starts the spans of a gateway's requests."""

    def now(self) -> int:
        """Return the nanoseconds since 1970."""

    def start(self, name: str, *, started_at: int, parent: tuple[str, str] | None) -> RequestSpan:
        """Start a span at this instant, below `traceparent` and `tracestate` of `parent`, or a trace of its own."""


def new_request_id() -> bytes:
    """Return a random id of 24 hexadecimal digits."""
    return b"%024x" % getrandbits(_ID_BITS)


def request_id_of(correlation: Correlation | None) -> bytes:
    """Return the client's id if it may be used, else a new one."""
    given = None if correlation is None else correlation.request_id
    return new_request_id() if given is None or _ID.fullmatch(given) is None else given


def trace_context(correlation: Correlation | None, *, is_verified: bool) -> TraceContext | None:
    """Return the trace that the client continues; None: it names none, or not a valid one.

    `is_verified`: the client's credentials are verified, so its sampled flag counts.
    """
    given = None if correlation is None else correlation.traceparent
    if correlation is None or given is None or len(given) > _LONGEST_TRACEPARENT:
        return None
    found = _TRACEPARENT.fullmatch(given)
    if found is None:
        return None
    version, trace_id, parent_id, flags, more = found.groups()
    # Later versions may append to the fields of version 00.
    if version == _NO_VERSION or (version == _VERSION and more is not None):
        return None
    if not (trace_id.strip(b"0") and parent_id.strip(b"0")):
        return None
    kept = int(flags, 16) & (_KNOWN_FLAGS if is_verified else _KNOWN_FLAGS & ~_SAMPLED)
    state = correlation.tracestate
    return TraceContext(
        f"00-{trace_id.decode()}-{parent_id.decode()}-{kept:02x}",
        state.decode() if state is not None and _TRACESTATE.fullmatch(state) is not None else "",
    )


def request_id_of_scope(scope: Scope) -> bytes:
    """Return the id of a request that the gateway has identified; another request gets a new one."""
    if REQUEST_ID not in scope:
        scope[REQUEST_ID] = new_request_id()
    request_id: bytes = scope[REQUEST_ID]
    return request_id


def request_id_in(headers: Iterable[Header]) -> bytes:
    """Return the client's id if a head has one that may be used, else a new one."""
    given = [value for name, value in headers if name == REQUEST_ID_HEADER]
    # Several ids are none: which of them is meant is not known.
    return request_id_of(Correlation(given[0]) if len(given) == 1 else None)


def identify(scope: Scope, send: Send) -> Send:
    """Give a request its id; return a `send` whose answer has it."""
    request_id = scope[REQUEST_ID] = request_id_in(scope["headers"])
    scope[LOG_FIELDS] = lambda: {"request_id": request_id.decode()}
    return adding([(REQUEST_ID_HEADER, request_id)], send)
