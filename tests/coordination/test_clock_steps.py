"""What the lease table does when the store's clock steps."""

from kpl_core.coordination.lease_table import WARM_UP_INTERVALS, next_summary
from tests.coordination.test_lease_table import RULES, grown, report, total


def test_a_worker_that_reported_while_the_clock_was_set_back_keeps_its_lease_for_a_warm_up():
    summary = grown(throttled=0.0)
    assert summary.settled
    first = at = summary.computed_at + 2.5
    while at < first + 10.0:
        # Its report seems to be 400 s old. Perhaps it has ended, because it reports no more.
        reports = [report(name, summary.generation, at) for name in ("w1", "w2", "w3")]
        reports.append(report("w0", summary.generation, first - 400.0))
        summary = next_summary(summary, reports, RULES, at=at)
        is_warm = at - first >= WARM_UP_INTERVALS * RULES.interval_seconds
        assert summary.members.keys() == {"w1", "w2", "w3"} | (set() if is_warm else {"w0"})
        assert total(summary) <= 1_000.0 + 1e-6
        at += 2.5
