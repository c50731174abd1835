"""What one gateway process of `kpl serve` is made of, whether it is the only one or one of several."""

import contextlib
from collections.abc import AsyncIterator, Mapping
from typing import Any, Final

from kpl_core import KinesisTransport
from kpl_core.transport.aiobotocore_transport import AiobotocoreTransport
from kpl_integrations.cli.connection import Connection, is_this_machine
from kpl_integrations.cli.exit_code import CommandFailure, ExitCode
from kpl_integrations.cli.local import local_kinesis
from kpl_integrations.ingest import IngestSettings
from kpl_integrations.ingest.tenants import SIGNALS, FileTenants, OpenTenants, Tenant, TenantDirectory

__all__ = ["connection_of", "own_kinesis", "settings_given", "through", "who_may"]

# Who runs it alone on this machine wants it gone at Ctrl-C.
_LOCAL: Final[Mapping[str, Any]] = {"drain_delay_seconds": 0.0}


def settings_given(options: Mapping[str, object], *, local: bool) -> dict[str, Any]:
    """Return the options that were given, and what --local means for the others."""
    given = {name: value for name, value in options.items() if value is not None}
    return {**_LOCAL, **given} if local else given


def who_may(settings: IngestSettings, *, local: bool, first_stream: str) -> TenantDirectory:
    """Return who may use the gateway.

    Raises:
        CommandFailure: it would be everybody, and not only on this machine.
        ConfigError: the file of tenants cannot be used.
    """
    if settings.tenants is not None:
        return FileTenants(settings.tenants, default_ack=settings.default_ack)
    if not local:
        message = (
            "no credentials are configured; name a file of tenants with --tenants (make keys with `kpl keys`), "
            "or try it on this machine with --local"
        )
        raise CommandFailure(message, exit_code=ExitCode.WRONG_USAGE)
    if not is_this_machine(settings.host):
        message = (
            f"--local checks no credentials, and others reach host {settings.host!r}; leave --host alone, or name "
            f"a file of tenants with --tenants"
        )
        raise CommandFailure(message, exit_code=ExitCode.WRONG_USAGE)
    everywhere = dict.fromkeys(SIGNALS, first_stream)
    return OpenTenants(Tenant(id="local", default_ack=settings.default_ack, otlp_streams=everywhere))


@contextlib.asynccontextmanager
async def own_kinesis(
    settings: IngestSettings, streams: Mapping[str, int], *, local: bool
) -> AsyncIterator[str | None]:
    """Start a Kinesis here if that is wanted; yield its URL."""
    if local and settings.endpoint_url is None:
        async with local_kinesis(streams) as server:
            yield server.endpoint_url
    else:
        yield None


async def connection_of(settings: IngestSettings, our_own: str | None) -> Connection:
    """Return the way to Kinesis: to `our_own`, if there is one.

    Raises:
        CommandFailure: there is none.
    """
    if our_own is not None:
        return Connection.to_own_server("", endpoint_url=our_own)
    return await Connection.resolved("", region=settings.region, endpoint_url=settings.endpoint_url)


def through(settings: IngestSettings, connection: Connection) -> tuple[IngestSettings, KinesisTransport]:
    """Return the settings with what the connection knows, and a transport on it."""
    settings = settings.model_copy(update={"region": connection.region, "endpoint_url": connection.endpoint_url})
    return settings, AiobotocoreTransport(settings.producer_config(), session=connection.session)
