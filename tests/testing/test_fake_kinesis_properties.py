"""Properties of the fake service: conservation of records, shard capacity, partition of the hash keys."""

from hypothesis import given, strategies as st

from kpl_core.options.kinesis_limits import MAX_HASH_KEY
from kpl_core.records.hash_key import hash_key_of
from kpl_core.testing import (
    FakeKinesis,
    KinesisError,
    MergeDuringRequest,
    PutRecord,
    RecordError,
    ServiceLimits,
    SplitDuringRequest,
    When,
)
from kpl_core.testing.fake_shard import (
    SequenceNumber,
    ShardCapacity,
    format_sequence_number,
    parse_sequence_number,
    shard_bits,
)

hash_keys = st.one_of(st.none(), st.integers(0, MAX_HASH_KEY).map(str))
records = st.lists(
    st.tuples(st.text(min_size=1, max_size=8), hash_keys, st.binary(max_size=20)), min_size=1, max_size=20
)
reshards = st.one_of(
    st.builds(SplitDuringRequest), st.builds(MergeDuringRequest), st.tuples(st.just("rescale"), st.integers(1, 12))
)
steps = st.lists(st.one_of(records, reshards, st.floats(0.0, 5.0)), max_size=30)


def reshard(kinesis: FakeKinesis, step: object, now: float) -> None:
    if isinstance(step, SplitDuringRequest | MergeDuringRequest):
        kinesis.reshard("s", step, now=now)
    elif isinstance(step, tuple):
        try:
            kinesis.update_shard_count("s", target_shard_count=step[1], now=now)
        except KinesisError as refusal:
            assert refusal.code == "LimitExceededException"  # noqa: PT017 - more than double, or less than half


def read_back(kinesis: FakeKinesis, now: float) -> dict[str, list[tuple[str, bytes, str]]]:
    """Read every shard from its horizon to its end, in small steps."""
    content: dict[str, list[tuple[str, bytes, str]]] = {}
    for shard in kinesis.list_shards("s", now=now).shards:
        iterator: str | None = kinesis.get_shard_iterator("s", shard_id=shard.shard_id, now=now)
        content[shard.shard_id] = []
        while iterator is not None:
            page = kinesis.get_records(iterator, limit=3, now=now)
            content[shard.shard_id] += [(r.partition_key, r.data, r.sequence_number) for r in page.records]
            iterator = page.next_shard_iterator if page.millis_behind_latest else None
    return content


@given(steps, st.integers(1, 5))
def test_exactly_the_stored_records_are_read_and_each_once(steps: list[object], shards: int) -> None:
    kinesis = FakeKinesis({"s": shards}, limits=ServiceLimits(records_per_second_per_shard=10.0))
    kinesis.faults.add(RecordError("InternalFailure"), When(every=4))
    now = 0.0
    stored: dict[str, list[tuple[str, bytes, str]]] = {}
    offered = 0
    for step in steps:
        if isinstance(step, float):
            now += step
        elif isinstance(step, list):
            entries = kinesis.put_records("s", step, now=now)
            offered += len(step)
            for (key, _, data), entry in zip(step, entries, strict=True):
                if entry.shard_id is not None and entry.sequence_number is not None:
                    stored.setdefault(entry.shard_id, []).append((key, data, entry.sequence_number))
        else:
            reshard(kinesis, step, now)
    content = read_back(kinesis, now)
    assert {shard: lines for shard, lines in content.items() if lines} == stored
    for lines in content.values():
        sequence = [int(number) for _, _, number in lines]
        assert sequence == sorted(set(sequence))
    statistics = kinesis.statistics("s")
    assert statistics.records_offered == offered
    assert statistics.records_stored == sum(map(len, stored.values()))
    assert offered == statistics.records_stored + statistics.records_throttled + statistics.records_faulted


@given(st.lists(reshards, max_size=30), st.integers(1, 9), st.integers(0, MAX_HASH_KEY))
def test_the_open_shards_always_partition_the_hash_keys(steps: list[object], shards: int, probe: int) -> None:
    kinesis = FakeKinesis({"s": shards})
    for step in steps:
        reshard(kinesis, step, 0.0)
        opened = kinesis.open_shards("s")
        edges = [0]
        for shard in opened:
            assert shard.starting_hash_key == edges[-1]
            assert shard.ending_hash_key >= shard.starting_hash_key
            edges.append(shard.ending_hash_key + 1)
        assert edges[-1] == MAX_HASH_KEY + 1
        (entry,) = kinesis.put_records("s", [("k", str(probe), b"")], now=0.0)
        ranges = {shard.shard_id: (shard.starting_hash_key, shard.ending_hash_key) for shard in opened}
        if entry.shard_id is not None:
            start, end = ranges[entry.shard_id]
            assert start <= probe <= end


@given(st.lists(reshards, max_size=30), st.integers(1, 9))
def test_the_range_of_a_child_is_inside_that_of_its_parents(steps: list[object], shards: int) -> None:
    kinesis = FakeKinesis({"s": shards})
    for step in steps:
        reshard(kinesis, step, 0.0)
    page = kinesis.list_shards("s", now=0.0)
    every = {shard.shard_id: shard for shard in page.shards}
    while page.next_token is not None:
        page = kinesis.list_shards(next_token=page.next_token, now=0.0)
        every |= {shard.shard_id: shard for shard in page.shards}
    for child in every.values():
        parents = [every[name] for name in (child.parent_shard_id, child.adjacent_parent_shard_id) if name is not None]
        for parent in parents:
            assert parent.ending_sequence_number is not None
            assert int(parent.ending_sequence_number) < int(child.starting_sequence_number)
        if parents:
            assert min(parent.starting_hash_key for parent in parents) <= child.starting_hash_key
            assert max(parent.ending_hash_key for parent in parents) >= child.ending_hash_key


costs = st.lists(st.tuples(st.floats(0.0, 2.0), st.integers(0, 3_000)), min_size=1, max_size=60)


@given(costs, st.floats(0.1, 3.0))
def test_a_shard_admits_at_most_its_burst_plus_its_rate(offers: list[tuple[float, int]], burst: float) -> None:
    limits = ServiceLimits(records_per_second_per_shard=20.0, bytes_per_second_per_shard=1_000.0, burst_seconds=burst)
    capacity = ShardCapacity(limits)
    now = 1_000.0
    admitted: list[tuple[float, int]] = []
    for elapsed, size in offers:
        now += elapsed
        if capacity.take(size, now):
            admitted.append((now, size))
    for first in range(len(admitted)):
        for last in range(first, len(admitted)):
            window = admitted[last][0] - admitted[first][0]
            sizes = [size for _, size in admitted[first : last + 1]]
            assert len(sizes) <= 20.0 * (burst + window) + 1e-3
            # A record above the burst passes if the bucket is full. The next one waits until its debt is refilled.
            assert sum(sizes) - max(sizes[-1] - 1_000.0 * burst, 0.0) <= 1_000.0 * (burst + window) + 1e-3


@given(st.integers(0, 3_000), st.floats(0.0, 5.0))
def test_a_throttled_shard_admits_when_its_bucket_is_full_again(size: int, burst: float) -> None:
    limits = ServiceLimits(bytes_per_second_per_shard=1_000.0, burst_seconds=burst + 0.01)
    capacity = ShardCapacity(limits)
    now = 0.0
    assert capacity.take(3_000, now)
    now += (3_000 + 1_000.0 * limits.burst_seconds) / 1_000.0
    assert capacity.take(size, now)


@given(st.integers(0, 2**35), st.integers(0, 2**63 - 1), st.integers(0, 2**35), st.integers(0, 2**31 - 1))
def test_a_parsed_sequence_number_has_the_fields_it_was_built_from(
    created: int, counter: int, written: int, index: int
) -> None:
    number = format_sequence_number(shard_bits(created_at=created, shard_index=index), counter, written)
    assert len(number) == 56
    assert parse_sequence_number(number) == SequenceNumber(created, counter, written, index)


@given(st.text(min_size=1, max_size=256).filter(lambda key: key.isprintable()), st.integers(1, 50))
def test_a_key_is_routed_by_its_md5(key: str, shards: int) -> None:
    kinesis = FakeKinesis({"s": shards})
    record: PutRecord = (key, None, b"")
    entry = kinesis.put_record("s", record, now=0.0)
    (shard,) = [shard for shard in kinesis.open_shards("s") if shard.shard_id == entry.shard_id]
    assert shard.starting_hash_key <= hash_key_of(key) <= shard.ending_hash_key
