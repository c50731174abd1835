"""The transport without botocore's client: its resolvers and its signer, and connections of our own.

aiobotocore and aiohttp take most of the time from the start of a program to its first record, 30 MB of memory, and a
millisecond of CPU for each request. This transport takes credentials, region, proxies, the endpoint, the CA bundle and
the user agent from botocore's session, and signs as botocore does. `resolved` returns the reason if a configuration
asks for more. Then the transport over aiobotocore is used, see docs/decisions.
"""

import asyncio
import logging
import os
import ssl
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any, Final, TypeVar
from urllib.parse import SplitResult, quote, urlsplit

import msgspec
from botocore.configprovider import ConfiguredEndpointProvider
from botocore.credentials import Credentials, RefreshableCredentials, create_credential_resolver
from botocore.endpoint_provider import EndpointProvider
from botocore.exceptions import NoCredentialsError, PartialCredentialsError
from botocore.httpsession import get_cert_path
from botocore.parsers import JSONParser
from botocore.session import Session
from botocore.utils import get_environ_proxies, validate_region_name

from kpl_core.event_loop import run_in_daemon_thread
from kpl_core.options.config import Config
from kpl_core.options.validation import require_endpoint_url
from kpl_core.records.put_records import PutRecordsAnswer, PutRecordsRequest, RequestFailure
from kpl_core.records.record_result import INTERNAL
from kpl_core.transport.http_answers import HttpAnswer, decoded
from kpl_core.transport.http_connections import HttpConnections
from kpl_core.transport.put_records_wire import (
    FIRST_ERROR_STATUS,
    JSON_WIRE,
    PutRecordsWire,
    configured_wire,
    stream_argument,
)
from kpl_core.transport.request_signer import RequestSigner
from kpl_core.transport.service_calls import (
    CredentialsUnavailable,
    ServiceCalls,
    SessionVars,
    ca_bundle,
    failure_of,
    is_loopback,
    use_quick_loader,
    user_agent,
)

_logger: Final = logging.getLogger("kpl_core")

_SERVICE: Final = "kinesis"
_RULES: Final = "endpoint-rule-set-1"
_OPERATIONS: Final = {
    "put_records": "PutRecords",
    "list_shards": "ListShards",
    "describe_stream": "DescribeStream",
    "describe_stream_summary": "DescribeStreamSummary",
}

# Attempts keep the message of an error, and log lines quote it.
_MESSAGE_CHARACTERS: Final = 2_000
# Until so many seconds before credentials expire, requests use them while a refresh runs: botocore's value.
_MANDATORY_REFRESH_SECONDS: Final = 600

T = TypeVar("T")


class Resolved(msgspec.Struct, frozen=True):
    """What botocore's resolvers found for a configuration.

    Attributes:
        credentials: as botocore's, which may refresh themselves.
        region: the region to sign for.
        user_agent: the session's, this product and the id of the application.
        tls: the context of TLS connections, None for http.
        endpoint: returns the URL of an operation's endpoint; the second argument is the stream's ARN or None.
        proxy: returns the proxy for a URL, None if there is none.
    """

    credentials: Any
    region: str
    user_agent: str
    tls: ssl.SSLContext | None
    endpoint: Callable[[str, str | None], SplitResult]
    proxy: Callable[[SplitResult], SplitResult | None]


def resolved(config: Config, session_vars: SessionVars = None) -> Resolved | str:
    """Return what the transport needs, or why it needs botocore's client. Reads files; may ask for credentials.

    `session_vars` replace botocore's table of the variables and files that a session reads.
    """
    if config.wire_path == "stock":
        return "wire_path is 'stock'"
    if config.botocore:
        return "botocore has options"
    try:
        return _resolved(config, Session(session_vars))
    except Exception as error:
        # If the configuration is invalid, botocore's client says why.
        _logger.debug("botocore's client is used, because its resolvers failed", exc_info=True)
        return f"AWS' configuration cannot be read ({type(error).__name__})"


def _resolved(config: Config, session: Any) -> Resolved | str:  # noqa: ANN401 - botocore has no types
    use_quick_loader(session)
    region = config.region or session.get_config_variable("region")
    validate_region_name(region)
    configured = _configured_endpoint(config, session)
    if (reason := _asks_for_more(session, region, configured)) is not None:
        return reason
    endpoint = _endpoints(session, region) if configured is None else _given_endpoint(configured)
    url = endpoint("PutRecords", None)
    proxy = _proxy_of(url)
    credentials = _find_credentials(config, session, region)
    if proxy is not None and (proxy.scheme, url.scheme) != ("http", "https"):
        return "a proxy is configured that is not an HTTP proxy for https"
    if credentials is None:
        return "no credentials are found"
    tls = _tls(config, session) if url.scheme == "https" else None
    return Resolved(credentials, region, user_agent(config, session), tls, endpoint, _proxy_of)


def _configured_endpoint(config: Config, session: Any) -> str | None:  # noqa: ANN401 - as above
    """Return the URL of the options, the environment or the profile, the first of them; None: AWS' own."""
    if config.endpoint_url is not None or session.get_config_variable("ignore_configured_endpoint_urls"):
        return config.endpoint_url
    url = ConfiguredEndpointProvider(session.full_config, session.get_scoped_config(), _SERVICE).provide()
    if url is not None:
        require_endpoint_url("endpoint_url", url)
    return url  # type: ignore[no-any-return]


def _asks_for_more(session: Any, region: str | None, endpoint_url: str | None) -> str | None:  # noqa: ANN401 - as above
    """Return what only botocore's client understands of a configuration."""
    if not region:
        return "no region is configured"
    if "fips" in region:
        return f"{region} is a pseudo-region"
    if session.get_config_variable("csm_enabled"):
        return "AWS' configuration has csm_enabled"
    if _SERVICE in session.get_scoped_config():
        return "AWS' configuration has options of clients"
    if endpoint_url is not None:
        # botocore's client says why these cannot be combined.
        for variable in ("use_fips_endpoint", "use_dualstack_endpoint"):
            if session.get_config_variable(variable):
                return f"AWS' configuration has {variable} and an endpoint"
    return None


def _proxy_of(url: SplitResult) -> SplitResult | None:
    """Return the proxy for a URL, as botocore finds it; none for an address of this machine, which no proxy reaches."""
    found = None if is_loopback(url.geturl()) else get_environ_proxies(url.geturl()).get(url.scheme)
    return urlsplit(found if "://" in found else f"http://{found.removeprefix('//')}") if found else None


def _given_endpoint(url: str) -> Callable[[str, str | None], SplitResult]:
    parts = urlsplit(url)
    return lambda _operation, _arn: parts


def _endpoints(session: Any, region: str) -> Callable[[str, str | None], SplitResult]:  # noqa: ANN401
    loader = session.get_component("data_loader")
    provider = EndpointProvider(loader.load_service_model(_SERVICE, _RULES), loader.load_data("partitions"))
    is_fips = bool(session.get_config_variable("use_fips_endpoint"))
    is_dual_stack = bool(session.get_config_variable("use_dualstack_endpoint"))

    def endpoint(operation: str, arn: str | None) -> SplitResult:
        parameters = {} if arn is None else {"StreamARN": arn}
        kind = "data" if operation == "PutRecords" else "control"
        found = provider.resolve_endpoint(
            Region=region, UseFIPS=is_fips, UseDualStack=is_dual_stack, OperationType=kind, **parameters
        )
        return urlsplit(found.url)

    return endpoint


def _find_credentials(config: Config, session: Any, region: str) -> Any:  # noqa: ANN401 - botocore has no types
    """Return the credentials of the options, else those that botocore's session finds, None if there are none."""
    key, secret = config.aws_access_key_id, config.aws_secret_access_key
    if key is not None and secret is not None:
        return Credentials(key, secret, config.aws_session_token)
    if key is not None or secret is not None:
        return None
    session.register_component("credential_provider", create_credential_resolver(session, region_name=region))
    return session.get_credentials()


def _tls(config: Config, session: Any) -> ssl.SSLContext:  # noqa: ANN401
    bundle = ca_bundle(config, session)
    context = ssl.create_default_context(cafile=bundle if isinstance(bundle, str) else get_cert_path(verify=True))
    context.set_alpn_protocols(["http/1.1"])
    if bundle is False:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    return context


def _trace_field() -> str:
    """Return the header field by which Lambda finds functions that call themselves, as botocore adds it: unsigned."""
    trace_id = os.environ.get("_X_AMZN_TRACE_ID")
    if trace_id is None or "AWS_LAMBDA_FUNCTION_NAME" not in os.environ:
        return ""
    trace_id = quote(trace_id, safe="-=;:+&[]{}\"',")
    return f"X-Amzn-Trace-Id: {trace_id}\r\n"


class FreshCredentials:
    """Credentials that are refreshed before they expire, once for all requests.

    Temporary ones (of a role, SSO, a container or an instance) are refreshed as botocore does it, but in a thread: a
    refresh asks a server or runs a program, and must not block the loop.

    Args:
        credentials: as botocore's, which may refresh themselves.
    """

    def __init__(self, credentials: Any) -> None:  # noqa: ANN401 - as above
        self._credentials = credentials
        self._refreshing: asyncio.Task[Any] | None = None

    async def frozen(self) -> Any:  # noqa: ANN401 - as above
        """Return credentials to sign with; refresh them first if they are about to expire.

        Raises:
            CredentialsUnavailable: the place that they come from cannot be reached, or refuses.
        """
        try:
            return await self._refreshed()
        except (TimeoutError, NoCredentialsError, PartialCredentialsError):
            raise
        except Exception as error:  # providers may raise anything
            message = f"credentials cannot be fetched ({type(error).__name__}: {error}); check where they come from"
            raise CredentialsUnavailable(message) from error

    def cancel_refresh(self) -> None:
        """Stop waiting for a refresh that runs."""
        if self._refreshing is not None:
            self._refreshing.cancel()

    async def _refreshed(self) -> Any:  # noqa: ANN401 - as above
        credentials = self._credentials
        if not isinstance(credentials, RefreshableCredentials) or not credentials.refresh_needed():
            return credentials.get_frozen_credentials()
        # This may ask a server or run a program, once for all requests.
        if self._refreshing is None or self._refreshing.done():
            self._refreshing = asyncio.ensure_future(run_in_daemon_thread(credentials.get_frozen_credentials))
            self._refreshing.add_done_callback(lambda task: None if task.cancelled() else task.exception())
        # Requests wait only for the last minutes before the end, as botocore's own do.
        present = getattr(credentials, "_frozen_credentials", None)
        mandatory = getattr(credentials, "_mandatory_refresh_timeout", _MANDATORY_REFRESH_SECONDS)
        if present is not None and not credentials.refresh_needed(mandatory):
            return present
        return await asyncio.shield(self._refreshing)


class DirectTransport(ServiceCalls):
    """A transport over connections of its own, with what `resolved` has found."""

    def __init__(self, config: Config, found: Resolved) -> None:
        self._config = config
        self._found = found
        self._wire = configured_wire(config) or JSON_WIRE
        self._credentials = FreshCredentials(found.credentials)
        self._signer = RequestSigner(found.region, found.user_agent)
        self._connections: HttpConnections

    @asynccontextmanager
    async def open(self) -> AsyncIterator[None]:
        """Accept calls, and close the connections at the end."""
        config = self._config
        self._connections = HttpConnections(
            max_connections=config.max_connections,
            connect_seconds=config.connect_timeout_ms / 1000,
            exchange_seconds=config.request_timeout_ms / 1000,
            tls=self._found.tls,
            proxy=self._found.proxy,
        )
        try:
            yield
        finally:
            self._credentials.cancel_refresh()
            await self._connections.close()

    async def put_records(self, request: PutRecordsRequest) -> PutRecordsAnswer:
        """Send one request: one attempt, within `request_timeout_ms`."""
        wire = self._wire
        return await self._exchange("put_records", request.stream, wire, wire.body(request), wire.entries)

    async def call(
        self,
        method: str,
        read: Callable[[Any], T],
        stream: str | None,
        **arguments: Any,  # noqa: ANN401 - any JSON value
    ) -> T | RequestFailure:
        """Make one attempt; see `ServiceCalls.call`."""
        if stream is not None:
            arguments.update(stream_argument(stream))
        body = msgspec.json.encode(arguments)
        return await self._exchange(method, stream, JSON_WIRE, body, lambda answer: read(msgspec.json.decode(answer)))

    async def _exchange(
        self, method: str, stream: str | None, wire: PutRecordsWire, body: bytes, read: Callable[[bytes], T]
    ) -> T | RequestFailure:
        config = self._config
        try:
            # The timeout covers the whole call, so an answer that arrives slowly is cut off too.
            async with asyncio.timeout((config.request_timeout_ms + config.connect_timeout_ms) / 1000):
                operation = _OPERATIONS[method]
                url = self._found.endpoint(operation, stream if stream and stream.startswith("arn:") else None)
                credentials = await self._credentials.frozen()
                head = self._signer.signed_head(url, operation, wire.content_type, body, credentials)
                # Unsigned, as botocore sends it: a proxy may change it.
                rest = f"{_trace_field()}Accept-Encoding: identity\r\nContent-Length: {len(body)}\r\n\r\n"
                answer = decoded(await self._connections.post(url, (head + rest).encode(), body))
            return read(answer.body) if answer.status < FIRST_ERROR_STATUS else _failure(answer, wire)
        except TimeoutError as error:
            text = str(error) or f"no answer to {method} within {config.request_timeout_ms} ms"
            return RequestFailure(INTERNAL, text)
        except Exception as error:  # noqa: BLE001 - credential providers may raise anything
            return failure_of(method, error)


def _failure(answer: HttpAnswer, wire: PutRecordsWire) -> RequestFailure:
    """Return code and message of an error, as botocore reads them; of a body that is none, its status."""
    body = answer.body if wire.error_as_json is None else wire.error_as_json(answer.body)
    given = {"status_code": answer.status, "headers": answer.headers, "body": body}
    try:
        error = JSONParser().parse(given, None)["Error"]  # type: ignore[arg-type] # an error has no shape
        code, message = error.get("Code"), error.get("Message")
    except (ValueError, AttributeError, TypeError, RecursionError):  # JSON of another form
        code, message = str(answer.status), None
    # Members of another type are as good as none.
    code = code if isinstance(code, str) and code else INTERNAL
    message = message if isinstance(message, str) and message else f"HTTP status {answer.status}"
    return RequestFailure(code, message[:_MESSAGE_CHARACTERS])
