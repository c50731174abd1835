"""The table of places, row by row."""

import pytest

from kpl_core.durability.keeping_rules import KeepingRules, places_of
from kpl_core.records.record_result import INCURABLE, REASONS

BOTH = KeepingRules(spool=True, dead_letters=True)
SPOOL = KeepingRules(spool=True)
LETTERS = KeepingRules(dead_letters=True)
NONE = KeepingRules()

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
    assert places_of(reason, origin, tier, rules) == places


@pytest.mark.parametrize("reason", REASONS)
def test_what_is_kept_already_stays_in_one_place(reason):
    for origin in ("write_ahead", "replay", "redrive"):
        assert len(places_of(reason, origin, "normal", BOTH)) == 1


def test_only_what_no_time_can_cure_skips_the_spool():
    skipped = {reason for reason in REASONS if "spooled" not in places_of(reason, None, "normal", BOTH)}
    assert skipped == INCURABLE
