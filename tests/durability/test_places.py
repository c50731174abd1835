"""The table of places, row by row."""

import pytest

from kpl_core import Config, SpoolOptions
from kpl_core.durability.durable_ledger import DurableLedger, DurableRules, fallback_destinations
from kpl_core.hooks import RecordsFinished
from kpl_core.options.kinesis_limits import MAX_HASH_KEY
from kpl_core.options.policy import FairnessPolicy
from kpl_core.pipeline.buffer_limit import BufferLimit
from kpl_core.pipeline.shard_map import Shard
from kpl_core.producer.stream_set import stream_parts
from kpl_core.records.record_result import INCURABLE, REASONS

BOTH = DurableRules(spool=True, dead_letters=True, write_ahead=False)
SPOOL = DurableRules(spool=True, dead_letters=False, write_ahead=False)
LETTERS = DurableRules(spool=False, dead_letters=True, write_ahead=False)
NONE = DurableRules(spool=False, dead_letters=False, write_ahead=False)

# reason, origin, tier, what there is, where it goes
ROWS = [
    ("ttl", None, "normal", BOTH, ("spooled", "dead_lettered")),
    ("ttl", None, "normal", SPOOL, ("spooled",)),
    ("ttl", None, "normal", LETTERS, ("dead_lettered",)),
    ("ttl", None, "normal", NONE, ()),
    ("shutdown", None, "critical", BOTH, ("spooled", "dead_lettered")),
    ("breaker_open", None, "normal", BOTH, ("spooled", "dead_lettered")),
    ("breaker_open", None, "bulk", BOTH, ("dead_lettered", "spooled")),
    ("rate_limited", None, "bulk", BOTH, ("dead_lettered", "spooled")),
    ("rate_limited", None, "bulk", SPOOL, ("spooled",)),
    ("rate_limited", None, "normal", BOTH, ("spooled", "dead_lettered")),
    ("invalid", None, "normal", BOTH, ("dead_lettered",)),
    ("invalid", None, "normal", SPOOL, ()),
    ("invalid", "write_ahead", "normal", BOTH, ("spooled",)),
    ("invalid", "replay", "normal", SPOOL, ("spooled",)),
    ("ttl", "replay", "normal", BOTH, ("spooled",)),
    ("breaker_open", "replay", "bulk", BOTH, ("spooled",)),
    ("ttl", "redrive", "bulk", BOTH, ("dead_lettered",)),
    ("invalid", "redrive", "normal", LETTERS, ("dead_lettered",)),
    ("ttl", "caller", "normal", BOTH, ()),
    ("invalid", "caller", "normal", BOTH, ()),
    ("rate_limited", "caller", "bulk", BOTH, ()),
    ("shutdown", "caller", "critical", BOTH, ()),
]


@pytest.mark.parametrize(("reason", "origin", "tier", "rules", "places"), ROWS)
def test_a_failed_user_record_goes_where_the_table_says(reason, origin, tier, rules, places):
    assert fallback_destinations(reason, origin, tier, rules) == places


@pytest.mark.parametrize("reason", REASONS)
def test_what_is_kept_already_stays_in_one_place(reason):
    for origin in ("write_ahead", "replay", "redrive"):
        assert len(fallback_destinations(reason, origin, "normal", BOTH)) == 1


def test_only_what_no_time_can_cure_skips_the_spool():
    skipped = {reason for reason in REASONS if "spooled" not in fallback_destinations(reason, None, "normal", BOTH)}
    assert skipped == INCURABLE


def test_a_record_that_expired_in_front_of_the_gate_was_never_sent(tmp_path):
    """Its reason is the time to live, not the retries."""
    config = Config(
        rate_limit_bytes_per_sec_per_shard=1_000,
        record_ttl_ms=1_000,
        fairness=FairnessPolicy(),
        spool=SpoolOptions(path=tmp_path / "spool.db"),
    )
    limit = BufferLimit(max_records=100, max_bytes=100_000)
    pipeline = stream_parts("s", config, limit, now=0.0, chance=lambda: 0.5).pipeline
    pipeline.shards_changed([Shard("shardId-000000000000", 0, MAX_HASH_KEY)], 0.0)
    assert isinstance(pipeline.ledger, DurableLedger)
    _ = pipeline.put("k", bytes(500), 0.0)
    pipeline.flush(0.0)
    assert len(pipeline.poll(0.0, 1).requests) == 1
    waiting = pipeline.put("k", b"x", 0.5)
    pipeline.poll(1.5, 0)
    (fallback,) = pipeline.ledger.take_pending_fallbacks()
    assert (fallback.reason, fallback.detached.user_record.data) == ("ttl", b"x")
    assert not waiting.done


def test_the_fact_of_a_record_that_failed_for_good_has_its_age(tmp_path):
    """In seconds, from the put to the failure; less than a second here."""
    config = Config(record_ttl_ms=500, spool=SpoolOptions(path=tmp_path / "spool.db"))
    limit = BufferLimit(max_records=100, max_bytes=100_000)
    pipeline = stream_parts("s", config, limit, now=0.0, chance=lambda: 0.5, listening=True).pipeline
    pipeline.shards_changed([Shard("shardId-000000000000", 0, MAX_HASH_KEY)], 0.0)
    assert isinstance(pipeline.ledger, DurableLedger)
    _ = pipeline.put("k", b"x", 0.0)
    pipeline.poll(0.75, 0)
    (fallback,) = pipeline.ledger.take_pending_fallbacks()
    pipeline.ledger.take_facts()
    pipeline.ledger.settle_fallbacks([fallback], None)
    (fact,) = pipeline.ledger.take_facts()
    assert isinstance(fact, RecordsFinished)
    assert (fact.age, fact.user_records) == (0.75, 1)
