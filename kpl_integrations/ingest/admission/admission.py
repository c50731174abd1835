"""Admit or reject a request's records as a whole, before any of them is put.

Every route calls `Admission`. It checks in this order: is the gateway open, is the stream's circuit breaker closed, is
the tenant within its share of the queue and within its rate, is there room. The rate is taken last and given back if
there is no room, so a rejected request costs none of it. All records are put in one synchronous step, so a client
that disconnects, or a cancelled task, changes nothing.
"""

import random
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import repeat
from typing import Any, Final, Literal, TypedDict, TypeVar, Unpack

from kpl_core import BufferFull, Deliveries, InvalidUserRecord, NotSpooled, Producer, ProducerClosed, UserRecord
from kpl_core.hooks import BreakerChanged, Fact
from kpl_core.producer.internal import GroupPut
from kpl_core.records.record_result import INTERNAL
from kpl_integrations.ingest.admission.refusals import (
    GRACE_SECONDS,
    SHORTEST_SAMPLE_SECONDS,
    DrainRate,
    Refusal,
    Refused,
    RetryAfterScheduler,
    over_cpu_share,
    over_queue_share,
    over_quota,
    spread_retry_after,
)
from kpl_integrations.ingest.admission.tenant_account import TenantAccount
from kpl_integrations.ingest.decoding.decoded import Pairs
from kpl_integrations.ingest.tenants import Tenant

AdmissionState = Literal["open", "draining", "closed"]
WHOLE_STREAM: Final = ""
# The number of user records in each record of a request; None: one in each.
Counts = Sequence[int] | None


class PutTerms(TypedDict, total=False):
    """How the records of a request are put; the defaults are True, True, False and None.

    They are aggregated unless `aggregate` or the tenant says otherwise. With `keep=False` they are in memory only, for
    clients that learn which records failed and send those again. With `durable` they are in the spool, or the request
    is refused. `counts` is the number of user records in each record, as the tenant's rate counts them; None: one in
    each.
    """

    aggregate: bool
    keep: bool
    durable: bool
    counts: Counts


# The share of the buffer that is used behind the fair queue, and the most a tenant may then send, as a multiple of
# the average rate; the strictest step first.
SHEDDING_STEPS: Final = ((0.85, 0.5), (0.6, 1.0))
_SHEDDER_INTERVAL_SECONDS: Final = 0.25
# If all active tenants sent at some rate and this took longer to fill the rest of the buffer, none is rejected for it.
_HARMLESS_SECONDS: Final = 60.0
# The producer's own codes in the words of a client. Others are Kinesis' own.
_CAUSES: Final = {INTERNAL: "no connection, or no valid answer in time"}

R = TypeVar("R")
# Why the producer accepts none of some records.
_NOT_PUT: Final = (BufferFull, NotSpooled, ProducerClosed, InvalidUserRecord)


class LoadShedder:
    """Reserve the last part of the buffer for tenants that offer little.

    The fair queue bounds each tenant's waiting records by the free room. Records behind the queue, on their way to
    many shards or to a service that does not answer, have no such bound: one tenant could fill the buffer with them.
    So while that part is large, tenants with a high rate for their weight are rejected first:

        more than 60 % of the buffer is behind the queue     tenants above the average rate are rejected
        more than 85 %                                       tenants above half the average rate are rejected

    Rates at which all of them would need a minute to fill the rest are never rejected: among those chance decides.
    """

    __slots__ = ("_accounts", "_averages", "_checked_at", "_enough", "_limit", "_most", "_producer")

    def __init__(self, producer: Producer, accounts: Iterable[TenantAccount], now: float) -> None:
        self._producer = producer
        self._accounts = accounts
        self._limit = limit = producer.buffer_limit
        # Free records and bytes. Above both, no step can be reached.
        used = SHEDDING_STEPS[-1][0]
        self._enough = (
            limit.outstanding_records + limit.free_records - used * limit.max_records,
            limit.outstanding_bytes + limit.free_bytes - used * limit.max_bytes,
        )
        # The step in force, and the highest allowed rate in records per second and weight; None is unlimited.
        self._averages: float | None = None
        self._most: float | None = None
        self._checked_at = now - _SHEDDER_INTERVAL_SECONDS

    def has_enough(self, records: int = 0, size_bytes: int = 0) -> bool:
        """Return True if no step can be reached, also with so many more records and bytes."""
        limit = self._limit
        enough_records, enough_bytes = self._enough
        return limit.free_records - records >= enough_records and limit.free_bytes - size_bytes >= enough_bytes

    @property
    def is_shedding(self) -> bool:
        """True if most of the buffer was behind the queue at the last look, so that a step is in force."""
        return self._averages is not None and not self.has_enough()

    def rejects(self, account: TenantAccount, now: float) -> bool:
        """Return True if the remaining room is reserved for tenants with lower rates than this one."""
        if self.has_enough():
            return False
        if now - self._checked_at >= _SHEDDER_INTERVAL_SECONDS:
            self._checked_at = now
            self._averages = self._step()
            self._most = None if self._averages is None else self._highest_rate(self._averages, now)
        return self._most is not None and account.records_per_second_and_weight(now) > self._most

    def _step(self) -> float | None:
        """Return the multiple of the average rate that is allowed now; None: the buffer has room for every rate."""
        limit = self._limit
        waiting = self._producer.waiting_by_flow().values()
        records = limit.outstanding_records - sum(each[0] for each in waiting)
        size_bytes = limit.outstanding_bytes - sum(each[1] for each in waiting)
        behind_queue = max(records / limit.max_records, size_bytes / limit.max_bytes)
        return next((averages for share, averages in SHEDDING_STEPS if behind_queue > share), None)

    def _highest_rate(self, averages: float, now: float) -> float | None:
        """Return the highest rate, in records a second for each unit of weight, at which a tenant may send now.

        It is this multiple of the average over the active tenants. None: none is active.
        """
        rates = [rate for each in self._accounts if (rate := each.records_per_second_and_weight(now)) > 0.0]
        if not rates:
            return None
        limit = self._limit
        mean_bytes = limit.outstanding_bytes / max(1, limit.outstanding_records)
        room = min(limit.free_records, limit.free_bytes / max(1.0, mean_bytes))
        return max(averages * sum(rates), room / _HARMLESS_SECONDS) / len(rates)


class Admission:
    """Admit and put records. Synchronous; each gateway has one, in the event loop of its producer."""

    def __init__(
        self,
        producer: Producer,
        accounts: Iterable[TenantAccount] = (),
        *,
        clock: Callable[[], float],
        chance: Callable[[], float] = random.random,
        breaker_seconds: float = 1.0,
        acknowledge: Callable[[int], object] | None = None,
    ) -> None:
        """Admit to this producer. `acknowledge` is called with the number of records of each admitted request."""
        self._producer = producer
        self._acknowledge = acknowledge
        self._clock = clock
        self._breaker_seconds = breaker_seconds
        # By stream, the code of the error that opened its circuit breaker.
        self._open_breakers: dict[str, str] = {}
        # With a spool that can store, an open circuit breaker is no reason to reject: the records are spilled to disk.
        self._spool = producer.spool_state
        self._drain_rate = DrainRate(clock())
        self._chance = chance
        self._room_schedule = RetryAfterScheduler(chance)
        self._load_shedder = LoadShedder(producer, accounts, clock())
        self.state: AdmissionState = "open"
        producer.internal.on_progress(self._progressed)

    def __call__(self, fact: Fact) -> None:
        """Remember the state of circuit breakers; a hook of the producer."""
        if isinstance(fact, BreakerChanged) and fact.shard_id == WHOLE_STREAM:
            if fact.state == "open":
                self._open_breakers[fact.stream] = fact.error_code
            else:
                self._open_breakers.pop(fact.stream, None)

    def now(self) -> float:
        """Return the time on the producer's clock."""
        return self._clock()

    def require_open(self) -> None:
        """Raise `Refused` if the gateway is closed."""
        if self.state == "closed":
            detail = "the gateway is shutting down and accepts no more records; none of this request was accepted"
            raise Refused(Refusal.DRAINING, detail)

    def over_cpu_share(self, tenant: Tenant | None) -> Refused:
        """Return the refusal of a request whose tenant has used more than its share of CPU time; None: unverified."""
        return over_cpu_share(tenant, retry_after=spread_retry_after(self._chance))

    def put_records(
        self,
        account: TenantAccount,
        stream: str,
        records: Sequence[UserRecord] | Pairs,
        **terms: Unpack[PutTerms],
    ) -> Deliveries:
        """Put all records for a tenant, or none. They are pairs only as in `put_pairs`.

        Raises:
            Refused: the request is rejected.
        """
        put = partial(self._producer.internal.put_together_nowait, stream, records, **_producer_terms(account, terms))
        return self._admitted(put, account, stream, records, **terms)

    def put_pairs(self, account: TenantAccount, stream: str, pairs: Pairs, size_bytes: int) -> None:
        """Put pairs of partition key and data as `put_records`, without deliveries.

        `size_bytes` is at least the size of their keys and data.
        All of them may have an explicit hash key as a third item. The tenant's tier must be normal, with aggregation
        (`TenantAccount.puts_pairs`).

        Raises:
            Refused: the request is rejected.
        """
        if not self.try_put_pairs(account, stream, pairs, size_bytes):
            put = partial(self._producer.internal.put_pairs_together_nowait, stream, pairs, flow=account.flow)
            self._admitted(put, account, stream, pairs)

    def try_put_pairs(self, account: TenantAccount, stream: str, pairs: Pairs, size_bytes: int) -> bool:
        """Put pairs, of several requests too, as `put_pairs`, if no check could refuse them. A quota could.

        Return False if nothing has happened.
        """
        if not self._must_admit(account, stream, len(pairs), size_bytes):
            return False
        try:
            self._producer.internal.put_pairs_together_nowait(stream, pairs, flow=account.flow)
        except _NOT_PUT:
            return False
        self._count_accepted(account, len(pairs), self._clock())
        return True

    def try_put_for_results(
        self, account: TenantAccount, stream: str, pairs: Pairs, size_bytes: int
    ) -> Deliveries | None:
        """Do the same, and return the deliveries, or None if nothing has happened."""
        if not self._must_admit(account, stream, len(pairs), size_bytes):
            return None
        try:
            deliveries = self._producer.internal.put_together_nowait(stream, pairs, flow=account.flow)
        except _NOT_PUT:
            return None
        self._count_accepted(account, len(pairs), self._clock())
        return deliveries

    def begin_group(
        self,
        account: TenantAccount,
        stream: str,
        records: Sequence[UserRecord] | Pairs,
        **terms: Unpack[PutTerms],
    ) -> GroupPut:
        """Take room for all records, or for none, as `put_records`. The caller puts the group."""
        put = partial(self._producer.internal.begin_group, stream, records, **_producer_terms(account, terms))
        return self._admitted(put, account, stream, records, **terms)

    def _admitted(
        self,
        put: Callable[[], R],
        account: TenantAccount,
        stream: str,
        records: Sequence[UserRecord] | Pairs,
        **terms: Unpack[PutTerms],
    ) -> R:
        """Make all checks, put the records, and count them."""
        now, counts = self._clock(), terms.get("counts")
        self._require_admission(account, stream, now, keep=terms.get("keep", True), records=len(records))
        if account.quota is not None:
            size_bytes = _bytes_of(records) if account.tenant.bytes_per_second is not None else 0
            self._require_quota(account, _user_records(records, counts), size_bytes, now)
        try:
            result = put()
        except _NOT_PUT as error:
            count, size_bytes = len(records), _bytes_of(records)
            if account.quota is not None:
                account.quota.give_back(_user_records(records, counts), size_bytes)
            raise self._not_put(account, count, size_bytes, error, now) from error
        account.quota_schedule.take_due(now)
        account.share_schedule.take_due(now)
        self._count_accepted(account, len(records), now)
        return result

    def _must_admit(self, account: TenantAccount, stream: str, count: int, size_bytes: int) -> bool:
        """Return True if no check could refuse so many records: only the producer could. A quota could too."""
        return (
            account.quota is None
            and not account.share_schedule.slots
            and self.state != "closed"
            and stream not in self._open_breakers
            and self._load_shedder.has_enough(count, size_bytes)
        )

    def _count_accepted(self, account: TenantAccount, count: int, now: float) -> None:
        account.count_accepted(count, now)
        if self._acknowledge is not None:
            self._acknowledge(count)

    def give_back(
        self,
        account: TenantAccount,
        records: Sequence[UserRecord] | Pairs,
        deliveries: Deliveries,
        counts: Counts = None,
    ) -> None:
        """Return the tenant's rate for those of its records that failed and are stored nowhere.

        Call it if the answer to a request says that its records were not delivered. `deliveries` are those of
        `records`, in the same order, and `counts` were those of the put.
        """
        if account.quota is None:
            return
        results = [delivery.peek() for delivery in deliveries]
        unused: Any = [
            (record, count)
            for record, result, count in zip(records, results, counts or repeat(1, len(results)), strict=True)
            if result is not None and not result.successful and result.kept is None
        ]
        account.quota.give_back(sum(count for _, count in unused), _bytes_of([record for record, _ in unused]))

    def _require_admission(self, account: TenantAccount, stream: str, now: float, *, keep: bool, records: int) -> None:
        """Make all checks except the tenant's rate, and the room for these records, which the producer checks."""
        self.require_open()
        is_critical = account.tenant.tier == "critical"
        can_spill = keep and self._spool is not None and self._spool.can_store
        if stream in self._open_breakers and not can_spill and not is_critical:
            code = self._open_breakers[stream]
            # A tenant learns the code alone: messages name endpoints and roles.
            cause = f"requests to Kinesis fail ({_CAUSES.get(code, code)})" if code else "requests to Kinesis fail"
            detail = f"the circuit breaker of stream {stream} is open, because {cause}"
            account.count_shed(records, now)
            raise Refused(Refusal.BREAKER_OPEN, detail, retry_after=self._breaker_seconds)
        if account.share_schedule.is_reserved(now) or (not is_critical and self._load_shedder.rejects(account, now)):
            raise self._over_queue_share(account, records, now)

    def _not_put(self, account: TenantAccount, count: int, size_bytes: int, error: Exception, now: float) -> Refused:
        """Return the refusal for an exception of the producer."""
        if isinstance(error, BufferFull):
            return self._buffer_full(account, count, size_bytes, error, now)
        if isinstance(error, NotSpooled):
            account.count_shed(count, now)
            return Refused(Refusal.NOT_SPOOLED, f"{error}; none of this request was accepted")
        if isinstance(error, ProducerClosed):
            reason = "is shutting down" if self._producer.failure is None else "has failed and must be restarted"
            return Refused(Refusal.DRAINING, f"the gateway {reason}; none of this request was accepted")
        # The stream's own record limit may be lower than the decoder's.
        return Refused(Refusal.BAD_RECORDS, str(error))

    @staticmethod
    def _require_quota(account: TenantAccount, count: int, size_bytes: int, now: float) -> None:
        quota, schedule = account.quota, account.quota_schedule
        assert quota is not None  # noqa: S101 - the caller checked
        quota.offer(count, size_bytes)
        if schedule.slots:
            schedule.reprice(quota.slowdown, now)
        is_reserved = bool(schedule.slots) and schedule.is_reserved(
            now, spare_seconds=quota.spare_seconds(count, size_bytes, now)
        )
        if not is_reserved and quota.try_take(count, size_bytes, now) is None:
            return
        states = quota.states(count, size_bytes, now)
        cost = quota.seconds_for(count, size_bytes)
        schedule.reprice(quota.slowdown, now)
        retry_after = schedule.assign(cost, ready_in=states[0].ready_in, now=now)
        quota.keep_until(now + retry_after + GRACE_SECONDS, now, booked_seconds=schedule.booked_seconds(now))
        raise over_quota(account.tenant, states, records=count, size_bytes=size_bytes, retry_after=retry_after)

    def _buffer_full(
        self, account: TenantAccount, count: int, size_bytes: int, full: BufferFull, now: float
    ) -> Refused:
        """Return the refusal for a full buffer: over the tenant's share, too large for the buffer, or no room."""
        limit = self._producer.buffer_limit
        # While load is shed, the tenants that fill the buffer are rejected before this: this one has found it full.
        if not self._load_shedder.is_shedding and limit.has_room(
            size_bytes=size_bytes, records=count, tier=account.tenant.tier
        ):
            return self._over_queue_share(account, count, now)
        if not limit.could_hold(size_bytes=size_bytes, records=count, tier=account.tenant.tier):
            # A retry could never succeed.
            detail = (
                f"the request has {count:,} records of {size_bytes:,} bytes, more than the whole buffer of the gateway "
                f"for tenant {account.tenant.id}; send fewer in a request"
            )
            return Refused(Refusal.TOO_LARGE, detail)
        seconds = self._drain_rate.seconds_for(count)
        wait = self._room_schedule.assign(seconds, ready_in=seconds, now=now)
        detail = (
            f"the gateway buffers {full.outstanding_records:,} records of {full.outstanding_bytes:,} bytes and has no "
            f"room for {count:,} more; none of this request was accepted"
        )
        return Refused(Refusal.NO_ROOM, detail, retry_after=wait)

    @staticmethod
    def _over_queue_share(account: TenantAccount, count: int, now: float) -> Refused:
        account.count_shed(count, now)
        seconds = account.admitted.seconds_for(count)
        retry_after = account.share_schedule.assign(seconds, ready_in=seconds, now=now)
        return over_queue_share(account.tenant, retry_after=retry_after)

    def _progressed(self) -> None:
        now = self._clock()
        if now - self._drain_rate.sampled_at >= SHORTEST_SAMPLE_SECONDS:
            report = self._producer.report()
            self._drain_rate.observe(report.accepted - report.buffered, now)


def _producer_terms(account: TenantAccount, terms: PutTerms) -> dict[str, Any]:
    """Return the keywords with which the producer gets records for this tenant."""
    return {
        "flow": account.flow,
        "tier": account.tenant.tier,
        "aggregate": terms.get("aggregate", True) and account.tenant.aggregation,
        "keep": terms.get("keep", True),
        "durable": terms.get("durable", False),
    }


def _user_records(records: Sequence[object], counts: Counts) -> int:
    return len(records) if counts is None else sum(counts)


def _bytes_of(records: Sequence[Any]) -> int:
    """Return the bytes of keys and data of user records, or of pairs."""
    if records and type(records[0]) is tuple:
        return sum([_key_bytes(each[0]) + len(each[1]) for each in records])
    return sum([_key_bytes(each.partition_key) + len(each.data) for each in records])


def _key_bytes(key: str) -> int:
    return len(key) if key.isascii() else len(key.encode())
