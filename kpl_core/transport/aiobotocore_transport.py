"""The transport over aiobotocore, for asyncio.

aiobotocore provides credentials, signing, endpoints and connections. Its retries are off, because the retrier owns
them. Unless `wire_path` is "stock", `put_records_wire` builds the PutRecords body and reads the answer.
"""

import asyncio
import ipaddress
import ssl
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from operator import itemgetter
from typing import Any, Final, TypeVar
from urllib.parse import urlsplit

import aiohttp
import msgspec
from aiobotocore.config import AioConfig
from aiobotocore.session import AioSession, get_session
from aiohttp.abc import AbstractStreamWriter
from aiohttp.payload import Payload
from botocore.exceptions import BotoCoreError, ClientError, NoCredentialsError, NoRegionError, PartialCredentialsError
from botocore.loaders import Loader, create_loader

from kpl_core.errors import ConfigError
from kpl_core.options.config import Config
from kpl_core.options.kinesis_limits import KIB, SHARDS_PER_PAGE
from kpl_core.options.validation import without_passwords
from kpl_core.pipeline.shard_map import Shard
from kpl_core.records.put_records import PutRecordsAnswer, PutRecordsEntry, PutRecordsRequest, RequestFailure
from kpl_core.records.record_result import INTERNAL
from kpl_core.transport.put_records_wire import PutRecordsWire, cbor_wire, json_wire, stream_argument

PIECE_BYTES: Final = 256 * 1024


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


class _EveryService(list[str]):
    """Contains every name. A service without a model fails later, when its model is looked for."""

    def __contains__(self, _name: object) -> bool:
        return True


class QuickLoader(Loader):
    """Loads a service's model without a search for those of all 430 services, which takes 7,000 system calls.

    Each of them gives up the interpreter lock. In a thread beside one that computes, that took 4 seconds.
    """

    def list_available_services(self, _type_name: str) -> list[str]:
        """Return a list that contains every name."""
        return _EveryService()


def new_session() -> AioSession:
    """Return a session of the default configuration."""
    session = get_session()
    paths = create_loader(session.get_config_variable("data_path")).search_paths
    loader = QuickLoader(extra_search_paths=paths, include_default_search_paths=False)
    session.register_component("data_loader", loader)
    return session


NO_CREDENTIALS: Final = "NoCredentials"
# All errors that can happen before a readable answer is there.
_BROKEN: Final = (BotoCoreError, aiohttp.ClientError, OSError, TimeoutError)
_UNREADABLE: Final = (ValueError, KeyError, TypeError, AttributeError, msgspec.MsgspecError)
_wire_entries: Final[Callable[[Any], list[PutRecordsEntry]]] = itemgetter("Records")

T = TypeVar("T")


class AiobotocoreTransport:
    """A transport with one aiobotocore client. Credentials come from the config, the session or botocore's chain."""

    def __init__(self, config: Config, *, session: AioSession | None = None) -> None:
        self._config = config
        self._session = new_session() if session is None else session
        self._timeout_seconds = config.request_timeout_ms / 1000
        self._wire = _wire(config)
        self._client: Any = None

    @asynccontextmanager
    async def open(self) -> AsyncIterator[None]:
        """Create the client, and close its connections at the end.

        Raises:
            ConfigError: no region is configured, an option of `Config.botocore` is unknown, or the CA bundle cannot
                be read.
        """
        try:
            self._require_ca_bundle()
            creating = self._session.create_client("kinesis", **self._client_arguments())
            client = await creating.__aenter__()
        except ConfigError:
            raise
        except NoRegionError as error:
            message = "no region is configured; set Config.region, AWS_DEFAULT_REGION or the region of the profile"
            raise ConfigError(message) from error
        except (BotoCoreError, TypeError, ValueError) as error:
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

    @property
    def client(self) -> Any:  # noqa: ANN401 - botocore has no types
        """The open aiobotocore client, for other calls; None while the transport is not open. It never retries."""
        return self._client

    def _require_ca_bundle(self) -> None:
        """Check the CA bundle once. If it is missing, every request fails like a broken connection."""
        bundle = self._config.verify_ssl
        if bundle is True:
            bundle = self._session.get_config_variable("ca_bundle") or True
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
            "user_agent": self._session.user_agent().removesuffix(f" {self._session.user_agent_extra}"),
            # A proxy cannot reach the loopback address of this machine.
            **({"proxies": {}} if _is_loopback(config.endpoint_url) else {}),
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
            return await self._call("put_records", _stock_entries, request.stream, Records=_stock_records(request))
        return await self._call("put_records", _wire_entries, request.stream, Records=request)

    async def list_shards(self, stream: str) -> Sequence[Shard] | RequestFailure:
        """Return all open shards. If one page fails the whole call fails, because half a shard map is wrong."""
        shards: list[Shard] = []
        arguments: dict[str, Any] = {"MaxResults": SHARDS_PER_PAGE, "ShardFilter": {"Type": "AT_LATEST"}}
        name: str | None = stream
        while True:
            page = await self._call("list_shards", _shard_page, name, **arguments)
            if isinstance(page, RequestFailure):
                return page
            shards += page[0]
            token = page[1]
            if not token:
                return shards
            # The token replaces the stream's name; Kinesis rejects a request with both.
            name, arguments = None, {"NextToken": token}

    async def max_record_bytes(self, stream: str) -> int | RequestFailure:
        """Return the stream's limit on key and data, from DescribeStreamSummary."""
        return await self._call("describe_stream_summary", _max_record_bytes, stream)

    async def _call(
        self,
        method: str,
        read: Callable[[Any], T],
        stream: str | None,
        **arguments: Any,  # noqa: ANN401 - botocore has no types
    ) -> T | RequestFailure:
        if stream is not None:
            arguments.update(stream_argument(stream))
        try:
            # The timeout covers the whole call, so an answer that arrives slowly is cut off too.
            async with asyncio.timeout(self._timeout_seconds + self._config.connect_timeout_ms / 1000):
                return read(await getattr(self._client, method)(**arguments))
        except ClientError as error:
            details = error.response.get("Error", {})
            return RequestFailure(details.get("Code") or INTERNAL, details.get("Message") or str(error))
        except (NoCredentialsError, PartialCredentialsError) as error:
            return RequestFailure(NO_CREDENTIALS, f"{error}; configure credentials as for any AWS client")
        except _UNREADABLE as error:
            # botocore parses nearly any body as an answer without members.
            return RequestFailure(INTERNAL, without_passwords(f"the answer to {method} cannot be parsed: {error!r}"))
        except _BROKEN as error:
            return RequestFailure(INTERNAL, without_passwords(str(error)) or type(error).__name__)
        except Exception as error:  # noqa: BLE001 - credential providers and event handlers may raise anything
            text = f"{method} was not sent: code of the botocore session raised {error!r}"
            return RequestFailure(INTERNAL, without_passwords(text))


def _stock_entries(answer: Any) -> list[PutRecordsEntry]:  # noqa: ANN401 - botocore has no types
    return msgspec.convert(answer["Records"], list[PutRecordsEntry])


def _shard_page(answer: Any) -> tuple[list[Shard], str | None]:  # noqa: ANN401
    # An endpoint that ignores the filter lists closed shards too. Those have an ending sequence number.
    shards = [
        Shard(
            shard["ShardId"],
            int(shard["HashKeyRange"]["StartingHashKey"]),
            int(shard["HashKeyRange"]["EndingHashKey"]),
        )
        for shard in answer["Shards"]
        if "EndingSequenceNumber" not in shard["SequenceNumberRange"]
    ]
    return shards, answer.get("NextToken")


def _max_record_bytes(answer: Any) -> int:  # noqa: ANN401
    return int(answer["StreamDescriptionSummary"]["MaxRecordSizeInKiB"]) * KIB


def _stock_records(request: PutRecordsRequest) -> list[dict[str, Any]]:
    return [
        {
            "Data": record.data,
            "PartitionKey": record.partition_key,
            "ExplicitHashKey": record.explicit_hash_key,
        }
        for record in request.records
    ]


def _wire(config: Config) -> PutRecordsWire | None:
    """Return the configured wire format, or None for botocore's own."""
    if config.wire_path == "stock":
        return None
    return json_wire() if config.wire_path == "fast" else cbor_wire()


def _is_loopback(endpoint_url: str | None) -> bool:
    """Return True if an endpoint is on this machine's loopback interface."""
    try:
        host = urlsplit(endpoint_url or "").hostname or ""
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
