"""Parse the tenants file (TOML) and the secrets that it names.

docs/howto/tenants.md and examples/ingest/tenants.toml describe its members.
"""

import os
import re
import stat
import tomllib
from collections.abc import Callable, Iterable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Final, get_args

import msgspec

from kpl_core import ConfigError
from kpl_core.options.validation import did_you_mean
from kpl_core.records.user_record import Tier
from kpl_integrations.ingest.tenants.credentials import ApiKeys, parse_stored_key
from kpl_integrations.ingest.tenants.tenant import UNKNOWN_TENANT, AccessKey, Ack, Signal, Tenant, shown

MOST_TENANTS: Final = 10_000
_LONGEST_SECRET: Final = 4096
# A quoted value in a message of msgspec or tomllib; a path such as `$.tenant[0].weight` is not a value.
_QUOTED: Final = re.compile(r"""([`'"])([^`'"$][^`'"]*)\1""")
_UNKNOWN_MEMBER: Final = re.compile(r"unknown field `([^`]*)`")
# The members with a choice of words, by the end of the path in msgspec's message, which does not name the words.
_CHOICES: Final = {"tier": get_args(Tier), "ack": get_args(Ack), "otlp": get_args(Signal)}


# What is shown of a reference to a secret, because it may be the secret itself, pasted: a variable of capital
# letters, an id as AWS makes them, and a file that exists, has an ending, or a short name in a folder that exists.
_VARIABLE: Final = re.compile(r"(?=.{1,24}\Z|.*_)[A-Z_][A-Z0-9_]{0,99}")
_ACCESS_KEY_ID: Final = re.compile(r"[A-Z0-9]{1,24}")
_FILE_ENDING: Final = re.compile(r"\.[a-z]{1,10}")
_LONGEST_NAME: Final = 24


class _SigV4Key(msgspec.Struct, forbid_unknown_fields=True):
    access_key_id: str
    secret_env: str | None = None
    secret_file: str | None = None
    session_token_env: str | None = None
    session_token_file: str | None = None
    expires_at: datetime | None = None


class _Share(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """The members of every tenant, and of [unknown]."""

    weight: float = 1.0
    tier: Tier = "normal"
    records_per_second: float | None = None
    bytes_per_second: float | None = None
    burst_seconds: float = 1.0
    streams: tuple[str, ...] = ("*",)
    ack: Ack | None = None
    aggregation: bool = True
    trace_records: bool = False
    otlp: dict[Signal, str] = {}


class _TenantEntry(_Share, forbid_unknown_fields=True, kw_only=True):
    id: str
    api_keys: list[str] = []
    sigv4: list[_SigV4Key] = []


class _TenantsFile(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    tenant: list[_TenantEntry] = []
    unknown: _Share | None = None
    otlp: dict[Signal, str] = {}


class SecretReference(msgspec.Struct, frozen=True):
    """The place of a secret that cannot be stored as a hash: an environment variable or a private file.

    `what` names the secret in error messages, which never contain the secret itself.
    """

    what: str
    variable: str | None
    file: Path | None

    def read(self, environment: Mapping[str, str]) -> str:
        """Return the secret.

        Raises:
            ConfigError: not exactly one place is given, it is empty, or other users may read the file.
        """
        if (self.variable is None) == (self.file is None):
            message = f"{self.what} is named by an environment variable and a file, or by neither; name one of them"
            raise ConfigError(message)
        if self.variable is not None:
            secret, place = (
                environment.get(self.variable, ""),
                f"environment variable {_shown(_VARIABLE, self.variable)}",
            )
        else:
            secret, place = self._file_text(), f"file {self.file}"
        if not secret:
            message = f"{self.what} is empty: {place} has no value; set it before the gateway starts"
            raise ConfigError(message)
        return secret

    def _file_text(self) -> str:
        assert self.file is not None  # noqa: S101 - the caller checked
        if not _is_shown(self.file):
            message = (
                f"{self.what} cannot be read: there is no such file, and its name is not shown because it may be the "
                f"secret itself; give the path of a file"
            )
            raise ConfigError(message)
        return read_checked(self.file, self.what, _require_private, most_bytes=_LONGEST_SECRET).strip()


def _shown(pattern: re.Pattern[str], value: str) -> str:
    return value if pattern.fullmatch(value) else f"(a name of {len(value)} characters, not shown: it may be a secret)"


def _is_shown(file: Path) -> bool:
    is_short = len(file.name) <= _LONGEST_NAME and file.parent.exists()
    return is_short or _FILE_ENDING.fullmatch(file.suffix) is not None or file.exists()


def read_checked(
    path: Path, what: str, require: Callable[[os.stat_result, str], None], *, most_bytes: int | None = None
) -> str:
    """Return the text of a file if `require` raises nothing for its status; `what` names it in messages.

    Raises:
        ConfigError: it cannot be read, is not a regular file or not UTF-8, has more than `most_bytes` bytes, or
            `require` refuses it.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        with open(descriptor, "rb") as opened:  # noqa: PTH123 - a descriptor, so that what is checked is what is read
            status = os.fstat(descriptor)
            _require_regular(status, f"{what} cannot be read from {path}")
            require(status, f"{what} is in {path}, whose mode {stat.S_IMODE(status.st_mode):04o}")
            text = opened.read(-1 if most_bytes is None else most_bytes + 1)
            _require_at_most(most_bytes, text, f"{what} cannot be read from {path}")
            return text.decode()
    except ConfigError:
        raise
    except (OSError, ValueError) as error:
        is_text = isinstance(error, UnicodeDecodeError)
        # A path that contains a NUL raises ValueError.
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8" if is_text else str(error)
        message = f"{what} cannot be read from {path}: {reason}"
        raise ConfigError(message) from None


def _require_regular(status: os.stat_result, cannot: str) -> None:
    if not stat.S_ISREG(status.st_mode):
        message = f"{cannot}: it is not a regular file"
        raise ConfigError(message)


def _require_at_most(most_bytes: int | None, text: bytes, cannot: str) -> None:
    if most_bytes is not None and len(text) > most_bytes:
        message = f"{cannot}: it has more than {most_bytes:,} bytes; give the file of one secret"
        raise ConfigError(message)


def _require_private(status: os.stat_result, found: str) -> None:
    """Raise ConfigError if others may read a secret.

    Its group may read it if root or this user owns it and the group is root's or one of this process: so are the
    secrets of Kubernetes with an fsGroup, and the credentials of systemd.
    """
    may_read_by_group = status.st_uid in {0, os.geteuid()} and _is_own_group(status.st_gid)
    if status.st_mode & (0o037 if may_read_by_group else 0o077):
        message = f"{found} lets other users read it; use chmod 600, or chmod 640 and a group of this process"
        raise ConfigError(message)


def require_not_writable_by_others(status: os.stat_result, found: str) -> None:
    """Raise ConfigError if others could change the file: they could give themselves access with it.

    Its group may change it if it is root's or the effective group: other users may be in a supplementary group.
    """
    if status.st_uid not in {0, os.geteuid()}:
        message = f"{found} lets its owner, user id {status.st_uid}, change it; use chown to root or the gateway's user"
        raise ConfigError(message)
    if status.st_mode & (0o002 if status.st_gid in {0, os.getegid()} else 0o022):
        message = f"{found} lets other users change it; use chmod 644"
        raise ConfigError(message)


def _is_own_group(group: int) -> bool:
    return group in {0, os.getegid(), *os.getgroups()}


class TenantTable:
    """The contents of the file at one time. It is immutable; each reload makes a new one."""

    __slots__ = ("access_keys", "api_keys", "secret_files", "tenants", "unknown")

    def __init__(
        self,
        tenants: Mapping[str, Tenant],
        *,
        unknown: Tenant | None,
        api_keys: ApiKeys,
        access_keys: Mapping[str, AccessKey],
        secret_files: tuple[Path, ...] = (),
    ) -> None:
        self.tenants = tenants
        self.unknown = unknown
        self.api_keys = api_keys
        self.access_keys = access_keys
        self.secret_files = secret_files

    def __repr__(self) -> str:
        """Show counts, but no secrets."""
        counts = f"{len(self.tenants)} tenants, {len(self.api_keys)} API keys, {len(self.access_keys)} SigV4 keys"
        return f"<TenantTable, {counts}>"


def parse_tenants(
    text: str, *, environment: Mapping[str, str], folder: Path, default_ack: Ack = "queued"
) -> TenantTable:
    """Return the tenants that `text` describes, and read their secrets; paths are relative to `folder`.

    Raises:
        ConfigError: it is not TOML, a member is unknown or out of its range, an id or key is repeated, a secret
            cannot be read, or no client could authenticate.
    """
    try:
        content = msgspec.convert(tomllib.loads(text), _TenantsFile)
    except msgspec.ValidationError as error:
        raise ConfigError(_without_keys(str(error)) + _suggestion(str(error))) from None
    except ValueError as error:
        # TOMLDecodeError, or Python's error for a number of thousands of digits.
        message = f"it is not TOML: {_without_keys(str(error))}"
        raise ConfigError(message) from None
    except RecursionError:
        message = "its values are nested too deep; flatten them"
        raise ConfigError(message) from None
    if len(content.tenant) > MOST_TENANTS:
        message = f"it has {len(content.tenant):,} tenants; a gateway serves at most {MOST_TENANTS:,}"
        raise ConfigError(message)
    tenants: dict[str, Tenant] = {}
    digests: list[tuple[bytes, Tenant]] = []
    access_keys: dict[str, AccessKey] = {}
    files: list[Path] = []
    for entry in content.tenant:
        tenant = _tenant(entry.id, entry, content.otlp, default_ack)
        if tenant.id in tenants or tenant.id == UNKNOWN_TENANT.id:
            message = f"tenant id {tenant.id} is repeated or reserved; give each tenant its own id"
            raise ConfigError(message)
        tenants[tenant.id] = tenant
        digests += [(_digest(stored, tenant), tenant) for stored in entry.api_keys]
        for key in _access_keys(entry.sigv4, tenant, environment, folder, files):
            if access_keys.setdefault(key.access_key_id, key) is not key:
                message = (
                    f"access_key_id {_shown(_ACCESS_KEY_ID, key.access_key_id)} of tenant {tenant.id} is repeated; "
                    f"make one for each tenant"
                )
                raise ConfigError(message)
    unknown = (
        None if content.unknown is None else _tenant(UNKNOWN_TENANT.id, content.unknown, content.otlp, default_ack)
    )
    if not digests and not access_keys and unknown is None:
        message = (
            "no client could authenticate: no tenant has api_keys or sigv4, and there is no [unknown]; "
            "run `kpl keys new`"
        )
        raise ConfigError(message)
    return TenantTable(
        tenants, unknown=unknown, api_keys=ApiKeys(digests), access_keys=access_keys, secret_files=tuple(files)
    )


def _suggestion(message: str) -> str:
    """Return what the parser's message lacks: the allowed values, or the member that was meant."""
    if message.startswith("Invalid enum value"):
        choices = _CHOICES.get(message.rstrip("`").rpartition(".")[2])
        return "" if choices is None else f"; it must be one of {', '.join(choices)}"
    unknown = _UNKNOWN_MEMBER.search(message)
    if unknown is None:
        return ""
    place = _Share if message.endswith("`$.unknown`") else _TenantEntry if "$.tenant" in message else _TenantsFile
    struct = _SigV4Key if "sigv4" in message else place
    return did_you_mean(unknown[1], struct.__struct_fields__)


def _without_keys(message: str) -> str:
    """Return a parser's message without quoted values that may be a key pasted at the wrong place."""
    return _QUOTED.sub(lambda quoted: shown(quoted[2], quoted[0]), message)


def _tenant(tenant_id: str, share: _Share, otlp: Mapping[Signal, str], default_ack: Ack) -> Tenant:
    return Tenant(
        id=tenant_id,
        weight=share.weight,
        tier=share.tier,
        records_per_second=share.records_per_second,
        bytes_per_second=share.bytes_per_second,
        burst_seconds=share.burst_seconds,
        streams=share.streams,
        default_ack=share.ack or default_ack,
        aggregation=share.aggregation,
        trace_records=share.trace_records,
        otlp_streams={**otlp, **share.otlp},
    )


def _digest(stored: str, tenant: Tenant) -> bytes:
    try:
        return parse_stored_key(stored)
    except ConfigError as error:
        message = f"api_keys of tenant {tenant.id}: {error}"
        raise ConfigError(message) from None


def _access_keys(
    entries: Iterable[_SigV4Key], tenant: Tenant, environment: Mapping[str, str], folder: Path, files: list[Path]
) -> Iterable[AccessKey]:
    for entry in entries:
        what = f"of access_key_id {_shown(_ACCESS_KEY_ID, entry.access_key_id)} of tenant {tenant.id}"
        secret = _reference(f"the secret {what}", entry.secret_env, entry.secret_file, folder, files).read(environment)
        token = None
        if entry.session_token_env is not None or entry.session_token_file is not None:
            named = f"the session token {what}"
            token = _reference(named, entry.session_token_env, entry.session_token_file, folder, files).read(
                environment
            )
        expires_at = None if entry.expires_at is None else _seconds_since_1970(entry.expires_at)
        yield AccessKey(entry.access_key_id, secret, tenant, token, expires_at)


def _reference(what: str, variable: str | None, file: str | None, folder: Path, files: list[Path]) -> SecretReference:
    path = None if file is None else folder / file
    if path is not None:
        files.append(path)
    return SecretReference(what, variable, path)


def _seconds_since_1970(at: datetime) -> float:
    # A time without an offset is UTC, as in AWS credentials.
    return (at if at.tzinfo is not None else at.replace(tzinfo=UTC)).timestamp()
