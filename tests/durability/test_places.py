"""The table of places, row by row."""

import pytest

from kpl_core.durability.durable_ledger import DurableRules, fallback_destinations
from kpl_core.records.record_result import INCURABLE, REASONS

BOTH = DurableRules(spool=True, dead_letters=True)
SPOOL = DurableRules(spool=True)
LETTERS = DurableRules(dead_letters=True)
NONE = DurableRules()

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
    ("invalid", "replay", "normal", SPOOL, ("dead_lettered",)),
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
