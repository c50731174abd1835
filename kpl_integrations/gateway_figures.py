"""The figures in a gateway's `/v1/stats`, as the gateway writes them and whoever asks it over HTTP reads them."""

import msgspec

__all__ = ["RecordStats", "Room", "StreamStats", "TenantStats", "WorkerStats"]


class TenantStats(msgspec.Struct, frozen=True, kw_only=True):
    """One tenant: what it asked for, what was taken, what of it waits in the fair queue."""

    requests: int = 0
    accepted_records: int = 0
    waiting_records: int = 0
    waiting_bytes: int = 0
    refused: dict[str, int] = {}


class RecordStats(msgspec.Struct, frozen=True, kw_only=True):
    """Where all user records are; `accepted` is the sum of the others, bytes left out.

    `lost` are those that a worker had accepted when it died and that were not found in its spool.
    """

    accepted: int = 0
    delivered: int = 0
    failed: dict[str, int] = {}
    spooled: int = 0
    dead_lettered: int = 0
    buffered: int = 0
    buffered_bytes: int = 0
    lost: int = 0


class Room(msgspec.Struct, frozen=True, kw_only=True):
    """How much of the buffer is taken."""

    outstanding_records: int = 0
    max_records: int = 0
    outstanding_bytes: int = 0
    max_bytes: int = 0


class StreamStats(msgspec.Struct, frozen=True, kw_only=True):
    """One stream, in user records; `breakers` by shard, "" being the whole stream's."""

    accepted: int = 0
    delivered: int = 0
    failed: int = 0
    waiting: int = 0
    in_flight: int = 0
    buffered: int = 0
    breakers: dict[str, str] = {}


class WorkerStats(msgspec.Struct, frozen=True, kw_only=True):
    """One of several processes; `deaths` are those of its predecessors."""

    process_id: int
    state: str
    deaths: int = 0
    accepted: int = 0
    requests: int = 0
