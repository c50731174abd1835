"""The choice of a transport: the producer's own connections, or botocore's client."""

import contextlib
import logging
from asyncio import _get_running_loop
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING, Final

from kpl_core.event_loop import run_in_daemon_thread
from kpl_core.options.config import Config
from kpl_core.transport.transport import KinesisTransport

if TYPE_CHECKING:
    from aiobotocore.session import AioSession

    from kpl_core.transport.service_calls import SessionVars

_log: Final = logging.getLogger("kpl_core")
_OTHER_BOTOCORE: Final = "this botocore has other internals"


async def default_transport(
    config: Config, session: "AioSession | None" = None, *, session_vars: "SessionVars" = None
) -> KinesisTransport:
    """Return the transport of a configuration; on asyncio it is imported and prepared in a thread.

    Importing botocore and asking for credentials takes 0.1 s or more, which would block the loop.
    Without `session`, one is made with `session_vars`.
    """
    if _get_running_loop() is None:  # trio, where the transport then says that it needs asyncio
        return _prepared(config, session, session_vars)
    return await run_in_daemon_thread(partial(_prepared, config, session, session_vars))


def reason_for_botocore(config: Config) -> str | None:
    """Return why a producer of this configuration uses botocore's client; None if it uses connections of its own.

    It reads files, and may ask for credentials.
    """
    try:
        from kpl_core.transport.direct_transport import resolved  # noqa: PLC0415 - 0.1 s
    except ImportError:
        return _OTHER_BOTOCORE
    found = resolved(config)
    return found if isinstance(found, str) else None


def import_transport(config: Config) -> None:
    """Import the modules of the configured transport."""
    # A botocore with other internals has a name less: then its client is used.
    with contextlib.suppress(ImportError):
        import_module("kpl_core.transport.direct_transport")
        if config.wire_path != "stock" and not config.botocore:
            return
    import_module("kpl_core.transport.aiobotocore_transport")


def _prepared(config: Config, session: "AioSession | None", session_vars: "SessionVars") -> KinesisTransport:
    reason = "the caller gave a session"
    if session is None:
        reason = _OTHER_BOTOCORE
        with contextlib.suppress(ImportError):  # as above
            from kpl_core.transport.direct_transport import DirectTransport, resolved  # noqa: PLC0415 - 0.1 s

            found = resolved(config, session_vars)
            if not isinstance(found, str):
                _log.debug("requests use the producer's own connections")
                return DirectTransport(config, found)
            reason = found
    _log.info("requests use botocore's client, because %s", reason)
    from kpl_core.transport.aiobotocore_transport import AiobotocoreTransport, new_session  # noqa: PLC0415 - 0.3 s

    return AiobotocoreTransport(config, session=session or new_session(session_vars))
