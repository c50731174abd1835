"""Records and results for the spool's tests."""

from kpl_core.durability.spool import SpooledRecord
from kpl_core.records.record_result import Attempt, RecordResult
from kpl_core.records.user_record import Tier

DELIVERED = RecordResult(True, "shardId-000000000000", "4957", (Attempt(True, None, None, 1.0, 1.5),))
THROTTLED = Attempt(False, "ProvisionedThroughputExceededException", "Rate exceeded", 1.0, 2.0)
EXPIRED = Attempt(False, "Expired", "Record expired", 3.0, 3.0)
INVALID = Attempt(False, "ValidationException", "1 validation error detected", 1.0, 2.0)


def failed(*attempts: Attempt) -> RecordResult:
    return RecordResult(False, None, None, attempts)


def spooled(
    number: int = 0, *, key: str = "key", data: bytes | None = None, tier: Tier = "normal", stream: str = "orders"
) -> SpooledRecord:
    """Return a record whose data is its number."""
    return SpooledRecord(
        stream=stream,
        partition_key=key,
        data=b"%d" % number if data is None else data,
        accepted_at=1_700_000_000.0,
        tier=tier,
    )
