"""The connection to Kinesis from a command's options and AWS' configuration, and AWS' errors as failures."""

import ipaddress
import os
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, Final, Self
from urllib.parse import urlsplit

import anyio.to_thread
from botocore.exceptions import (
    BotoCoreError,
    ClientError,
    ConnectionError as NoConnection,
    HTTPClientError,
    MetadataRetrievalError,
    NoCredentialsError,
    PartialCredentialsError,
    SSLError,
)
from botocore.session import Session

from kpl_core import Config
from kpl_core.paging import EndlessListingError
from kpl_core.records.user_record import require_stream
from kpl_core.transport import KinesisTransport
from kpl_core.transport.default_transport import default_transport
from kpl_integrations.cli.exit_code import CommandFailure

if TYPE_CHECKING:
    from aiobotocore.session import AioSession

# A Kinesis on this machine accepts any region and credentials, so the user need not invent them.
LOCAL_REGION: Final = "us-east-1"
LOCAL_CREDENTIAL: Final = "local"

# A session that reads no profile and no configuration file of the user.
_NO_FILES: Final = {
    "profile": (None, None, None, None),
    "config_file": (None, None, os.devnull, None),
    "credentials_file": (None, None, os.devnull, None),
}

# What OpenSSL reports, by its version, if the first bytes of an answer are plain HTTP.
_NO_TLS: Final = ("WRONG_VERSION_NUMBER", "RECORD_LAYER_FAILURE", "HTTP_REQUEST", "UNKNOWN_PROTOCOL", "PACKET_LENGTH")

_CLIENT: Final[dict[str, Any]] = {"connect_timeout": 4, "read_timeout": 20, "tcp_keepalive": True}

_CREDENTIALS: Final = (
    "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE, as for any AWS client; "
    "a Kinesis on this machine takes any"
)
REJECTED_CREDENTIALS: Final = "renew the credentials, and check AWS_PROFILE and the clock of this machine"

# error code (a trailing * matches any ending) -> what to do
_ADVICE: Final = {
    "ResourceNotFoundException": "check its name, the region and the endpoint, or create it",
    "AccessDenied*": "allow it in the IAM policy of these credentials",
    "NoCredentials": _CREDENTIALS,
    "UnrecognizedClient*": REJECTED_CREDENTIALS,
    "InvalidSignature*": REJECTED_CREDENTIALS,
    "IncompleteSignature*": REJECTED_CREDENTIALS,
    "MissingAuthenticationToken*": REJECTED_CREDENTIALS,
    "SignatureDoesNotMatch*": REJECTED_CREDENTIALS,
    "ExpiredToken*": REJECTED_CREDENTIALS,
    "KMS*": "check the key that encrypts the stream, and the permission to use it",
    "ProvisionedThroughputExceededException": "give the stream more shards, or send less",
    "LimitExceededException": "try again in a moment",
    "ResourceInUseException": "wait until the stream is ACTIVE",
    "Expired": "the stream accepted less than was sent; give it more shards, or send less",
}
_OTHER_ADVICE: Final = "check the stream and the endpoint"


@dataclass
class Connection:
    """Region, endpoint and credentials for one stream. Created by `resolved` or `to_own_server`.

    `credential` is one that a Kinesis on this machine accepts; None: those of AWS' configuration. `session_vars`
    replace the variables and files that botocore reads.
    """

    stream: str
    region: str = field(kw_only=True)
    endpoint_url: str | None = field(kw_only=True)
    credential: str | None = field(default=None, kw_only=True)
    session_vars: dict[str, tuple[Any, Any, Any, Any]] | None = field(default=None, kw_only=True)

    @cached_property
    def session(self) -> "AioSession":
        """The session for aiobotocore's clients."""
        from aiobotocore.session import AioSession  # noqa: PLC0415 - 0.3 s

        session = AioSession(session_vars=self.session_vars)
        if self.credential is not None:
            session.set_credentials(self.credential, self.credential)
        return session

    async def transport(self, config: Config) -> KinesisTransport:
        """Return the transport of a producer with these options, which include region and endpoint."""
        credential = self.credential
        if credential is not None:
            config = replace(config, aws_access_key_id=credential, aws_secret_access_key=credential)
        return await default_transport(config, session_vars=self.session_vars)

    @property
    def _options(self) -> dict[str, Any]:
        # Do not use a proxy for this machine.
        return {"proxies": {}} if _is_loopback(self.endpoint_url) else {}

    @classmethod
    async def resolved(cls, stream: str, *, region: str | None, endpoint_url: str | None) -> Self:
        """Find region and credentials.

        Raises:
            CommandFailure: there is no region, or the endpoint is not a URL.
        """
        session, credential = Session(), None
        is_local = _is_loopback(endpoint_url)
        # A `credential_process` that is not there is an OSError.
        with _aws_errors_as_failures("AWS' configuration", stream, OSError):
            region = region or _region_of(stream) or session.get_config_variable("region")
            if is_local and await anyio.to_thread.run_sync(_found_credentials, session) is None:
                credential = LOCAL_CREDENTIAL
        if not region and not is_local:
            found = "no region is set" if region is None else "the region is empty"
            message = f"{found}; name one with --region, or set AWS_DEFAULT_REGION (AWS_REGION is not read)"
            raise CommandFailure(message)
        return cls(stream, region=region or LOCAL_REGION, endpoint_url=endpoint_url, credential=credential)

    @classmethod
    def to_own_server(cls, stream: str, *, endpoint_url: str) -> Self:
        """Return the connection to a Kinesis that this command started; it ignores the user's AWS configuration."""
        return cls(
            stream,
            region=LOCAL_REGION,
            endpoint_url=endpoint_url,
            credential=LOCAL_CREDENTIAL,
            session_vars=_NO_FILES,
        )

    @classmethod
    async def to_stream(cls, stream: str, *, region: str | None, endpoint_url: str | None) -> Self:
        """Find region and credentials, and check that the stream exists before anything is read or sent.

        Raises:
            CommandFailure: as `resolved`; or the stream is not a name or an ARN, Kinesis cannot be reached, rejects the
                credentials, or has no such stream.
        """
        require_named(stream)
        connection = await cls.resolved(stream, region=region, endpoint_url=endpoint_url)
        # One attempt, because the user waits for the answer.
        async with connection.client(attempts=1) as client:
            try:
                await client.describe_stream_summary(**connection.stream_argument)
            except ClientError as error:
                # Producers often may put but not describe; then the first put shows whether the stream exists.
                if not error.response.get("Error", {}).get("Code", "").startswith("AccessDenied"):
                    raise
        return connection

    @property
    def place(self) -> str:
        """The location of Kinesis, for messages."""
        return f"Kinesis in {self.region}" if self.endpoint_url is None else f"Kinesis at {self.endpoint_url}"

    @property
    def stream_argument(self) -> dict[str, str]:
        """The argument of an API call that names the stream."""
        return {"StreamARN" if self.stream.startswith("arn:") else "StreamName": self.stream}

    def producer_config(self, **options: Any) -> Config:  # noqa: ANN401 - checked by Config
        """Return the options of a producer on this connection."""
        return Config(**options, region=self.region, endpoint_url=self.endpoint_url, botocore=self._options)

    @asynccontextmanager
    async def client(self, *, attempts: int = 4) -> AsyncIterator[Any]:
        """Open an aiobotocore client; its errors inside the block become a CommandFailure."""
        cli_options = f"--region {self.region}"
        if self.endpoint_url is not None:
            cli_options += f" --endpoint-url {self.endpoint_url}"
        import aiohttp  # noqa: PLC0415 - as `session`
        from aiobotocore.config import AioConfig  # noqa: PLC0415

        with _aws_errors_as_failures(self.place, self.stream, aiohttp.ClientError, cli_options=cli_options):
            retries = {"total_max_attempts": attempts, "mode": "standard"}
            config = AioConfig(**_CLIENT, **self._options, retries=retries)
            creating = self.session.create_client(
                "kinesis", region_name=self.region, endpoint_url=self.endpoint_url, config=config
            )
            async with AsyncExitStack() as stack:
                try:
                    client = await stack.enter_async_context(creating)
                except ValueError as error:
                    message = (
                        f"{_one_line(error)}; check --region, such as eu-west-1, "
                        "and --endpoint-url, such as http://127.0.0.1:4567"
                    )
                    raise CommandFailure(message) from error
                yield client


def _found_credentials(session: Any) -> object | None:  # noqa: ANN401 - botocore has no types
    """Return botocore's credentials without network requests, because a local Kinesis accepts any."""
    session.set_config_variable("metadata_service_num_attempts", 0)
    session.set_config_variable("metadata_service_timeout", 0.1)
    try:
        found: object | None = session.get_credentials()
    except MetadataRetrievalError:
        return None
    return found


def require_named(stream: str) -> None:
    """Raise CommandFailure if this is not the name or the ARN of a stream."""
    try:
        require_stream(stream)
    except ValueError as error:
        raise CommandFailure(str(error)) from None


def _is_loopback(endpoint_url: str | None) -> bool:
    return endpoint_url is not None and is_this_machine(_host_of(endpoint_url))


def is_this_machine(host: str) -> bool:
    """Return True if a host name or address can be reached from this machine only."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _host_of(endpoint_url: str) -> str:
    try:
        parts = urlsplit(endpoint_url)
        if parts.scheme in {"http", "https"} and parts.hostname and parts.port != 0:
            return parts.hostname
    except ValueError:  # the port is not a number, or an IPv6 address is incomplete
        pass
    message = f"--endpoint-url is {endpoint_url!r}, which is not a URL; write it like http://127.0.0.1:4567"
    raise CommandFailure(message)


def _region_of(stream: str) -> str | None:
    """Return the region in a stream's ARN; None for a name."""
    parts = stream.split(":")
    return parts[3] or None if stream.startswith("arn:") and len(parts) > 3 else None  # noqa: PLR2004 - arn:aws:kinesis:REGION


def advice(code: str) -> str:
    """Return what to do about an error code of Kinesis or the producer."""
    for pattern, fix in _ADVICE.items():
        if code == pattern or (pattern.endswith("*") and code.startswith(pattern[:-1])):
            return fix
    return _OTHER_ADVICE


@contextmanager
def _aws_errors_as_failures(
    place: str, stream: str, connection_error: type[Exception] = BotoCoreError, *, cli_options: str = ""
) -> Iterator[None]:
    """Turn errors of an AWS client or its connections inside the block into a CommandFailure.

    `place` is the location of Kinesis, such as "Kinesis in eu-west-1"; `cli_options` are the matching options of the
    `aws` command.
    """
    try:
        yield
    except (ClientError, BotoCoreError, EndlessListingError, connection_error) as error:
        raise CommandFailure(_sentence(error, place, stream, cli_options)) from error


def _sentence(error: Exception, place: str, stream: str, cli_options: str) -> str:
    if isinstance(error, ClientError):
        return _error_sentence(error, place, stream, cli_options)
    if isinstance(error, NoCredentialsError | PartialCredentialsError):
        return f"no AWS credentials found ({_one_line(error)}); {_CREDENTIALS}"
    if isinstance(error, SSLError):
        return _tls_sentence(place, _one_line(error))
    if isinstance(error, NoConnection | HTTPClientError):
        return (
            f"{place} cannot be reached; check --endpoint-url, the region and the network "
            "(`kpl local` starts a Kinesis on this machine)"
        )
    return f"{place} cannot be used: {_one_line(error)}; check AWS_PROFILE, AWS' configuration files and the endpoint"


def _tls_sentence(place: str, reason: str) -> str:
    if any(sign in reason for sign in _NO_TLS):
        return f"{place} does not speak TLS ({reason}); write the endpoint with http://, or name the port for https"
    if "CERTIFICATE_VERIFY_FAILED" in reason:
        return f"{place} has no trusted certificate: {reason}; check the endpoint or AWS_CA_BUNDLE"
    return f"{place} ends the TLS connection: {reason}; check the endpoint and its TLS versions"


def _error_sentence(error: ClientError, place: str, stream: str, cli_options: str) -> str:
    details = error.response.get("Error", {})
    code = details.get("Code") or "an unnamed error"
    if code == "ResourceNotFoundException":
        name = stream.rpartition("/")[2]  # of an ARN, its end
        create = f"aws kinesis create-stream --stream-name {name} --shard-count 1 {cli_options}".rstrip()
        return f"{place} has no stream {stream!r}; {advice(code)}: {create}"
    text = " ".join((details.get("Message") or "").split())
    reason = f"{code}: {text}" if text else code
    return f"{place} rejects {error.operation_name} of {stream!r} ({reason.rstrip('.')}); {advice(code)}"


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split()).rstrip(".") or type(error).__name__
