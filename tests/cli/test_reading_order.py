from hypothesis import given, strategies as st

from kpl_integrations.cli.tail import ReadableShard, ReadingOrder


def shard(number, *parents):
    return ReadableShard(str(number), tuple(map(str, parents)), 0, 1)


def ids(shards):
    return [each.shard_id for each in shards]


def test_a_child_is_read_after_both_parents():
    order = ReadingOrder()
    child = shard(2, 0, 1)
    assert ids(order.discover([shard(0), shard(1), child])) == ["0", "1"]
    assert order.finish("0", [child]) == []
    assert ids(order.finish("1", [child])) == ["2"]


def test_a_parent_that_is_not_read_does_not_delay_its_child():
    assert ids(ReadingOrder().discover([shard(7, 3)])) == ["7"]


@st.composite
def lineages(draw):
    """Draw shards, each with up to two earlier ones as parents."""
    shards = []
    for number in range(draw(st.integers(1, 12))):
        parents = draw(st.lists(st.integers(0, number - 1), max_size=2, unique=True)) if number else []
        shards.append(shard(number, *parents))
    return shards


@given(lineages(), st.randoms(use_true_random=False))
def test_each_shard_is_read_once_and_never_before_its_parents(lineage, chance):
    order = ReadingOrder()
    known = chance.sample(lineage, k=len(lineage))
    reading = order.discover(known)
    finished: list[str] = []
    while reading:
        done = reading.pop(chance.randrange(len(reading)))
        assert set(done.parent_ids) <= set(finished)
        finished.append(done.shard_id)
        children = [each for each in lineage if done.shard_id in each.parent_ids]
        reading += order.finish(done.shard_id, children)
    assert sorted(finished) == sorted(ids(lineage))
