"""When a record expires: at its instant, and later in a place that may keep it longer."""

import pytest

from kpl_core.records.expiry import has_expired, split_expired
from tests.support.material import kinesis_record


@pytest.mark.parametrize(("now", "expired"), [(0.999, False), (1.0, True), (1.001, True)])
def test_a_record_has_expired_from_its_instant_on(now: float, *, expired: bool) -> None:
    assert has_expired(1.0, now) == expired


def test_expired_records_are_split_from_the_others_in_order() -> None:
    records = [kinesis_record() for _ in range(4)]
    for record, expires_at in zip(records, (3.0, 1.0, 2.5, 2.0), strict=True):
        record.expires_at = expires_at
    first, second, third, fourth = records
    assert split_expired(records, 2.0, extension_seconds=0.0) == ([second, fourth], [first, third])
    assert split_expired(records, 2.0, extension_seconds=0.5) == ([second], [first, third, fourth])
    assert split_expired(records, 3.5, extension_seconds=0.5) == (records, [])
    assert split_expired([], 2.0, extension_seconds=0.0) == ([], [])
