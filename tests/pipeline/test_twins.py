"""The kernels in C and their versions in Python, in two processes that run one random program on a whole pipeline.

Each round puts, changes the shards, answers requests or flushes, and then polls. The two must send the same requests,
give the same results, and keep the same books. All puts of a round happen at one instant: a batch has one arrival, too.
"""

import hashlib
import os
import subprocess
import sys
from asyncio import _set_running_loop
from collections.abc import Callable
from random import Random
from threading import get_ident
from types import SimpleNamespace
from typing import Any

import pytest

from kpl_core import BufferFull, Config, FairnessPolicy, InvalidUserRecord, Producer
from kpl_core.pipeline.buffer_limit import BufferLimit
from kpl_core.pipeline.open_record import COMPILED, fork_count
from kpl_core.producer.delivery import Deliveries, Delivery
from kpl_core.producer.stream_set import stream_parts
from kpl_core.records.put_records import PutRecordsAnswer, PutRecordsEntry, PutRecordsRequest, RequestFailure
from kpl_core.records.user_record import UserRecord
from tests.support.material import even_shards, split

STREAM = "orders"
SMALL_RECORDS: dict[str, Any] = {"aggregation_max_size": 3_000, "record_ttl_ms": 5_000.0}
CONFIGS: list[dict[str, Any]] = [
    {},
    {"ordering": "per_key"},
    {"collection_max_size": 200_000, "aggregation_max_size": 3_000},
    {"collection_max_count": 3},
    {"aggregation_max_count": 5, "record_ttl_ms": 3_000.0},
    {"rate_limit_records_per_sec_per_shard": 20, "record_ttl_ms": 2_000.0},
    {"fairness": FairnessPolicy(weights={"a": 3.0}), "rate_limit_records_per_sec_per_shard": 20, **SMALL_RECORDS},
    {"fairness": FairnessPolicy(), "ordering": "per_key", "rate_limit_bytes_per_sec_per_shard": 50_000},
]
FACTORS_OF_TIME = (0.002, 0.01, 0.05, 0.3)

PROGRAM = """
import importlib.util, sys
if sys.argv[1]:
    spec = importlib.util.spec_from_file_location("kpl_core.pipeline._open_record", sys.argv[1])
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
from tests.pipeline.test_twins import Twin
Twin(int(sys.argv[2])).run(int(sys.argv[3]))
"""


class Twin:
    """A pipeline without a driver, which prints what it does."""

    def __init__(self, seed: int) -> None:
        self.random = random = Random(seed)
        self.now = 100.0
        config = Config(region="us-east-1", **CONFIGS[seed % len(CONFIGS)])
        self.limit = BufferLimit(max_records=random.choice([300, 10_000]), max_bytes=3_000_000)
        self.flows: list[str | None] = [None]
        if config.fairness is not None:
            # While much is free no flow has used up its share. In a batch none is refused for that.
            self.limit = BufferLimit(max_records=10**6, max_bytes=10**9)
            self.flows += ["a", "b", "c", "é"]
        self.pipeline = stream_parts(
            STREAM, config, self.limit, now=self.now, chance=Random(seed).random, delivery=Delivery, listening=True
        ).pipeline
        self.shards = even_shards(random.randrange(1, 6))
        self.next_shard = 100
        self.keys = [f"key {number}" for number in range(random.choice([3, 40, 5_000]))]
        self.has_explicit_keys = random.random() < 0.6
        self.in_flight: list[PutRecordsRequest] = []
        self.handles: list[Delivery | Deliveries] = []
        self.put_count = 0
        # What the put method looks at. This stands for the loop that runs.
        this: Any = self
        _set_running_loop(this)
        streams = {STREAM: self.pipeline}
        batches = {} if self.pipeline.entrance is None else {STREAM: self.pipeline.entrance}
        self.producer: Any = SimpleNamespace(
            _own_streams=(lambda: True, get_ident(), self.clock, batches, fork_count(), False),
            _open=streams,
            _asyncio_loop=self,
            _clock=self.clock,
            _wake=lambda _stream: None,
        )

    def clock(self) -> float:
        return self.now

    def run(self, rounds: int) -> None:
        """Do so many rounds, end, and say whether the kernels ran."""
        steps: list[Callable[[], object]] = [
            self.put_one_by_one,
            self.put_one_by_one,
            self.put_one_by_one,
            self.put_many,
            self.put_explicit,
            self.answer,
            self.answer,
            self.answer,
            self.flush,
            self.change_shards,
        ]
        for number in range(rounds):
            self.now += self.random.choice(FACTORS_OF_TIME)
            for step in self.random.choices(steps, k=self.random.randrange(1, 4)):
                self.make_lanes()
                step()
            # Records of the batch may expire when it is put.
            self.pipeline._batch.drain()  # noqa: SLF001 - what nothing else asks for
            before = self.pipeline.statistics()
            self.say(number, before.accepted, before.delivered, before.failed, self.limit)
            self.poll(self.random.randrange(4))
        self.end()
        print(COMPILED, self.put_count)  # noqa: T201 - for the test

    def make_lanes(self) -> None:
        """Make all lanes in one order, in which a flush closes them.

        Python looks up the lane of a partition key also for a record that has an explicit hash key, and C does not.
        """
        if self.has_explicit_keys:
            for shard_id in self.pipeline.shard_map.open_shards:
                self.pipeline.stages.aggregator.lane(shard_id)

    def put_one_by_one(self) -> None:
        size = self.random.choice([0, 30, 300, 3_000, 30_000])
        explicit_keys = self.explicit_keys()
        for _ in range(self.random.choice([1, 5, 60, 200])):
            key = self.random.choice(self.keys)
            data = self.random.randbytes(self.random.randrange(size + 1))
            explicit, flow = self.random.choice(explicit_keys), self.random.choice(self.flows)
            try:
                delivery = Producer.put_nowait(
                    self.producer, STREAM, partition_key=key, data=data, explicit_hash_key=explicit, flow=flow
                )
            except (BufferFull, InvalidUserRecord, TypeError) as error:
                self.say(repr(error))
                return
            self.handles.append(delivery)
            self.put_count += 1

    def explicit_keys(self) -> list[Any]:
        """Return what the explicit hash keys of some puts are drawn from: none, few, many, or a wrong one."""
        count, most = self.random.choice([(0, 1), (3, 1_000), (60, 2**128)] if self.has_explicit_keys else [(0, 1)])
        keys: list[Any] = [str(self.random.randrange(most)) for _ in range(count)]
        if self.random.random() < 0.1:
            keys.append(self.random.choice(["007", str(2**128), "-1", 7]))
        return [None, *keys]

    def put_many(self) -> None:
        count = self.random.choice([1, 10, 300])
        pairs = [
            (self.random.choice(self.keys), self.random.randbytes(self.random.randrange(200))) for _ in range(count)
        ]
        handles = Deliveries(count)
        reached = self.pipeline.put_pairs(pairs, (0, count), self.now, handles)
        self.say("put", reached)
        self.handles.append(handles[:reached])

    def put_explicit(self) -> None:
        explicit = str(self.random.randrange(2**128))
        record = UserRecord(self.random.choice(self.keys), b"explicit", explicit, None, "normal", {"number": 1})
        try:
            self.handles.append(self.pipeline.put_record(record, self.now))  # type: ignore[arg-type] # it makes these
        except BufferFull:
            self.say("full")

    def flush(self) -> None:
        self.say("flush", self.pipeline.flush(self.now))

    def change_shards(self) -> None:
        if self.random.random() < 0.3:
            self.shards = even_shards(self.random.randrange(1, 6), first=self.next_shard)
            self.next_shard += 10
        elif len(self.shards) < 8:
            self.shards = split(self.shards, self.random.choice(self.shards).shard_id)
        self.pipeline.shards_changed(self.shards, self.now)

    def answer(self) -> None:
        if self.in_flight:
            request = self.in_flight.pop(self.random.randrange(len(self.in_flight)))
            self.pipeline.request_completed(request, self.answer_to(request), self.now)

    def answer_to(self, request: PutRecordsRequest) -> PutRecordsAnswer:
        kind = self.random.random()
        if kind < 0.1:
            return RequestFailure(self.random.choice(["ServiceUnavailable", "InvalidArgumentException"]), "failed")
        elsewhere = self.random.choice(self.shards).shard_id
        return [
            PutRecordsEntry(error_code="ProvisionedThroughputExceededException", error_message="slower")
            if kind < 0.3 and self.random.random() < 0.5
            else PutRecordsEntry(
                str(self.random.randrange(10**6)), elsewhere if kind > 0.9 else each.predicted_shard or elsewhere
            )
            for each in request.records
        ]

    def poll(self, free_requests: int) -> None:
        poll = self.pipeline.poll(self.now, free_requests)
        self.in_flight += poll.requests
        self.pipeline.attention = False
        for request in poll.requests:
            for each in request.records:
                data = hashlib.sha256(each.data).hexdigest()
                self.say(data, each.partition_key, each.explicit_hash_key, each.predicted_shard, each.arrivals)
        self.say(
            poll.wakeup, poll.wants_more, self.pipeline.statistics(), self.pipeline.ledger.take_facts(), self.limit
        )

    def end(self) -> None:
        """Send what can be sent, give the rest up, and say all results."""
        self.pipeline.drain_force(self.now)
        for _ in range(20):
            self.poll(10)
            while self.in_flight:
                self.answer()
        self.pipeline.abandon(self.now)
        for handle in self.handles:
            self.say(*(each.peek() for each in ([handle] if isinstance(handle, Delivery) else handle)))
        self.say(self.pipeline.statistics(), self.limit)
        assert self.limit.outstanding_records == 0

    @staticmethod
    def say(*values: object) -> None:
        print(*values)  # noqa: T201 - the other process says the same


def said(kernels: str, seed: int, rounds: int) -> list[str]:
    # Retried records of several shards leave in the order of a set.
    environment = {**os.environ, "KPL_KERNELS": "require" if kernels else "off", "PYTHONHASHSEED": "0"}
    command = [sys.executable, "-c", PROGRAM, kernels, str(seed), str(rounds)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr[-3_000:]
    return done.stdout.splitlines()


@pytest.mark.parametrize("seed", range(len(CONFIGS)))
def test_the_kernels_send_and_say_what_python_does(in_c, seed):
    compare(in_c.__file__, seed, 40)


@pytest.mark.long
@pytest.mark.parametrize("seed", range(100, 124))
def test_the_kernels_send_and_say_what_python_does_for_long(in_c, seed):
    compare(in_c.__file__, seed, 420)


def compare(kernels: str, seed: int, rounds: int) -> None:
    in_c, in_python = said(kernels, seed, rounds), said("", seed, rounds)
    assert in_c.pop().startswith("True "), "the kernels did not run"
    assert in_python.pop().startswith("False ")
    for position, (one, other) in enumerate(zip(in_c, in_python, strict=False)):
        assert one == other, f"after line {position}"
    assert len(in_c) == len(in_python)
