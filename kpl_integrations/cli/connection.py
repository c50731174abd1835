"""Where Kinesis is, and as whom to speak to it: what the options and AWS' own configuration say together."""

import ipaddress
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, Final, Self
from urllib.parse import urlsplit

from aiobotocore.config import AioConfig
from aiobotocore.session import AioSession
from botocore.exceptions import ClientError, MetadataRetrievalError

from kpl_core import Config
from kpl_integrations.cli.aws_failures import told_in_one_sentence
from kpl_integrations.cli.failure import CommandFailure

__all__ = ["Connection", "is_this_machine"]

# A Kinesis on this machine takes any credentials in any region, so nobody should have to make them up.
LOCAL_REGION: Final = "us-east-1"
LOCAL_CREDENTIAL: Final = "local"

# A session that reads neither a profile nor a file of the user.
_NO_FILES: Final = {
    "profile": (None, None, None, None),
    "config_file": (None, None, os.devnull, None),
    "credentials_file": (None, None, os.devnull, None),
}

_CLIENT: Final[dict[str, Any]] = {
    "connect_timeout": 4,
    "read_timeout": 20,
    "tcp_keepalive": True,
}


class Connection:
    """The way to one stream. Made by `resolved`; `session` knows the credentials."""

    def __init__(self, session: AioSession, stream: str, *, region: str, endpoint_url: str | None) -> None:
        self.session = session
        self.stream = stream
        self.region = region
        self.endpoint_url = endpoint_url
        # A proxy for the world outside must not be asked for this machine.
        self._options: dict[str, Any] = {"proxies": {}} if _is_loopback(endpoint_url) else {}

    @classmethod
    async def resolved(cls, stream: str, *, region: str | None, endpoint_url: str | None) -> Self:
        """Find region and credentials.

        Raises:
            CommandFailure: there is no region, or the endpoint is no URL.
        """
        session = AioSession()
        is_local = _is_loopback(endpoint_url)
        with told_in_one_sentence("AWS' configuration", stream):
            region = region or _region_of(stream) or session.get_config_variable("region")
            if is_local and await _found_credentials(session) is None:
                session.set_credentials(LOCAL_CREDENTIAL, LOCAL_CREDENTIAL)
        if region is None and not is_local:
            message = "no region is set; name one with --region, or set AWS_DEFAULT_REGION"
            raise CommandFailure(message)
        return cls(session, stream, region=region or LOCAL_REGION, endpoint_url=endpoint_url)

    @classmethod
    def to_our_own(cls, stream: str, *, endpoint_url: str) -> Self:
        """Return the way to a Kinesis this command started: nothing of the user's AWS configuration matters."""
        session = AioSession(session_vars=_NO_FILES)
        session.set_credentials(LOCAL_CREDENTIAL, LOCAL_CREDENTIAL)
        return cls(session, stream, region=LOCAL_REGION, endpoint_url=endpoint_url)

    @property
    def place(self) -> str:
        """Return the words for where Kinesis is looked for."""
        return f"Kinesis in {self.region}" if self.endpoint_url is None else f"Kinesis at {self.endpoint_url}"

    @property
    def stream_argument(self) -> dict[str, str]:
        """Return how an API call names the stream."""
        return {"StreamARN" if self.stream.startswith("arn:") else "StreamName": self.stream}

    def producer_config(self, **options: Any) -> Config:  # noqa: ANN401 - any option, checked by Config
        """Return the options of a producer that goes the same way."""
        return Config(**options, region=self.region, endpoint_url=self.endpoint_url, botocore=self._options)

    @asynccontextmanager
    async def client(self, *, attempts: int = 4) -> AsyncIterator[Any]:
        """Open an aiobotocore client; what it raises inside the block becomes a CommandFailure."""
        way = f"--region {self.region}"
        if self.endpoint_url is not None:
            way += f" --endpoint-url {self.endpoint_url}"
        with told_in_one_sentence(self.place, self.stream, way=way):
            retries = {"total_max_attempts": attempts, "mode": "standard"}
            config = AioConfig(**_CLIENT, **self._options, retries=retries)
            creating = self.session.create_client(
                "kinesis", region_name=self.region, endpoint_url=self.endpoint_url, config=config
            )
            try:
                client = await creating.__aenter__()
            except ValueError as error:
                said = str(error).rstrip(".")
                message = (
                    f"{said}; check --region, such as eu-west-1, and --endpoint-url, such as http://127.0.0.1:4567"
                )
                raise CommandFailure(message) from error
            try:
                yield client
            finally:
                await creating.__aexit__(None, None, None)

    async def require_stream(self) -> None:
        """Ask for the stream before anything is read or sent.

        Raises:
            CommandFailure: Kinesis cannot be reached, refuses the credentials, or has no such stream.
        """
        # One attempt: somebody sits there and waits for the answer.
        async with self.client(attempts=1) as client:
            try:
                await client.describe_stream_summary(**self.stream_argument)
            except ClientError as error:
                # Many a producer may put and not look; then the first put will tell.
                if not error.response.get("Error", {}).get("Code", "").startswith("AccessDenied"):
                    raise


async def _found_credentials(session: AioSession) -> object | None:
    """Return what botocore finds without asking the network: this machine's Kinesis takes any."""
    session.set_config_variable("metadata_service_num_attempts", 0)
    session.set_config_variable("metadata_service_timeout", 0.1)
    try:
        found: object | None = await session.get_credentials()
    except MetadataRetrievalError:
        return None
    return found


def _is_loopback(endpoint_url: str | None) -> bool:
    return endpoint_url is not None and is_this_machine(_host_of(endpoint_url))


def is_this_machine(host: str) -> bool:
    """Say whether nobody but this machine reaches a host, an address or a name."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _host_of(endpoint_url: str) -> str:
    try:
        parts = urlsplit(endpoint_url)
        if parts.scheme in {"http", "https"} and parts.hostname and parts.port != 0:
            return parts.hostname
    except ValueError:  # a port that is no number, or half an IPv6 address
        pass
    message = f"--endpoint-url is {endpoint_url!r}, no URL; write it like http://127.0.0.1:4567"
    raise CommandFailure(message)


def _region_of(stream: str) -> str | None:
    """Return the region in a stream's ARN, None for a name."""
    parts = stream.split(":")
    return parts[3] or None if stream.startswith("arn:") and len(parts) > 3 else None  # noqa: PLR2004 - arn:aws:kinesis:REGION
