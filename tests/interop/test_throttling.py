"""A shard takes 1,000 records and 1 MiB a second: the producer is throttled, tries again and loses nothing."""

from collections.abc import Callable
from functools import partial
from itertools import count
from typing import Any

import pytest

from kpl_core import RecordResult
from tests.interop.consumers.user_records import Deaggregate, as_the_kcl_keeps_them
from tests.interop.emulators import ABILITIES, Emulator
from tests.interop.ledger import Ledger
from tests.interop.material import numbered
from tests.interop.production import assert_all_delivered, assert_delivered_where_told, produce, produce_during
from tests.interop.streams import Stream

NewStream = Callable[..., Stream]

THROTTLING = [name for name, abilities in ABILITIES.items() if abilities.throttles]
UNLIMITED: dict[str, Any] = {"rate_limit_records_per_sec_per_shard": 1e6, "rate_limit_bytes_per_sec_per_shard": 1e9}

pytestmark = pytest.mark.parametrize("emulator", THROTTLING, indirect=True)


def throttled(results: list[RecordResult]) -> int:
    """Return how many attempts were throttled."""
    return sum(
        attempt.error_code == "ProvisionedThroughputExceededException"
        for result in results
        for attempt in result.attempts
    )


@pytest.mark.parametrize("aggregated", [True, False], ids=["by_bytes", "by_records"])
def test_a_producer_above_the_limits_of_a_shard_is_throttled_and_loses_nothing(
    emulator: Emulator,
    aggregated: bool,
    new_stream: NewStream,
    deaggregators: dict[str, Deaggregate],
    ledger: Ledger,
) -> None:
    stream = new_stream(emulator, shards=1)
    put = numbered(3_000, seed=51, longest_bytes=3_000 if aggregated else 100)

    results = produce(stream, put, aggregation_enabled=aggregated, adaptive_rate=False, **UNLIMITED)

    assert_all_delivered(put, results)
    assert throttled(results) > 100
    kinesis_records = stream.read()
    for name, deaggregate in deaggregators.items():
        read = deaggregate(kinesis_records)
        # What is throttled is not stored, so that nothing is there twice.
        ledger.compare(str(emulator), name, put=put, read=read)
        assert_delivered_where_told(put, results, read)


def test_a_producer_that_limits_itself_below_the_shards_rate_is_never_throttled(
    emulator: Emulator, new_stream: NewStream, deaggregators: dict[str, Deaggregate], ledger: Ledger
) -> None:
    """The emulator counts in windows of one second, so a burst of a second would be throttled."""
    stream = new_stream(emulator, shards=1)
    put = numbered(1_000, seed=52)

    results = produce(
        stream, put, aggregation_enabled=False, rate_limit_records_per_sec_per_shard=400, burst_seconds=0.1
    )

    assert_all_delivered(put, results)
    assert throttled(results) == 0
    kinesis_records = stream.read()
    for name, deaggregate in deaggregators.items():
        ledger.compare(str(emulator), name, put=put, read=deaggregate(kinesis_records))


def test_a_shard_that_throttles_is_split_and_no_record_is_lost(
    emulator: Emulator, new_stream: NewStream, deaggregators: dict[str, Deaggregate], ledger: Ledger
) -> None:
    stream = new_stream(emulator, shards=2)
    lots = (numbered(25, seed=seed, longest_bytes=8_000) for seed in count(2_000))

    put, results = produce_during(
        stream, partial(stream.split, stream.open_shards()[0]), lots, adaptive_rate=False, **UNLIMITED
    )

    assert_all_delivered(put, results)
    assert throttled(results)
    assert len(stream.open_shards()) == 3
    kinesis_records = stream.read()
    for name, deaggregate in deaggregators.items():
        read = deaggregate(kinesis_records)
        kept = as_the_kcl_keeps_them(read, stream.shards())
        misplaced = len(read) - len(kept)
        # Otherwise no aggregated record was on its way during the split.
        assert misplaced
        ledger.compare(str(emulator), name, put=put, read=kept, duplicates_allowed=True, misplaced=misplaced)
        assert_delivered_where_told(put, results, kept)
