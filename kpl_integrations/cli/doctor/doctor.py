"""`kpl doctor`: looks at everything a producer needs, goes on past what fails, and says what to mend."""

import sys
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime
from typing import Any, Final

import msgspec
from botocore.exceptions import ClientError
from rich.table import Table
from rich.text import Text

from kpl_integrations.cli.connection import Connection
from kpl_integrations.cli.doctor.checks import Check, Status, clock, open_files, shards, stream
from kpl_integrations.cli.exit_code import ExitCode
from kpl_integrations.cli.failure import CommandFailure
from kpl_integrations.cli.terminal import results

__all__ = ["Doctor"]

_SIGNS: Final[dict[Status, tuple[str, str]]] = {
    "ok": ("ok", "green"),
    "warning": ("warning", "yellow"),
    "failed": ("failed", "bold red"),
    "skipped": ("skipped", "dim"),
}
# What AWS answers to whom it does not know, or whose clock is wrong.
_OF_CREDENTIALS: Final = (
    "ExpiredToken",
    "IncompleteSignature",
    "InvalidSignature",
    "MissingAuthenticationToken",
    "SignatureDoesNotMatch",
    "UnrecognizedClient",
)
_NAMES: Final = ("configuration", "credentials", "connection", "stream", "shards", "list shards", "clock", "open files")


class Doctor:
    """One run of the command."""

    def __init__(self, stream: str, *, endpoint_url: str | None, region: str | None, as_json: bool) -> None:
        self._stream = stream
        self._endpoint_url = endpoint_url
        self._region = region
        self._as_json = as_json
        self._checks: list[Check] = []

    async def run(self) -> ExitCode:
        """Check everything; status 3 if something is in the way of a producer."""
        await self._check_service()
        self._checks.append(open_files(_open_files_limit()))
        known = {check.name: check for check in self._checks}
        checks = [known.get(name, Check(name, "skipped", "something before it failed")) for name in _NAMES]
        is_well = all(check.status != "failed" for check in checks)
        if self._as_json:
            document = {"ok": is_well, "stream": self._stream, "checks": checks}
            sys.stdout.write(msgspec.json.encode(document).decode() + "\n")
            sys.stdout.flush()
        else:
            self._print(checks)
        return ExitCode.DONE if is_well else ExitCode.UNUSABLE

    async def _check_service(self) -> None:
        connection = await self._tried("configuration", self._connection)
        if connection is None:
            return
        if await self._tried("credentials", lambda: self._credentials(connection)) is None:
            return
        summary = await self._described(connection)
        if summary is None:
            return
        self._checks.append(stream(summary))
        account = await self._account(connection)
        self._checks.append(shards(summary.get("OpenShardCount", 0), account))
        await self._tried("list shards", lambda: self._listed(connection))

    async def _tried(self, name: str, look: Callable[[], Awaitable[Any]]) -> Any:  # noqa: ANN401 - what was found
        """Return what `look` returns; None, and a failed check of this name, if the command could not go on."""
        try:
            return await look()
        except CommandFailure as failure:
            self._failed(name, failure)
            return None

    async def _connection(self) -> Connection:
        found = await Connection.resolved(self._stream, region=self._region, endpoint_url=self._endpoint_url)
        self._checks.append(Check("configuration", "ok", found.place))
        return found

    async def _credentials(self, connection: Connection) -> bool:
        credentials = await connection.session.get_credentials()
        if credentials is None:
            message = (
                "no AWS credentials found; set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE, "
                "as for any AWS client"
            )
            raise CommandFailure(message)
        # Where they come from, never what they are.
        self._checks.append(Check("credentials", "ok", f"found ({credentials.method or 'given'})"))
        return True

    async def _described(self, connection: Connection) -> Any:  # noqa: ANN401 - the service's answer
        """Return the stream's summary, None if it cannot be had; a refusal is an answer too."""
        try:
            async with connection.client(attempts=1) as client:
                answer = await client.describe_stream_summary(**connection.stream_argument)
        except CommandFailure as failure:
            refusal = failure.__cause__
            if not isinstance(refusal, ClientError):
                self._failed("connection", failure)
                return None
            self._answered(connection, refusal.response)
            code = refusal.response.get("Error", {}).get("Code", "")
            self._failed("credentials" if code.startswith(_OF_CREDENTIALS) else "stream", failure)
            return None
        self._answered(connection, answer)
        return answer["StreamDescriptionSummary"]

    def _answered(self, connection: Connection, answer: Any) -> None:  # noqa: ANN401 - the service's answer
        self._checks.append(Check("connection", "ok", f"{connection.place} answers"))
        headers = answer.get("ResponseMetadata", {}).get("HTTPHeaders", {})
        self._checks.append(clock(headers.get("date"), datetime.now(tz=UTC)))

    def _failed(self, name: str, failure: CommandFailure) -> None:
        found, _, fix = str(failure).partition("; ")
        self._checks.append(Check(name, "failed", found, fix))

    @staticmethod
    async def _account(connection: Connection) -> Any:  # noqa: ANN401 - the service's answer
        """Return the account's limits, None where that may not be asked or is not known."""
        try:
            async with connection.client(attempts=1) as client:
                try:
                    return await client.describe_limits()
                except ClientError:
                    return None
        except CommandFailure:
            return None

    async def _listed(self, connection: Connection) -> bool:
        async with connection.client(attempts=1) as client:
            listed = await client.list_shards(**connection.stream_argument)
        self._checks.append(Check("list shards", "ok", f"allowed, {len(listed['Shards']):,} on the first page"))
        return True

    def _print(self, checks: list[Check]) -> None:
        table = Table.grid(padding=(0, 2))
        for check in checks:
            sign, style = _SIGNS[check.status]
            table.add_row(check.name, Text(sign, style), check.found)
            if check.fix:
                table.add_row("", "", Text(check.fix, "bold"))
        results().print(table)


def _open_files_limit() -> int | None:
    try:
        import resource  # noqa: PLC0415 - Windows has none
    except ImportError:
        return None
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return None if limit == resource.RLIM_INFINITY else limit
