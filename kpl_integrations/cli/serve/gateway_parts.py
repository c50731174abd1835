"""What one gateway process of `kpl serve` is made of, whether it is the only one or one of several."""

import contextlib
from collections.abc import AsyncIterator, Iterator, Mapping
from typing import Any, Final

from kpl_core import ConfigError, KinesisTransport
from kpl_core.durability.spool import SpoolError
from kpl_core.transport.aiobotocore_transport import AiobotocoreTransport
from kpl_integrations.cli.connection import Connection, is_this_machine
from kpl_integrations.cli.exit_code import CommandFailure, ExitCode
from kpl_integrations.cli.local import local_kinesis
from kpl_integrations.ingest import IngestSettings
from kpl_integrations.ingest.tenants import SIGNALS, FileTenants, OpenTenants, Tenant, TenantDirectory

# With --local a developer presses Ctrl-C, and no load balancer has to notice. Any web page could reach the gateway
# through the developer's browser, so it answers only to loopback names.
_LOCAL: Final[Mapping[str, Any]] = {"drain_delay_seconds": 0.0, "allowed_hosts": "localhost"}


@contextlib.contextmanager
def known_failures() -> Iterator[None]:
    """Raise CommandFailure for settings or a spool that cannot be used."""
    try:
        yield
    except ConfigError as error:
        raise CommandFailure(str(error), exit_code=ExitCode.WRONG_USAGE) from error
    except SpoolError as error:
        raise CommandFailure(str(error)) from error


def given_settings(options: Mapping[str, object], *, local: bool) -> dict[str, Any]:
    """Return the options that were given, and the defaults that --local changes."""
    given: dict[str, Any] = {name: value for name, value in options.items() if value is not None}
    if "allowed_hosts" in given:
        given["allowed_hosts"] = ",".join(given["allowed_hosts"])
    return {**_LOCAL, **given} if local else given


def tenant_directory(settings: IngestSettings, *, local: bool, first_stream: str) -> TenantDirectory:
    """Return the tenants that may use the gateway.

    Raises:
        CommandFailure: there are no tenants, and the gateway would be open to other machines.
        ConfigError: the tenants file cannot be used.
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
            f"--local checks no credentials, and other machines reach host {settings.host!r}; omit --host, or name "
            f"a file of tenants with --tenants"
        )
        raise CommandFailure(message, exit_code=ExitCode.WRONG_USAGE)
    streams = dict.fromkeys(SIGNALS, first_stream)
    return OpenTenants(Tenant(id="local", default_ack=settings.default_ack, otlp_streams=streams))


@contextlib.asynccontextmanager
async def embedded_kinesis(
    settings: IngestSettings, streams: Mapping[str, int], *, local: bool
) -> AsyncIterator[str | None]:
    """Start a local Kinesis in this process if --local needs one; yield its URL, else None."""
    if local and settings.endpoint_url is None:
        async with local_kinesis(streams) as server:
            yield server.endpoint_url
    else:
        yield None


async def connect(settings: IngestSettings, embedded_url: str | None) -> tuple[IngestSettings, KinesisTransport]:
    """Return the settings with region and endpoint filled in, and a transport to the embedded Kinesis or to AWS.

    Raises:
        CommandFailure: region or credentials are missing.
    """
    if embedded_url is not None:
        connection = Connection.to_own_server("", endpoint_url=embedded_url)
    else:
        connection = await Connection.resolved("", region=settings.region, endpoint_url=settings.endpoint_url)
    settings = settings.model_copy(update={"region": connection.region, "endpoint_url": connection.endpoint_url})
    return settings, AiobotocoreTransport(settings.producer_config(), session=connection.session)
