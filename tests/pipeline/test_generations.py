from hypothesis import given, strategies as st

from kpl_core.pipeline.ledger import Generations


def test_nothing_held_is_finished():
    generations = Generations()
    assert generations.is_finished(generations.advance())


def test_a_flush_waits_for_what_was_put_before_it():
    generations = Generations()
    generations.retain(generations.current)
    generations.retain(generations.current)
    flushed = generations.advance()
    assert not generations.is_finished(flushed)
    generations.release(flushed)
    assert not generations.is_finished(flushed)
    generations.release(flushed)
    assert generations.is_finished(flushed)


def test_a_flush_does_not_wait_for_what_was_put_after_it():
    generations = Generations()
    flushed = generations.advance()
    generations.retain(generations.current)
    assert generations.is_finished(flushed)


def test_a_later_flush_waits_for_the_earlier_generations_too():
    generations = Generations()
    generations.retain(generations.current)
    first = generations.advance()
    second = generations.advance()
    assert not generations.is_finished(second)
    generations.release(first)
    assert generations.is_finished(second)


@given(st.lists(st.sampled_from(["hold", "advance", "release"]), max_size=40), st.randoms(use_true_random=False))
def test_a_generation_is_finished_when_no_record_belongs_to_it_or_an_earlier_one(steps, chance):
    generations = Generations()
    held: list[int] = []
    for step in steps:
        if step == "hold":
            held.append(generations.current)
            generations.retain(generations.current)
        elif step == "advance":
            assert generations.advance() == generations.current - 1
        elif held:
            generations.release(held.pop(chance.randrange(len(held))))
        for generation in range(generations.current + 1):
            assert generations.is_finished(generation) == all(other > generation for other in held)


def test_many_may_leave_a_generation_at_once():
    generations = Generations()
    for _ in range(3):
        generations.retain(generations.current)
    flushed = generations.advance()
    generations.release(flushed, 0)
    generations.release(flushed, 2)
    assert not generations.is_finished(flushed)
    generations.release(flushed, 1)
    assert generations.is_finished(flushed)
