"""`kpl doctor`: checks everything a producer needs, continues after a failed check, and says what to fix.

Limits are those of the Kinesis Data Streams developer guide, "Quotas and limits".
"""

import os
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from importlib.metadata import PackageNotFoundError, distribution
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final, Literal, get_args

import msgspec
from botocore.exceptions import ClientError
from rich.table import Table
from rich.text import Text

from kpl_core import COMPILED, ConfigError
from kpl_core.options.config import WirePath
from kpl_integrations.cli.connection import REJECTED_CREDENTIALS, Connection, advice, require_named
from kpl_integrations.cli.exit_code import CommandFailure, ExitCode
from kpl_integrations.cli.terminal import print_json, results

Status = Literal["ok", "warning", "failed", "skipped"]

# AWS rejects signatures with a clock difference of five minutes.
_CLOCK_FAILED_SECONDS: Final = 300
_CLOCK_WARNING_SECONDS: Final = 30
# Enough for the connections of a producer, the event loop, logs and the application.
_FEW_OPEN_FILES: Final = 256
_RECORDS_PER_SHARD: Final = 1_000
_STYLES: Final[dict[Status, str]] = {"ok": "green", "warning": "yellow", "failed": "bold red", "skipped": "dim"}
_NAMES: Final = (
    "configuration",
    "credentials",
    "connection",
    "stream",
    "shards",
    "list shards",
    "clock",
    "open files",
    "hot path",
    "wire path",
)


class Check(msgspec.Struct, frozen=True):
    """The result of one check: `found` describes it, `fix` says what to do (empty if there is nothing to do)."""

    name: str
    status: Status
    found: str
    fix: str = ""


@dataclass
class DoctorCommand:
    """One run of the command."""

    stream: str
    endpoint_url: str | None
    region: str | None
    as_json: bool
    _checks: list[Check] = field(init=False, default_factory=list)
    _current: str = field(init=False, default="configuration")

    async def run(self) -> ExitCode:
        """Run all checks; the status is 3 if one failed."""
        try:
            await self._check_service()
        except CommandFailure as failure:
            found, _, fix = str(failure).partition("; ")
            self._checks.append(Check(self._current, "failed", found, fix))
        self._checks.append(check_open_files(_open_files_limit()))
        self._checks.append(check_hot_path(os.environ, is_compiled=COMPILED, direct_url=_direct_url()))
        self._checks.append(check_wire_path(os.environ, has_cbor=find_spec("cbor2") is not None))
        known = {check.name: check for check in self._checks}
        checks = [known.get(name, Check(name, "skipped", "an earlier check failed")) for name in _NAMES]
        certificate = check_certificate(os.environ, time.time())
        checks += [] if certificate is None else [certificate]
        is_ok = all(check.status != "failed" for check in checks)
        if self.as_json:
            print_json({"ok": is_ok, "stream": self.stream, "checks": checks})
        else:
            self._print(checks)
        return ExitCode.DONE if is_ok else ExitCode.UNUSABLE

    async def _check_service(self) -> None:
        """Check until something is missing that the next check needs; `_current` is then the check that fails."""
        require_named(self.stream)
        connection = await Connection.resolved(self.stream, region=self.region, endpoint_url=self.endpoint_url)
        self._checks.append(check_region(connection.place, os.environ, is_given=self.region is not None))
        self._current = "credentials"
        credentials = await connection.session.get_credentials()
        if credentials is None:
            message = f"no AWS credentials found; {advice('NoCredentials')}"
            raise CommandFailure(message)
        # The source of the credentials, never the credentials.
        self._checks.append(Check("credentials", "ok", f"found ({credentials.method or 'given'})"))
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


def check_wire_path(environment: Mapping[str, str], *, has_cbor: bool) -> Check:
    """Say how producers and gateways with this environment encode their requests."""
    # A gateway refuses spaces around the value, a producer ignores them.
    producers, gateways = environment.get("KPL_WIRE_PATH", "").strip(), environment.get("KPL_INGEST_WIRE_PATH", "")
    values = {"KPL_WIRE_PATH": producers, "KPL_INGEST_WIRE_PATH": gateways}
    given = {name: value for name, value in values.items() if value}
    found = ", ".join(f"{name}={value}" for name, value in given.items())
    if wrong := [name for name, value in given.items() if value not in get_args(WirePath)]:
        return Check("wire path", "failed", found, f"set {' and '.join(wrong)} to {', '.join(get_args(WirePath))}")
    if not has_cbor and "=cbor" in found:
        return Check("wire path", "failed", found, "CBOR needs cbor2: pip install 'kpl-integrations[cbor]'")
    return Check("wire path", "ok", found or "JSON, by the producer's own encoder")


def check_certificate(environment: Mapping[str, str], now: float) -> Check | None:
    """Check the TLS files of a gateway with this environment, if it names any; `now` is in seconds since 1970."""
    files = [environment.get(f"KPL_INGEST_TLS_{name}", "") for name in ("CERTIFICATE", "KEY")]
    if not all(files):
        return None
    try:
        # Importing the gateway takes 0.3 s, and it is an extra.
        from kpl_integrations.ingest.http.certificate import ServerCertificate, instant_text  # noqa: PLC0415
    except ImportError as error:
        return Check("certificate", "failed", f"{error.name} is missing", "pip install 'kpl-integrations[ingest]'")
    try:
        validity = ServerCertificate(Path(files[0]), Path(files[1])).validity
    except ConfigError as error:
        found, _, fix = str(error).partition("; ")
        return Check("certificate", "failed", found, fix)
    problem = validity.problem(now)
    if problem is None:
        return Check("certificate", "ok", f"valid until {instant_text(validity.not_after)}")
    status: Status = "failed" if now >= validity.not_after or now < validity.not_before else "warning"
    return Check("certificate", status, problem, "replace both files; a running gateway reads them again by itself")


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
