"""The transport over aiobotocore, for asyncio.

aiobotocore provides credentials, signing, endpoints and connections. Its retries are off, because the retrier owns
them. Unless `wire_path` is "stock", `put_records_wire` builds the PutRecords body and reads the answer.
"""

import asyncio
import ssl
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from operator import itemgetter
from typing import Any, Final, TypeVar

import aiohttp
import msgspec
from aiobotocore.config import AioConfig
from aiobotocore.session import AioSession, get_session
from aiohttp.abc import AbstractStreamWriter
from aiohttp.payload import Payload
from botocore.exceptions import BotoCoreError, ClientError, NoRegionError, ProfileNotFound

from kpl_core.errors import ConfigError
from kpl_core.options.config import Config
from kpl_core.options.kinesis_limits import KIB
from kpl_core.options.validation import without_passwords
from kpl_core.records.put_records import PutRecordsAnswer, PutRecordsEntry, PutRecordsRequest, RequestFailure
from kpl_core.records.record_result import INTERNAL
from kpl_core.transport.put_records_wire import configured_wire, stream_argument
from kpl_core.transport.service_calls import (
    ServiceCalls,
    SessionVars,
    ca_bundle,
    failure_of,
    is_loopback,
    use_quick_loader,
    user_agent,
)

PIECE_BYTES: Final = 256 * KIB


class RequestBody(Payload):
    """A signed body, which is written to the socket in pieces.

    aiohttp also accepts raw bytes. But above 1 MiB it warns that they may block the loop, and it passes them to the
    socket at once, which then copies all that it cannot send. In pieces, with a wait after each, neither happens.
    """

    _autoclose = True

    def __init__(self, body: bytes) -> None:
        super().__init__(body)
        self._size = len(body)

    def decode(self, encoding: str = "utf-8", errors: str = "strict") -> str:
        """Return the body as text."""
        return bytes(self._value).decode(encoding, errors)

    async def write(self, writer: AbstractStreamWriter) -> None:
        """Write the body, waiting for the socket after each piece."""
        body = memoryview(self._value)
        for start in range(0, len(body), PIECE_BYTES):
            await writer.write(body[start : start + PIECE_BYTES])


def send_in_pieces(request: Any, **_: object) -> None:  # noqa: ANN401 - botocore has no types
    """Handle botocore's `before-send` event: replace the body of a signed request by a `RequestBody`."""
    request.body = RequestBody(request.body)


def new_session(session_vars: SessionVars = None) -> AioSession:
    """Return a session of the default configuration, or of other variables and files.

    Raises:
        ConfigError: there is no profile with the name in AWS_PROFILE.
    """
    session = get_session(session_vars)
    try:
        use_quick_loader(session)
    except ProfileNotFound as error:
        message = f"{error}; correct AWS_PROFILE, or add the profile to AWS' configuration files"
        raise ConfigError(message) from error
    return session


_wire_entries: Final[Callable[[Any], list[PutRecordsEntry]]] = itemgetter("Records")

T = TypeVar("T")


class AiobotocoreTransport(ServiceCalls):
    """A transport with one aiobotocore client. Credentials come from the config, the session or botocore's chain."""

    def __init__(self, config: Config, *, session: AioSession | None = None) -> None:
        self._config = config
        self._session = new_session() if session is None else session
        self._timeout_seconds = config.request_timeout_ms / 1000
        self._wire = configured_wire(config)
        self._client: Any = None

    @asynccontextmanager
    async def open(self) -> AsyncIterator[None]:
        """Create the client, and close its connections at the end.

        Raises:
            ConfigError: no region is configured, an option of `Config.botocore` is unknown, the CA bundle cannot
                be read, or the credentials cannot be found because a file or program is missing.
        """
        try:
            self._require_ca_bundle()
            creating = self._session.create_client("kinesis", **self._client_arguments())
            client = await creating.__aenter__()
        except ConfigError:
            raise
        except NoRegionError as error:
            message = (
                "no region is configured; set Config.region, AWS_DEFAULT_REGION (AWS_REGION is not read) or the region "
                "of the profile"
            )
            raise ConfigError(message) from error
        except (BotoCoreError, OSError, TypeError, ValueError) as error:
            reason = without_passwords(str(error)).rstrip(".")
            message = (
                f"the client cannot be created: {reason}; check region, endpoint_url, credentials and Config.botocore"
            )
            raise ConfigError(message) from error
        try:
            if self._wire is not None:
                self._wire.register(client.meta.events)
            if "http_session_cls" not in self._config.botocore:
                client.meta.events.register("before-send.kinesis.PutRecords", send_in_pieces)
            self._client = client
            yield
        finally:
            self._client = None
            await creating.__aexit__(None, None, None)

    def _require_ca_bundle(self) -> None:
        """Check the CA bundle once. If it is missing, every request fails like a broken connection."""
        bundle = ca_bundle(self._config, self._session)
        if isinstance(bundle, bool):
            return
        try:
            ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(bundle)
        except OSError as error:
            message = f"the CA bundle {str(bundle)!r} cannot be used ({error}); name a PEM file in Config.verify_ssl"
            raise ConfigError(message) from error

    def _client_arguments(self) -> dict[str, Any]:
        config = self._config
        options: dict[str, Any] = {
            "connect_timeout": config.connect_timeout_ms / 1000,
            "read_timeout": self._timeout_seconds,
            "max_pool_connections": config.max_connections,
            "retries": {"total_max_attempts": 1, "mode": "standard"},
            "tcp_keepalive": True,
            # botocore sends this string unchanged. Without it, botocore builds a longer one twice for each request.
            "user_agent": user_agent(config, self._session),
            **({"proxies": {}} if is_loopback(config.endpoint_url) else {}),
            **config.botocore,
            # All parameters are valid, and botocore's validation costs as much CPU as sending.
            "parameter_validation": False,
        }
        return {
            "region_name": config.region,
            "endpoint_url": config.endpoint_url,
            # With None botocore looks for a bundle in AWS_CA_BUNDLE and in the profile, and verifies too.
            "verify": None if config.verify_ssl is True else config.verify_ssl,
            "aws_access_key_id": config.aws_access_key_id,
            "aws_secret_access_key": config.aws_secret_access_key,
            "aws_session_token": config.aws_session_token,
            "config": AioConfig(**options),
        }

    async def put_records(self, request: PutRecordsRequest) -> PutRecordsAnswer:
        """Send one request: one attempt, within `request_timeout_ms`."""
        if self._wire is None:
            return await self.call("put_records", _stock_entries, request.stream, Records=_stock_records(request))
        return await self.call("put_records", _wire_entries, request.stream, Records=request)

    async def call(
        self,
        method: str,
        read: Callable[[Any], T],
        stream: str | None,
        **arguments: Any,  # noqa: ANN401 - botocore has no types
    ) -> T | RequestFailure:
        """Make one attempt; see `ServiceCalls.call`."""
        if stream is not None:
            arguments.update(stream_argument(stream))
        try:
            # The timeout covers the whole call, so an answer that arrives slowly is cut off too.
            async with asyncio.timeout(self._timeout_seconds + self._config.connect_timeout_ms / 1000):
                return read(await getattr(self._client, method)(**arguments))
        except ClientError as error:
            details = error.response.get("Error", {})
            return RequestFailure(details.get("Code") or INTERNAL, details.get("Message") or str(error))
        except Exception as error:  # noqa: BLE001 - credential providers and event handlers may raise anything
            return failure_of(method, error, broken=(aiohttp.ClientError,))


def _stock_entries(answer: Any) -> list[PutRecordsEntry]:  # noqa: ANN401 - botocore has no types
    return msgspec.convert(answer["Records"], list[PutRecordsEntry])


def _stock_records(request: PutRecordsRequest) -> list[dict[str, Any]]:
    return [
        {
            "Data": record.data,
            "PartitionKey": record.partition_key,
            "ExplicitHashKey": record.explicit_hash_key,
        }
        for record in request.records
    ]
