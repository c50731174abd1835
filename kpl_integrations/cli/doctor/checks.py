"""What `kpl doctor` looks at, one function for each, and what it says about each; pure.

Limits are those of the Kinesis Data Streams developer guide, Quotas and limits.
"""

from collections.abc import Mapping
from datetime import datetime
from email.utils import parsedate_to_datetime
from typing import Any, Final, Literal

import msgspec

__all__ = ["Check", "Status", "clock", "open_files", "shards", "stream"]

Status = Literal["ok", "warning", "failed", "skipped"]

# AWS refuses signatures that are five minutes off.
_CLOCK_REFUSED_SECONDS: Final = 300
_CLOCK_WARNING_SECONDS: Final = 30
# One producer's connections, the loop's own, logs and the application's.
_FEW_OPEN_FILES: Final = 256
_RECORDS_PER_SHARD: Final = 1_000


class Check(msgspec.Struct, frozen=True):
    """What was looked at, what was found, and what to do about it (empty if nothing is)."""

    name: str
    status: Status
    found: str
    fix: str = ""


def clock(answered: str | None, now: datetime) -> Check:
    """Compare this machine's clock with the `Date` header of an answer."""
    try:
        service = None if answered is None else parsedate_to_datetime(answered)
    except ValueError:
        service = None
    if service is None or service.tzinfo is None:
        return Check("clock", "skipped", "the service does not say what time it is")
    seconds = (now - service).total_seconds()
    found = f"{abs(seconds):.0f} s {'ahead of' if seconds > 0 else 'behind'} the service"
    fix = "synchronise the clock of this machine (NTP, chrony)"
    if abs(seconds) >= _CLOCK_REFUSED_SECONDS:
        return Check("clock", "failed", found, f"{fix}: AWS refuses signatures that are five minutes off")
    if abs(seconds) >= _CLOCK_WARNING_SECONDS:
        return Check("clock", "warning", found, fix)
    return Check("clock", "ok", "within a few seconds of the service")


def stream(summary: Mapping[str, Any]) -> Check:
    """Judge what DescribeStreamSummary says of the stream."""
    status = summary.get("StreamStatus", "UNKNOWN")
    mode = summary.get("StreamModeDetails", {}).get("StreamMode", "PROVISIONED").lower().replace("_", "-")
    record_kib = summary.get("MaxRecordSizeInKiB", 1_024)
    encryption = summary.get("EncryptionType", "NONE")
    found = f"{status}, {mode}, records of {record_kib:,} KiB at most, encryption {encryption}"
    if status == "UPDATING":
        return Check("stream", "warning", found, "records are taken meanwhile; its shards change")
    if status != "ACTIVE":
        return Check("stream", "failed", found, "wait until it is ACTIVE, or create it")
    return Check("stream", "ok", found)


def shards(open_shards: int, account: Mapping[str, Any] | None) -> Check:
    """Say what the shards take, and judge how many more the account may have (None: nobody would say)."""
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


def open_files(limit: int | None) -> Check:
    """Judge how many files and connections this process may have open (None: the system has no such limit)."""
    if limit is None:
        return Check("open files", "ok", "no limit")
    found = f"{limit:,} at most"
    if limit < _FEW_OPEN_FILES:
        return Check("open files", "warning", found, f"raise it, such as by `ulimit -n {4 * _FEW_OPEN_FILES}`")
    return Check("open files", "ok", found)
