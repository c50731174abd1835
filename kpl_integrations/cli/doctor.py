"""`kpl doctor`: checks everything a producer needs, continues after a failed check, and says what to fix.

Limits are those of the Kinesis Data Streams developer guide, "Quotas and limits".
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Any, Final

from botocore.exceptions import ClientError
from rich.table import Table
from rich.text import Text

from kpl_core import COMPILED, Config
from kpl_core.options.validation import without_passwords
from kpl_integrations.cli.connection import REJECTED_CREDENTIALS, Connection, advice, require_named
from kpl_integrations.cli.doctor_parts import (
    Check,
    FoundConfiguration,
    Status,
    check_parts,
    check_settings,
    find_configuration,
)
from kpl_integrations.cli.exit_code import CommandFailure, ExitCode
from kpl_integrations.cli.options import endpoint_of_environment
from kpl_integrations.cli.terminal import print_json, results

# AWS rejects signatures with a clock difference of five minutes.
_CLOCK_FAILED_SECONDS: Final = 300
_CLOCK_WARNING_SECONDS: Final = 30
# Enough for the connections of a producer, the event loop, logs and the application.
_FEW_OPEN_FILES: Final = 256
_RECORDS_PER_SHARD: Final = 1_000
_DATA: Final = b"kpl doctor"
_STYLES: Final[dict[Status, str]] = {"ok": "green", "warning": "yellow", "failed": "bold red", "skipped": "dim"}
_NAMES: Final = (
    "configuration",
    "settings",
    "credentials",
    "connection",
    "stream",
    "shards",
    "list shards",
    "put",
    "clock",
    "open files",
    "hot path",
    "transport",
    "spool",
    "dead letters",
    "coordination",
)
# Of a gateway only.
_GATEWAY_NAMES: Final = ("tenants file", "certificate")


@dataclass
class DoctorCommand:
    """One run of the command."""

    stream: str
    endpoint_url: str | None
    region: str | None
    as_json: bool
    config_file: Path | None = None
    puts: bool = False
    _checks: list[Check] = field(init=False, default_factory=list)
    _current: str = field(init=False, default="configuration")
    # The producer's options with the region and the endpoint of the connection, once they are known.
    _producer: Config | None = field(init=False, default=None)

    async def run(self) -> ExitCode:
        """Run all checks; the status is 3 if one failed."""
        found = self._find_configuration()
        try:
            await self._check_service(Config() if found is None else found.config)
        except CommandFailure as failure:
            self._failed(self._current, failure)
        self._checks.append(check_open_files(_open_files_limit()))
        self._checks.append(check_hot_path(os.environ, is_compiled=COMPILED, direct_url=_direct_url()))
        if found is not None:
            self._checks += await check_parts(found, self._producer, puts=self.puts)
        known = {check.name: check for check in self._checks}
        names = _NAMES if found is None or found.settings is None else _NAMES + _GATEWAY_NAMES
        checks = [known.get(name, Check(name, "skipped", "an earlier check failed")) for name in names]
        is_ok = all(check.status != "failed" for check in checks)
        if self.as_json:
            print_json({"ok": is_ok, "stream": self.stream, "checks": checks})
        else:
            self._print(checks)
        return ExitCode.DONE if is_ok else ExitCode.UNUSABLE

    def _find_configuration(self) -> FoundConfiguration | None:
        try:
            found = find_configuration(self.config_file)
        except CommandFailure as failure:
            self._failed("settings", failure)
            return None
        self._checks.append(check_settings(found))
        return found

    def _failed(self, name: str, failure: CommandFailure) -> None:
        found, _, fix = str(failure).partition("; ")
        self._checks.append(Check(name, "failed", found, fix or "correct it"))

    async def _check_service(self, config: Config) -> None:
        """Check until something is missing that the next check needs; `_current` is then the check that fails."""
        require_named(self.stream)
        region, endpoint_url = self.region or config.region, self.endpoint_url
        if config.endpoint_url is not None and endpoint_url in {None, endpoint_of_environment()}:
            # The environment of any AWS client comes after the configuration.
            endpoint_url = config.endpoint_url
        connection = await Connection.resolved(self.stream, region=region, endpoint_url=endpoint_url)
        self._producer = replace(config, region=connection.region, endpoint_url=connection.endpoint_url)
        self._checks.append(check_region(connection.place, os.environ, is_given=region is not None))
        self._current = "credentials"
        # The source of the credentials, never the credentials.
        self._checks.append(Check("credentials", "ok", f"found ({await _fetched_credentials(connection)})"))
        self._current = "connection"
        async with connection.client(attempts=1) as client:
            try:
                answer = await client.describe_stream_summary(**connection.stream_argument)
            except ClientError as error:
                # An error from Kinesis shows that the connection works.
                self._answered(connection, error.response)
                code = error.response.get("Error", {}).get("Code", "")
                self._current = "credentials" if advice(code) == REJECTED_CREDENTIALS else "stream"
                raise
            self._answered(connection, answer)
            summary = answer["StreamDescriptionSummary"]
            self._checks.append(check_stream(summary))
            self._current = "shards"
            try:
                account = await client.describe_limits()
            except ClientError:
                account = None  # no permission, or the service does not know the account's limits
            self._checks.append(check_shards(summary.get("OpenShardCount", 0), account))
            self._current = "list shards"
            listed = await client.list_shards(**connection.stream_argument)
            self._checks.append(Check("list shards", "ok", f"allowed, {len(listed['Shards']):,} on the first page"))
            if not self.puts:
                self._checks.append(Check("put", "skipped", "it would write a record; --put does"))
                return
            self._current = "put"
            await client.put_record(**connection.stream_argument, Data=_DATA, PartitionKey="kpl doctor")
            self._checks.append(Check("put", "ok", f"allowed, one record of {len(_DATA)} bytes written"))

    def _answered(self, connection: Connection, answer: Any) -> None:  # noqa: ANN401 - the service's answer
        self._checks.append(Check("connection", "ok", f"{connection.place} answers"))
        headers = answer.get("ResponseMetadata", {}).get("HTTPHeaders", {})
        self._checks.append(check_clock(headers.get("date"), datetime.now(tz=UTC)))

    def _print(self, checks: list[Check]) -> None:
        table = Table.grid(padding=(0, 2))
        for check in checks:
            table.add_row(check.name, Text(check.status, _STYLES[check.status]), check.found)
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


async def _fetched_credentials(connection: Connection) -> str:
    """Return where the credentials come from, after fetching them.

    Raises:
        CommandFailure: there are none, or they cannot be fetched.
    """
    source = "in AWS' configuration"
    try:
        credentials = await connection.session.get_credentials()
        if credentials is not None:
            source = credentials.method or "given"
            # Those of a role are fetched only now, for example from STS.
            await credentials.get_frozen_credentials()
    except Exception as error:
        kind, text = type(error).__name__, without_passwords(" ".join(str(error).split()))
        fix = "check the network to where they come from, such as STS, and AWS_PROFILE"
        if "sso" in kind.lower():
            fix = "run `aws sso login`, and check AWS_PROFILE"
        message = f"found ({source}), and cannot be fetched: {kind}: {text}; {fix}"
        raise CommandFailure(message) from error
    if credentials is None:
        message = f"no AWS credentials found; {advice('NoCredentials')}"
        raise CommandFailure(message)
    return source


def _direct_url() -> str | None:
    """Return pip's note of where the distribution came from (PEP 610), "" for an index, None if it is not installed."""
    try:
        return distribution("kpl-integrations").read_text("direct_url.json") or ""
    except PackageNotFoundError:
        return None


def check_hot_path(environment: Mapping[str, str], *, is_compiled: bool, direct_url: str | None) -> Check:
    """Say whether the kernels in C run, and if not, why."""
    if is_compiled:
        return Check("hot path", "ok", "kernels in C")
    if environment.get("KPL_KERNELS", "").strip() == "off":
        why = "KPL_KERNELS=off turns the kernels in C off"
    elif direct_url is None:
        why = "these are sources that were not installed"
    elif '"editable": true' in direct_url:
        why = "an editable installation compiles nothing"
    elif "dir_info" in direct_url or "vcs_info" in direct_url:
        why = "it was installed from sources without a C compiler or without Python.h"
    else:
        why = "the installed wheel is the pure one, as where no compiled one fits this Python and platform"
    return Check("hot path", "ok", f"kernels in Python: {why}")


def check_region(place: str, environment: Mapping[str, str], *, is_given: bool) -> Check:
    """Reject an empty region. The commands replace it for a Kinesis on this machine, and producers do not."""
    if environment.get("AWS_DEFAULT_REGION") == "" and not is_given:
        fix = "set it to a region, such as eu-west-1, or unset it"
        return Check("configuration", "failed", f"{place}; AWS_DEFAULT_REGION is empty", fix)
    return Check("configuration", "ok", place)


def check_clock(answered: str | None, now: datetime) -> Check:
    """Compare this machine's clock with the `Date` header of an answer."""
    try:
        service = None if answered is None else parsedate_to_datetime(answered)
    except ValueError:
        service = None
    if service is None or service.tzinfo is None:
        return Check("clock", "skipped", "the service sends no time")
    seconds = (now - service).total_seconds()
    found = f"{abs(seconds):.0f} s {'ahead of' if seconds > 0 else 'behind'} the service"
    fix = "synchronise the clock of this machine (NTP, chrony)"
    if abs(seconds) >= _CLOCK_FAILED_SECONDS:
        return Check("clock", "failed", found, f"{fix}: AWS rejects signatures that are five minutes off")
    if abs(seconds) >= _CLOCK_WARNING_SECONDS:
        return Check("clock", "warning", found, fix)
    return Check("clock", "ok", "within a few seconds of the service")


def check_stream(summary: Mapping[str, Any]) -> Check:
    """Check the answer of DescribeStreamSummary."""
    status = summary.get("StreamStatus", "UNKNOWN")
    mode = summary.get("StreamModeDetails", {}).get("StreamMode", "PROVISIONED").lower().replace("_", "-")
    record_kib = summary.get("MaxRecordSizeInKiB", 1_024)
    encryption = summary.get("EncryptionType", "NONE")
    found = f"{status}, {mode}, records of {record_kib:,} KiB at most, encryption {encryption}"
    if status == "UPDATING":
        return Check("stream", "warning", found, "it accepts records; its shards are changing")
    if status != "ACTIVE":
        return Check("stream", "failed", found, "wait until it is ACTIVE, or create it")
    return Check("stream", "ok", found)


def check_shards(open_shards: int, account: Mapping[str, Any] | None) -> Check:
    """Report the capacity of the shards, and check the account's shard quota (None: unknown)."""
    found = (
        f"{open_shards:,} open, together {open_shards * _RECORDS_PER_SHARD:,} records and {open_shards} MiB a second"
    )
    if account is None:
        return Check("shards", "ok", found)
    limit, used = account.get("ShardLimit", 0), account.get("OpenShardCount", 0)
    found += f"; the account uses {used:,} of {limit:,}"
    if used >= limit:
        return Check("shards", "warning", found, "no shard can be added or split; ask AWS to raise the shard quota")
    return Check("shards", "ok", found)


def check_open_files(limit: int | None) -> Check:
    """Check the limit of open files and connections of this process (None: no limit)."""
    if limit is None:
        return Check("open files", "ok", "no limit")
    found = f"{limit:,} at most"
    if limit < _FEW_OPEN_FILES:
        return Check("open files", "warning", found, f"raise it, for example with `ulimit -n {4 * _FEW_OPEN_FILES}`")
    return Check("open files", "ok", found)
