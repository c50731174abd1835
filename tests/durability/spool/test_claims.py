"""Every stored record and byte is counted in exactly one state."""

import pytest
from hypothesis import settings, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kpl_core.durability.spool.claims import ClaimTable
from kpl_core.durability.spool.spool_error import SpoolFull
from kpl_core.durability.spool.store import SpoolTotals

EMPTY = SpoolTotals(0, 0, 0, 0, 0, 0)


def claims(*, max_bytes: int = 1_000_000, totals: SpoolTotals = EMPTY) -> ClaimTable:
    return ClaimTable(totals, max_bytes=max_bytes, max_letter_bytes=10_000)


def test_a_full_spool_rejects_records_and_names_the_limit() -> None:
    each = claims(max_bytes=400)
    assert each.reserve([100, 100], claim=True) == range(1, 3)
    with pytest.raises(SpoolFull, match="holds 264 bytes and 182 more would exceed its max_bytes of 400"):
        each.reserve([100, 18], claim=True)
    assert (each.records, each.claimed) == (2, 2)


def test_a_cancelled_reservation_frees_its_bytes_but_not_its_ids() -> None:
    each = claims()
    ids = each.reserve([10, 20], claim=True)
    each.cancel_reservation(ids, [10, 20])
    assert (each.records, each.record_bytes, each.claimed, each.backlog) == (0, 0, 0, 0)
    assert each.reserve([1], claim=False) == range(3, 4)


def test_confirming_an_unclaimed_record_does_nothing() -> None:
    each = claims()
    ids = each.reserve([10, 10], claim=True)
    assert each.confirm([ids[0], 99]) == [ids[0]]
    assert each.confirm(ids) == [ids[1]]
    assert each.confirm(ids) == []
    assert each.release(ids) == 0


def test_a_released_record_is_queried_by_id_only_behind_the_cursor() -> None:
    each = claims()
    ids = each.reserve([10] * 4, claim=True)
    each.move_cursor(ids[1])
    each.release(ids)
    query = each.backlog_query(10)
    assert query == ([1, 2], 2)
    each.unread(query.released_ids)
    assert each.backlog_query(1) == ([1], 2)


def test_the_counts_start_from_the_totals_of_the_file() -> None:
    each = claims(totals=SpoolTotals(5, 500, 17, 2, 80, 9))
    assert each.backlog == 5
    assert each.record_bytes == 500 + 5 * 32
    assert each.reserve([1], claim=True) == range(18, 19)
    assert each.reserve_letters([1]) == range(10, 11)


def test_a_full_dead_letter_queue_rejects_letters() -> None:
    each = claims()
    with pytest.raises(SpoolFull, match="max_dead_letter_bytes of 10,000"):
        each.reserve_letters([20_000])
    assert (each.letters, each.letter_bytes) == (0, 0)


class AnyLedger(RuleBasedStateMachine):
    """The claim table compared with a dictionary of the stored records and their states."""

    @initialize()
    def start(self) -> None:
        self.claims = claims(max_bytes=2_000)
        # id: (size, state).
        self.model: dict[int, tuple[int, str]] = {}
        self.cursor = 0

    def ids(self, place: str) -> list[int]:
        return [record_id for record_id, (_, where) in self.model.items() if where == place]

    @rule(sizes=st.lists(st.integers(1, 200), min_size=1, max_size=5), claim=st.booleans())
    def append(self, sizes: list[int], claim: bool) -> None:
        room = 2_000 - sum(size + 32 for size, _ in self.model.values())
        if sum(sizes) + 32 * len(sizes) > room:
            with pytest.raises(SpoolFull):
                self.claims.reserve(sizes, claim=claim)
            return
        ids = self.claims.reserve(sizes, claim=claim)
        for record_id, size in zip(ids, sizes, strict=True):
            self.model[record_id] = (size, "claimed" if claim else "backlog")

    @rule(data=st.data())
    def confirm(self, data: st.DataObject) -> None:
        chosen = data.draw(st.lists(st.sampled_from(sorted(self.model)), unique=True)) if self.model else []
        left = self.claims.confirm(chosen)
        assert set(left) == set(chosen) & set(self.ids("claimed"))
        for record_id in left:
            self.model[record_id] = (self.model[record_id][0], "leaving")

    @precondition(lambda self: self.ids("leaving"))
    @rule(works=st.booleans())
    def commit(self, works: bool) -> None:
        leaving = self.ids("leaving")
        if works:
            self.claims.deleted(leaving)
            for record_id in leaving:
                del self.model[record_id]
        else:
            self.claims.restore_claims(leaving)
            for record_id in leaving:
                self.model[record_id] = (self.model[record_id][0], "claimed")

    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        chosen = data.draw(st.lists(st.sampled_from(sorted(self.model)), unique=True)) if self.model else []
        claimed = set(chosen) & set(self.ids("claimed"))
        assert self.claims.release(chosen) == len(claimed)
        for record_id in claimed:
            self.model[record_id] = (self.model[record_id][0], "backlog")

    @rule(limit=st.integers(1, 5))
    def read_backlog(self, limit: int) -> None:
        query = self.claims.backlog_query(limit)
        after = sorted(record_id for record_id in self.model if record_id > query.after_id)[: max(0, limit)]
        for record_id in [*query.released_ids, *after]:
            claimed = self.claims.claim(record_id, self.model[record_id][0])
            assert claimed is (self.model[record_id][1] == "backlog")
            if claimed:
                self.model[record_id] = (self.model[record_id][0], "claimed")
        if after:
            self.claims.move_cursor(after[-1])

    @rule()
    def reading_on_finds_every_record_nobody_holds(self) -> None:
        while True:
            query = self.claims.backlog_query(100)
            after = sorted(record_id for record_id in self.model if record_id > query.after_id)
            if not query.released_ids and not after:
                break
            for record_id in [*query.released_ids, *after]:
                if self.claims.claim(record_id, self.model[record_id][0]):
                    self.model[record_id] = (self.model[record_id][0], "claimed")
            if after:
                self.claims.move_cursor(after[-1])
        assert not self.ids("backlog")

    @invariant()
    def nothing_is_counted_twice_or_forgotten(self) -> None:
        assert self.claims.records == len(self.model)
        assert self.claims.record_bytes == sum(size + 32 for size, _ in self.model.values())
        assert self.claims.claimed == len(self.ids("claimed"))
        assert self.claims.backlog == len(self.ids("backlog"))


TestAnyLedger = AnyLedger.TestCase
TestAnyLedger.settings = settings(max_examples=60, stateful_step_count=30)
