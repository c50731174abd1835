"""60 seconds of storm in virtual time: critical is served as if there were none, bulk is filed and nothing is lost."""

from typing import Any

import anyio
import pytest

from kpl_core.durability.dead_letters import CallableSink
from kpl_core.durability.spool import DeadLetter
from kpl_core.options.reliability import BreakerPolicy, DeadLetterOptions, TierPolicy
from tests.support.durability_scene import Storm, assert_invariant, assert_streams_add_up, producer, service
from tests.support.virtual_time import Backend

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend(virtual_time_backend: Backend) -> Backend:
    return virtual_time_backend


# Machines decide here, and they know no backend: on trio a third of the minute shows that the driver carries it out.
@pytest.mark.long
@pytest.mark.parametrize(
    ("virtual_time_backend", "seconds"), [("asyncio", 60.0), ("trio", 20.0)], indirect=["virtual_time_backend"]
)
async def test_a_minute_of_twenty_times_bulk_costs_critical_nothing(anyio_backend, seconds):
    letters: list[DeadLetter] = []
    options: dict[str, Any] = {
        "dead_letters": DeadLetterOptions(),
        "tiers": TierPolicy(),
        "breaker": BreakerPolicy(),
        "record_max_buffered_time_ms": 100,
        "max_outstanding_bytes": 8 << 20,
        "retry_backoff_base_ms": 50,
        "retry_backoff_cap_ms": 5_000,
    }
    async with producer(service(), sink=CallableSink(letters.append), **options) as each:
        unloaded = Storm(each, seconds=10.0)
        await unloaded.run()
        storm = Storm(each, seconds=seconds, bulk_factor=20.0)
        await storm.run()
        assert storm.refused_critical == unloaded.refused_critical == 0
        assert len(storm.latencies) == storm.critical
        assert storm.p99() <= 2 * unloaded.p99()
        await each.flush()
        await anyio.sleep(1.0)
        assert_streams_add_up(each)
    report = each.report()
    assert_invariant(report)
    assert report.dead_lettered == len(letters) > 1_700 * seconds
    assert {letter.tier for letter in letters} == {"bulk"}
    shed = [letter for letter in letters if letter.reason == "rate_limited"]
    assert len(shed) > 0.9 * len(letters)
    assert {letter.severity for letter in shed} == {"debug"}
    assert all(str(letter.source_timestamp).startswith("t") for letter in shed)
    assert report.accepted == storm.bulk + storm.critical + unloaded.critical
