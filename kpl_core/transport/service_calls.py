"""What the transports share: the calls that read the stream, and the failures that errors become."""

import ipaddress
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, Final, TypeVar
from urllib.parse import urlsplit

import msgspec
from botocore.exceptions import BotoCoreError, NoCredentialsError, PartialCredentialsError
from botocore.loaders import Loader, create_loader
from botocore.useragent import sanitize_user_agent_string_component

from kpl_core.options.config import Config
from kpl_core.options.kinesis_limits import KIB, SHARDS_PER_PAGE
from kpl_core.options.validation import without_passwords
from kpl_core.paging import EndlessListingError, PageTokens
from kpl_core.pipeline.shard_map import Shard
from kpl_core.records.put_records import RequestFailure
from kpl_core.records.record_result import INTERNAL
from kpl_core.version import producer_version

NO_CREDENTIALS: Final = "NoCredentials"
# The argument `session_vars` of botocore's sessions; None: all variables and files.
SessionVars = dict[str, tuple[Any, Any, Any, Any]] | None
# RecursionError: an answer of JSON that is nested too deeply.
_UNREADABLE: Final = (ValueError, KeyError, TypeError, AttributeError, RecursionError, msgspec.MsgspecError)

T = TypeVar("T")


class ServiceCalls(ABC):
    """The calls that every transport makes alike, in JSON."""

    @abstractmethod
    async def call(
        self,
        method: str,
        read: Callable[[Any], T],
        stream: str | None,
        **arguments: Any,  # noqa: ANN401 - any JSON value
    ) -> T | RequestFailure:
        """Make one attempt of the client's `method`; return what `read` makes of the parsed answer."""

    async def list_shards(self, stream: str) -> Sequence[Shard] | RequestFailure:
        """Return all open shards. If one page fails the whole call fails, because half a shard map is wrong."""
        shards: list[Shard] = []
        arguments: dict[str, Any] = {"MaxResults": SHARDS_PER_PAGE, "ShardFilter": {"Type": "AT_LATEST"}}
        name: str | None = stream
        tokens = PageTokens()
        while True:
            page = await self.call("list_shards", _shard_page, name, **arguments)
            if isinstance(page, RequestFailure):
                return page
            shards += page[0]
            token = page[1]
            if not token:
                return shards
            try:
                tokens.follow(token)
            except EndlessListingError as error:
                return RequestFailure(INTERNAL, f"list_shards: {error}")
            # The token replaces the stream's name; Kinesis rejects a request with both.
            name, arguments = None, {"NextToken": token}

    async def max_record_bytes(self, stream: str) -> int | RequestFailure:
        """Return the stream's limit on key and data, from DescribeStreamSummary."""
        return await self.call("describe_stream_summary", _max_record_bytes, stream)


def _shard_page(answer: Any) -> tuple[list[Shard], str | None]:  # noqa: ANN401
    # An endpoint that ignores the filter lists closed shards too. Those have an ending sequence number.
    shards = [
        Shard(
            shard["ShardId"],
            int(shard["HashKeyRange"]["StartingHashKey"]),
            int(shard["HashKeyRange"]["EndingHashKey"]),
        )
        for shard in answer["Shards"]
        if shard["SequenceNumberRange"].get("EndingSequenceNumber") is None
    ]
    token = answer.get("NextToken")
    if not isinstance(token, str | None):
        message = f"NextToken is a {type(token).__name__}, and not a text"
        raise TypeError(message)
    return shards, token


def _max_record_bytes(answer: Any) -> int:  # noqa: ANN401
    return int(answer["StreamDescriptionSummary"]["MaxRecordSizeInKiB"]) * KIB


class CredentialsUnavailable(Exception):  # noqa: N818 - the name says what happened
    """Credentials cannot be had this time, such as while STS cannot be reached; a retry may help."""


def failure_of(method: str, error: Exception, *, broken: tuple[type[Exception], ...] = ()) -> RequestFailure:
    """Return the failure that an exception of one attempt stands for. `broken` are the client's network errors."""
    if isinstance(error, NoCredentialsError | PartialCredentialsError):
        return RequestFailure(NO_CREDENTIALS, f"{error}; configure credentials as for any AWS client")
    if isinstance(error, (BotoCoreError, CredentialsUnavailable, OSError, *broken)):
        text = str(error) or type(error).__name__
    elif isinstance(error, _UNREADABLE):
        # botocore parses nearly any body as an answer without members.
        text = f"the answer to {method} cannot be parsed: {error!r}"
    else:
        # Credential providers and event handlers may raise anything.
        text = f"{method} was not sent: code of the botocore session raised {error!r}"
    return RequestFailure(INTERNAL, without_passwords(text))


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


def is_loopback(url: str | None) -> bool:
    """Return True if an endpoint is on this machine's loopback interface, which no proxy can reach."""
    try:
        host = urlsplit(url or "").hostname or ""
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def ca_bundle(config: Config, session: Any) -> str | bool:  # noqa: ANN401 - botocore has no types
    """Return the configured CA bundle, True for botocore's default, or False for no verification."""
    if config.verify_ssl is not True:
        return config.verify_ssl
    # As botocore: AWS_CA_BUNDLE and the profile first.
    return session.get_config_variable("ca_bundle") or os.environ.get("REQUESTS_CA_BUNDLE") or True


def user_agent(config: Config, session: Any) -> str:  # noqa: ANN401 - botocore has no types
    """Return the user agent of the session without its `user_agent_extra`, and then this product and the app's id."""
    base = session.user_agent().removesuffix(f" {session.user_agent_extra}")
    product = f"{base} kpl-integrations/{producer_version()}"
    app_id = config.botocore.get("user_agent_appid") or session.get_config_variable("user_agent_appid")
    if not app_id:
        return product
    return f"{product} app/{sanitize_user_agent_string_component(app_id, allow_hash=True)}"


def use_quick_loader(session: Any) -> None:  # noqa: ANN401 - botocore has no types
    """Replace the loader of a botocore session."""
    paths = create_loader(session.get_config_variable("data_path")).search_paths
    loader = QuickLoader(extra_search_paths=paths, include_default_search_paths=False)
    session.register_component("data_loader", loader)
