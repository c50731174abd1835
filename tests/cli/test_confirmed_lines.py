from typing import Any

from hypothesis import given, strategies as st

from kpl_core import RecordResult
from kpl_integrations.cli.put_input import ConfirmedLines

DELIVERED = RecordResult(successful=True, shard_id="s", sequence_number="1", attempts=())
FAILED = RecordResult(successful=False, shard_id=None, sequence_number=None, attempts=())


class Delivery:
    """A delivery with a result set by the test."""

    def __init__(self):
        self.known = None

    @property
    def done(self):
        return self.known is not None

    def result(self):
        return self.known


@given(
    st.lists(st.sampled_from(["blank", "delivered", "failed", "pending"]), max_size=20),
    st.randoms(use_true_random=False),
)
def test_confirmed_lines_end_before_the_first_undelivered_line(results, chance):
    lines = ConfirmedLines()
    deliveries = []
    for number, result in enumerate(results, start=1):
        begins_at = 10 * (number - 1)
        if result == "blank":
            lines.skip(number, begins_at, 10)
        else:
            delivery: Any = Delivery()
            deliveries.append((result, delivery))
            lines.put(number, begins_at, 10, delivery)
    chance.shuffle(deliveries)
    before = 0
    for result, delivery in deliveries:
        delivery.known = {"delivered": DELIVERED, "failed": FAILED, "pending": None}[result]
        lines.advance()
        assert lines.line_count >= before
        before = lines.line_count
    lines.advance()
    gaps = [number for number, result in enumerate(results) if result in {"failed", "pending"}]
    expected = gaps[0] if gaps else len(results)
    assert (lines.line_count, lines.byte_count) == (expected, 10 * expected)
    failed_first = bool(gaps) and results[gaps[0]] == "failed"
    assert lines.first_failure == ((gaps[0] + 1, FAILED) if failed_first else None)
