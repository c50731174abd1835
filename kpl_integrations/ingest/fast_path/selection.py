"""Choose the server's HTTP protocol: the fast path, only the bounds of the head, or uvicorn's own.

The fast path and the bounds override internals of uvicorn. The fast path turns itself off, with one warning, if the
installed uvicorn is outside the range of tested versions or lacks an internal that it uses. If an internal that the
bounds use is missing, the gateway falls back to uvicorn's h11 protocol, which bounds the size of a head but not its
duration.
"""

import importlib
import logging
from collections.abc import Iterable
from types import FunctionType
from typing import Any, Final, NamedTuple

import uvicorn

from kpl_integrations.ingest.settings import IngestSettings

# The first and the last tested minor version. tests/ingest/fast_path says how to test another one.
TESTED_UVICORN: Final = ((0, 32), (0, 54))
_HTTPTOOLS: Final = "uvicorn.protocols.http.httptools_impl"
# By class, the methods (with parentheses) and attributes that http/connection_bounds.py overrides or uses.
_BOUNDS_INTERNALS: Final = {
    f"{_HTTPTOOLS}:HttpToolsProtocol": (
        "_unset_keepalive_if_required()",
        "_unsupported_upgrade_warning()",
        "app",
        "client",
        "connection_lost()",
        "connection_made()",
        "connections",
        "cycle",
        "data_received()",
        "flow",
        "headers",
        "limit_concurrency",
        "loop",
        "on_body()",
        "on_header()",
        "on_headers_complete()",
        "on_message_begin()",
        "on_message_complete()",
        "parser",
        "scope",
        "send_400_response()",
        "server_state",
        "timeout_keep_alive_handler()",
        "timeout_keep_alive_task",
        "transport",
        "url",
    ),
    f"{_HTTPTOOLS}:RequestResponseCycle": ("more_body", "response_complete"),
    "uvicorn.protocols.http.flow_control:FlowControl": (
        "_transport",
        "pause_reading()",
        "read_paused",
        "resume_reading()",
    ),
    "uvicorn.server:ServerState": ("total_requests",),
}
# Those that fast_path/protocol.py uses in addition.
_FAST_PATH_INTERNALS: Final = {
    f"{_HTTPTOOLS}:STATUS_LINE": (),
    f"{_HTTPTOOLS}:HttpToolsProtocol": (
        *_BOUNDS_INTERNALS[f"{_HTTPTOOLS}:HttpToolsProtocol"],
        "expect_100_continue",
        "logger",
        "on_response_complete()",
        "pipeline",
        "tasks",
        "timeout_keep_alive",
    ),
    # All that uvicorn uses of the object that is its cycle while an answer is pending.
    f"{_HTTPTOOLS}:RequestResponseCycle": (
        "disconnected",
        "keep_alive",
        "message_event",
        "more_body",
        "response_complete",
    ),
    "uvicorn.protocols.http.flow_control:FlowControl": ("write_paused",),
    "uvicorn.server:ServerState": ("default_headers", "total_requests"),
}

_log: Final = logging.getLogger(__name__)


class ServerProtocol(NamedTuple):
    """The `http` argument of `uvicorn.Config`, and whether it is the fast path."""

    http: Any
    is_fast: bool


def server_protocol(gateway: Any, settings: IngestSettings) -> ServerProtocol:  # noqa: ANN401 - see `SyncAnswerer`
    """Return the protocol for a gateway; log a warning if it is not the one that the settings ask for."""
    missing = missing_internals(_BOUNDS_INTERNALS)
    if missing:
        _log.warning(
            "the fast path and the time limit of request heads (header_seconds) are off: uvicorn %s lacks %s",
            uvicorn.__version__,
            ", ".join(missing),
        )
        return ServerProtocol("h11", is_fast=False)
    from kpl_integrations.ingest.http.connection_bounds import BoundedProtocol  # noqa: PLC0415 - internals checked

    reason = untested_reason() if settings.fast_path else "KPL_INGEST_FAST_PATH is false"
    if reason is None:
        from kpl_integrations.ingest.fast_path.protocol import FastPathProtocol  # noqa: PLC0415 - internals checked

        return ServerProtocol(_bounded(FastPathProtocol.for_gateway(gateway), gateway, settings), is_fast=True)
    if settings.fast_path:
        _log.warning("the fast path is off: %s; KPL_INGEST_FAST_PATH=false silences this warning", reason)
    return ServerProtocol(_bounded(BoundedProtocol, gateway, settings), is_fast=False)


def _bounded(protocol: Any, gateway: Any, settings: IngestSettings) -> Any:  # noqa: ANN401 - see `server_protocol`
    return protocol.with_bounds(
        header_seconds=settings.header_seconds,
        max_header_bytes=settings.max_header_bytes,
        reserves=gateway.directory.verifies,
        turns=gateway.read_turns,
    )


def untested_reason(version: str | None = None) -> str | None:
    """Return why the fast path cannot run on this uvicorn, or None if it can."""
    version = uvicorn.__version__ if version is None else version
    first, last = (".".join(map(str, each)) for each in TESTED_UVICORN)
    numbers = tuple(int(part) if part.isdecimal() else -1 for part in version.split(".")[:2])
    if not TESTED_UVICORN[0] <= numbers <= TESTED_UVICORN[1]:
        return f"uvicorn {version} is outside the tested versions {first} to {last}"
    missing = missing_internals(_FAST_PATH_INTERNALS)
    return f"uvicorn {version} lacks {', '.join(missing)}" if missing else None


def missing_internals(required: dict[str, tuple[str, ...]]) -> list[str]:
    """Return the names in `required` that the installed uvicorn does not have: objects and their attributes."""
    missing: list[str] = []
    for place, names in required.items():
        module, _, name = place.partition(":")
        try:
            found = getattr(importlib.import_module(module), name)
        except (ImportError, AttributeError):
            missing.append(name)
            continue
        methods, attributes = set(dir(found)), _attributes(found)
        missing += [
            f"{name}.{each}"
            for each in names
            if each.removesuffix("()") not in (methods if each.endswith("()") else attributes)
        ]
    return missing


def _attributes(found: object) -> set[str]:
    """Return the attributes of a class, including those that its methods set on instances."""
    functions: Iterable[object] = vars(found).values() if isinstance(found, type) else ()
    used = {name for each in functions if isinstance(each, FunctionType) for name in each.__code__.co_names}
    return used | set(dir(found)) | set(getattr(found, "__dataclass_fields__", ()))
