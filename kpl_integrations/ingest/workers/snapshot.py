"""What one worker tells the others of itself: its counts and metrics as plain values."""

from collections.abc import Iterable

import msgspec
from prometheus_client.metrics_core import Metric as Family

from kpl_integrations.gateway_figures import StatsDocument
from kpl_integrations.ingest.stats.totals import GatewayTotals
from kpl_integrations.ingest.workers.seat import Seat

__all__ = ["FamilySnapshot", "Snapshot", "decode_snapshot", "encode_snapshot", "snapshot_of"]

# Name, labels and value.
Sample = tuple[str, tuple[tuple[str, str], ...], float]


class FamilySnapshot(msgspec.Struct, frozen=True, array_like=True):
    """One metric; `kind` is Prometheus' word."""

    name: str
    kind: str
    meaning: str
    samples: list[Sample]


class Snapshot(msgspec.Struct, frozen=True, kw_only=True):
    """One worker in one life; `inherited` are the user records that its files held when it began.

    Of one that `takes` no requests the state says nothing of the gateway.
    """

    worker: int
    life: int
    process_id: int
    inherited: int
    stats: StatsDocument
    families: list[FamilySnapshot]
    takes: bool = True


def snapshot_of(totals: GatewayTotals, seat: Seat, *, process_id: int, inherited: int) -> Snapshot:
    """Return a worker's totals as it tells them."""
    return Snapshot(
        worker=seat.worker,
        life=seat.life,
        process_id=process_id,
        inherited=inherited,
        stats=totals.stats,
        families=_families(totals.families),
        takes=seat.takes,
    )


def _families(families: Iterable[Family]) -> list[FamilySnapshot]:
    return [
        FamilySnapshot(
            family.name,
            family.type,
            family.documentation,
            [(each.name, tuple(sorted(each.labels.items())), float(each.value)) for each in family.samples],
        )
        for family in families
    ]


def encode_snapshot(snapshot: Snapshot) -> bytes:
    """Return the bytes of its file."""
    return msgspec.json.encode(snapshot)


_decode = msgspec.json.Decoder(Snapshot).decode


def decode_snapshot(body: bytes) -> Snapshot:
    """Return the snapshot in a file.

    Raises:
        msgspec.DecodeError: it is none.
    """
    return _decode(body)
