"""The door itself: whether a request's records are taken, decided whole before any of them is put.

Every route comes through here, in this order: is the door open, does the tenant's rate allow it, is there room.
What is put is put in one step, so that a client that goes away, or a task that is cancelled, changes nothing.
"""

import random
from collections.abc import Callable, Iterable, Sequence
from typing import Final, Literal, TypeVar

from kpl_core import BufferFull, Delivery, Fact, InvalidUserRecord, Producer, ProducerClosed, UserRecord
from kpl_core.hooks import BreakerChanged
from kpl_integrations.ingest.admission.account import TenantAccount
from kpl_integrations.ingest.admission.admission import Refusal, Refused
from kpl_integrations.ingest.admission.body_room import BodyRoom
from kpl_integrations.ingest.admission.last_room import LastRoom
from kpl_integrations.ingest.admission.rate_limit_headers import QUEUE_SHARE, queue_share_headers, rate_limit_headers
from kpl_integrations.ingest.admission.return_slots import DrainRate, ReturnSlots

__all__ = ["Intake", "IntakeState"]

IntakeState = Literal["open", "draining", "closed"]
WHOLE_STREAM: Final = ""

T = TypeVar("T")


class Intake:
    """Decides and puts. Synchronous; one for each gateway, in its producer's loop."""

    def __init__(
        self,
        producer: Producer,
        accounts: Iterable[TenantAccount] = (),
        *,
        clock: Callable[[], float],
        chance: Callable[[], float] = random.random,
        breaker_seconds: float = 1.0,
        bodies: BodyRoom | None = None,
    ) -> None:
        self._producer = producer
        self._clock = clock
        self._breaker_seconds = breaker_seconds
        self._open_breakers: set[str] = set()
        # With a spool a stream that does not answer is no reason to refuse: the spool takes what it cannot.
        self._spools = producer.config.spool is not None
        self._drain = DrainRate(clock())
        self._room_slots = ReturnSlots(chance)
        self._last_room = LastRoom(producer, accounts, clock())
        self.state: IntakeState = "open"
        # What is on its way to the door, of all clients.
        self.bodies = BodyRoom() if bodies is None else bodies
        producer.on_progress(self._progressed)

    def __call__(self, fact: Fact) -> None:
        """Take note of a breaker's change; a hook of the producer."""
        if isinstance(fact, BreakerChanged) and fact.shard_id == WHOLE_STREAM:
            (self._open_breakers.add if fact.state == "open" else self._open_breakers.discard)(fact.stream)

    def now(self) -> float:
        """Return the instant, on the producer's clock."""
        return self._clock()

    def require_open(self) -> None:
        """Raise `Refused` once the intake is closed."""
        if self.state == "closed":
            detail = "the gateway is shutting down and takes no more records; nothing of this request was kept"
            raise Refused(Refusal.DRAINING, detail)

    def take(
        self,
        account: TenantAccount,
        stream: str,
        records: Sequence[UserRecord],
        *,
        aggregate: bool = True,
        keep: bool = True,
    ) -> list[Delivery]:
        """Put all records for a tenant, or none; without `aggregate`, or if the tenant wants none, each alone.

        Without `keep` they are in memory alone: for a client that is told what failed, and sends that again.

        Raises:
            Refused: why not, and when to come back.
        """
        now = self._clock()
        self._require_admission(account, stream, records, _bytes_of_records, now, keep=keep)
        tenant = account.tenant
        try:
            deliveries = self._producer.put_together_nowait(
                stream,
                records,
                flow=account.flow,
                tier=tenant.tier,
                aggregate=aggregate and tenant.aggregation,
                keep=keep,
            )
        except (BufferFull, ProducerClosed, InvalidUserRecord) as error:
            raise self._not_put(account, len(records), _bytes_of_records(records), error, now) from error
        _count(account, len(records), now)
        return deliveries

    def take_pairs(self, account: TenantAccount, stream: str, pairs: Sequence[tuple[str, bytes]]) -> None:
        """Put pairs of partition key and data as `take` does its records, for a caller who wants no deliveries.

        The tenant's tier is normal, and it wants aggregation.

        Raises:
            Refused: why not, and when to come back.
        """
        now = self._clock()
        self._require_admission(account, stream, pairs, _bytes_of_pairs, now)
        try:
            self._producer.put_pairs_together_nowait(stream, pairs, flow=account.flow)
        except (BufferFull, ProducerClosed, InvalidUserRecord) as error:
            raise self._not_put(account, len(pairs), _bytes_of_pairs(pairs), error, now) from error
        _count(account, len(pairs), now)

    def _require_admission(
        self,
        account: TenantAccount,
        stream: str,
        records: Sequence[T],
        bytes_of: Callable[[Sequence[T]], int],
        now: float,
        *,
        keep: bool = True,
    ) -> None:
        """Check all that does not depend on the room for exactly these records."""
        self.require_open()
        if account.quota is not None:
            size_bytes = bytes_of(records) if account.tenant.bytes_per_second is not None else 0
            self._require_quota(account, len(records), size_bytes, now)
        is_critical = account.tenant.tier == "critical"
        if stream in self._open_breakers and not (self._spools and keep) and not is_critical:
            detail = f"the circuit breaker of stream {stream} is open: Kinesis does not take its records"
            raise Refused(Refusal.BREAKER_OPEN, detail, retry_after=self._breaker_seconds)
        if (account.share_slots and account.share_slots.keeps_out(now)) or (
            not is_critical and self._last_room.is_for_others(account, now)
        ):
            raise self._over_share(account, len(records), now)

    def _not_put(self, account: TenantAccount, count: int, size_bytes: int, error: Exception, now: float) -> Refused:
        """Return the refusal for what the producer raised."""
        if isinstance(error, BufferFull):
            return self._full(account, count, size_bytes, error, now)
        if isinstance(error, ProducerClosed):
            detail = "the gateway is shutting down; nothing of this request was kept"
            return Refused(Refusal.DRAINING, detail)
        # The stream's own record limit may be lower than what the decoder was told.
        return Refused(Refusal.BAD_RECORDS, str(error))

    @staticmethod
    def _require_quota(account: TenantAccount, count: int, size_bytes: int, now: float) -> None:
        quota = account.quota
        assert quota is not None  # noqa: S101 - the caller asked
        quota.offer(count, size_bytes)
        cost = account.seconds_of_quota(count, size_bytes)
        wait: float | None = 0.0
        if not account.slots or not account.slots.keeps_out(now, spare_seconds=account.quota_seconds(now) - cost):
            wait = quota.try_take(count, size_bytes, now)
        if wait is None:
            return
        retry_after = account.slots.next_slot(cost, ready_in=wait, now=now)
        states = quota.states(count, size_bytes, now)
        wanted = {"records": count, "bytes": size_bytes}
        violated = [state.name for state in states if state.remaining < wanted[state.name]]
        tenant = account.tenant
        rates = ", ".join(
            f"{rate:,.10g} {unit} a second"
            for rate, unit in ((tenant.records_per_second, "records"), (tenant.bytes_per_second, "bytes"))
            if rate is not None
        )
        said = "1 record is" if count == 1 else f"{count:,} records are"
        detail = f"{said} more than tenant {tenant.id} may send now; it has {rates}"
        raise Refused(
            Refusal.QUOTA,
            detail,
            retry_after=retry_after,
            # None: there would be enough, but it is promised to those who were told to come back.
            extensions={"violated-policies": violated} if violated else None,
            headers=rate_limit_headers(states, retry_after_seconds=retry_after),
        )

    def _full(self, account: TenantAccount, count: int, size_bytes: int, full: BufferFull, now: float) -> Refused:
        """Say whose bound it was, and when there will be room."""
        limit = self._producer.buffer_limit
        if limit.has_room(size_bytes=size_bytes, records=count, tier=account.tenant.tier):
            return self._over_share(account, count, now)
        if not limit.could_hold(size_bytes=size_bytes, records=count, tier=account.tenant.tier):
            # Told to come back, it would for ever.
            detail = (
                f"the request has {count:,} records of {size_bytes:,} bytes, more than the gateway can ever hold at "
                f"once for tenant {account.tenant.id}; send fewer in a request"
            )
            return Refused(Refusal.TOO_LARGE, detail)
        seconds = self._drain.seconds_for(count)
        wait = self._room_slots.next_slot(seconds, ready_in=seconds, now=now)
        detail = (
            f"the gateway holds {full.outstanding_records:,} records of {full.outstanding_bytes:,} bytes and has no "
            f"room for {count:,} more; nothing of this request was kept"
        )
        return Refused(Refusal.NO_ROOM, detail, retry_after=wait)

    @staticmethod
    def _over_share(account: TenantAccount, count: int, now: float) -> Refused:
        seconds = account.admitted.seconds_for(count)
        wait = account.share_slots.next_slot(seconds, ready_in=seconds, now=now)
        tenant = account.tenant.id
        detail = f"tenant {tenant} has used up its share of the queue: its records come faster than they leave"
        return Refused(
            Refusal.QUEUE_SHARE,
            detail,
            retry_after=wait,
            extensions={"violated-policies": [QUEUE_SHARE]},
            headers=queue_share_headers(wait),
        )

    def _progressed(self) -> None:
        now = self._clock()
        if self._drain.wants_sample(now):
            report = self._producer.report()
            self._drain.observe(report.accepted - report.buffered, now)


def _count(account: TenantAccount, records: int, now: float) -> None:
    account.accepted_records += records
    if account.admitted.wants_sample(now):
        account.admitted.observe(account.accepted_records, now)


def _bytes_of_records(records: Sequence[UserRecord]) -> int:
    return sum([len(record.data) + _key_bytes(record.partition_key) for record in records])


def _bytes_of_pairs(pairs: Sequence[tuple[str, bytes]]) -> int:
    return sum([_key_bytes(key) + len(data) for key, data in pairs])


def _key_bytes(key: str) -> int:
    return len(key) if key.isascii() else len(key.encode())
