from hypothesis import given, strategies as st

from kpl_core.records.outcome import History, Outcome, ResultHandle
from kpl_core.records.record_result import Attempt, RecordResult


class Sleeper:
    """A waiter that counts how often it is woken."""

    def __init__(self) -> None:
        self.woken = 0

    def set(self) -> None:
        self.woken += 1


def failed(code: str, at: float = 0.0) -> Attempt:
    return Attempt(success=False, error_code=code, error_message="", started_at=at, ended_at=at)


SUCCESS = Attempt(success=True, error_code=None, error_message=None, started_at=2.0, ended_at=3.0)


def past(outcome: Outcome, index: int) -> History:
    history = outcome.history_of(index)
    assert history is not None
    return history


def known(delivery: ResultHandle) -> RecordResult:
    result = delivery.peek()
    assert result is not None
    return result


def test_one_settled_outcome_is_the_result_of_all_its_user_records():
    outcome = Outcome()
    deliveries = [ResultHandle(outcome, index) for index in range(3)]
    assert [delivery.done for delivery in deliveries] == [False] * 3
    assert [delivery.peek() for delivery in deliveries] == [None] * 3
    outcome.attempted(SUCCESS)
    outcome.settle(shard_id="shardId-000000000001", sequence_number="7")
    expected = RecordResult(True, "shardId-000000000001", "7", (SUCCESS,))
    assert [delivery.peek() for delivery in deliveries] == [expected] * 3
    assert deliveries[0].peek() is deliveries[2].peek()


def test_an_outcome_without_a_sequence_number_is_a_failure():
    outcome = Outcome()
    outcome.attempted(failed("Expired"))
    outcome.settle()
    result = known(ResultHandle(outcome, 0))
    assert result == RecordResult(False, None, None, (failed("Expired"),))
    assert (result.error_code, result.error_message) == ("Expired", "")


def test_a_success_and_a_result_without_attempts_have_no_error():
    assert RecordResult(True, "s", "1", (SUCCESS,)).error_code is None
    assert RecordResult(False, None, None, ()).error_code is None
    assert RecordResult(False, None, None, ()).error_message is None


def test_attempts_are_an_immutable_tuple_in_the_order_they_were_made():
    outcome = Outcome()
    for code in ("first", "second", "third"):
        outcome.attempted(failed(code))
    outcome.settle()
    attempts = outcome.result_of(0).attempts
    assert isinstance(attempts, tuple)
    assert [attempt.error_code for attempt in attempts] == ["first", "second", "third"]


def test_settling_wakes_each_waiter_once():
    outcome = Outcome()
    sleepers = [Sleeper(), Sleeper()]
    outcome.waiters = [*sleepers]
    outcome.settle()
    outcome.wake()
    assert [sleeper.woken for sleeper in sleepers] == [1, 1]


def test_a_moved_user_record_has_the_result_of_its_new_outcome():
    parent, child = Outcome(), Outcome()
    stays, moves = ResultHandle(parent, 0), ResultHandle(parent, 1)
    parent.attempted(failed("Wrong Shard"))
    child.histories = {5: past(parent, 1)}
    parent.move(1, child, 5)
    parent.attempted(SUCCESS)
    parent.settle(shard_id="a", sequence_number="1")
    assert known(stays).attempts == (failed("Wrong Shard"), SUCCESS)
    assert not moves.done
    child.attempted(SUCCESS)
    child.settle(shard_id="b", sequence_number="2")
    assert moves.peek() == RecordResult(True, "b", "2", (failed("Wrong Shard"), SUCCESS))
    # The other records of its new outcome had no attempt with the wrong shard.
    assert ResultHandle(child, 0).peek() == RecordResult(True, "b", "2", (SUCCESS,))


@given(st.integers(1, 30))
def test_a_delivery_follows_its_user_record_through_several_moves(moves):
    first = Outcome()
    delivery, outcome = ResultHandle(first, 0), first
    for step in range(moves):
        outcome.attempted(failed(str(step)))
        following = Outcome()
        following.histories = {step: past(outcome, max(step - 1, 0))}
        outcome.move(max(step - 1, 0), following, step)
        outcome = following
    assert delivery.follow() is outcome
    outcome.settle()
    assert [attempt.error_code for attempt in known(delivery).attempts] == [str(step) for step in range(moves)]
    # The delivery refers to the last outcome, so the ones in between can be freed.
    assert delivery.outcome is outcome


def test_earlier_attempts_alone_are_a_history():
    outcome = Outcome()
    assert outcome.history_of(0) is None
    earlier = History(failed("past"), None)
    outcome.histories = {0: earlier}
    assert outcome.history_of(0) is earlier
    assert outcome.history_of(1) is None


def test_metadata_belongs_to_its_index():
    outcome = Outcome()
    ResultHandle(outcome, 0).note({"severity": "INFO"})
    ResultHandle(outcome, 4).note({"severity": "ERROR"})
    assert outcome.metadata == {0: {"severity": "INFO"}, 4: {"severity": "ERROR"}}


def test_a_very_long_history_can_be_read_and_freed():
    outcome = Outcome()
    for number in range(200_000):
        outcome.attempted(failed("InternalFailure", float(number)))
    outcome.settle()
    assert len(outcome.result_of(0).attempts) == 200_000
    del outcome
