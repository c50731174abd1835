"""AWS credentials for the direct transport: where they come from, and when they are refreshed.

botocore's resolver finds them. Temporary ones (of a role, SSO, a container or an instance) are refreshed before they
expire, as botocore does it, but in a thread: a refresh asks a server or runs a program, and must not block the loop.
"""

import asyncio
from typing import Any, Final

from botocore.credentials import Credentials, RefreshableCredentials, create_credential_resolver
from botocore.exceptions import NoCredentialsError, PartialCredentialsError

from kpl_core.event_loop import run_in_daemon_thread
from kpl_core.options.config import Config
from kpl_core.transport.service_calls import CredentialsUnavailable

# Until so many seconds before credentials expire, requests use them while a refresh runs: botocore's value.
_MANDATORY_REFRESH_SECONDS: Final = 600


def find_credentials(config: Config, session: Any, region: str) -> Any:  # noqa: ANN401 - botocore has no types
    """Return the credentials of the options, else those that botocore's session finds, None if there are none."""
    key, secret = config.aws_access_key_id, config.aws_secret_access_key
    if key is not None and secret is not None:
        return Credentials(key, secret, config.aws_session_token)
    if key is not None or secret is not None:
        return None
    session.register_component("credential_provider", create_credential_resolver(session, region_name=region))
    return session.get_credentials()


class FreshCredentials:
    """Credentials that are refreshed before they expire, once for all requests.

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
