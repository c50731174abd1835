"""The laws of the two combinators, on asyncio and trio, in virtual time. Each must fail for a broken combinator.

A law takes the combinator that it tests and the backend to run on. A broken combinator is a copy of the real one's
source with one line replaced (tests/support/oracles.py).
"""

import math
import sys
from collections.abc import AsyncIterator, Callable
from fractions import Fraction
from itertools import pairwise
from typing import Any

import anyio
import pytest
from hypothesis import Phase, Verbosity, given, settings, strategies as st

from kpl_core.limits import fair_merge, rate_limited
from kpl_core.options.policy import FairnessPolicy, RateLimitPolicy
from tests.limits.sources import Source, collect_scoped, endless
from tests.support.oracles import ExactTokenBucket, mutant_of
from tests.support.virtual_time import BackendName, run_in_virtual_time

# The package's attributes of these names are the functions.
fair_merge_module = sys.modules["kpl_core.limits.fair_merge"]
rate_limited_module = sys.modules["kpl_core.limits.rate_limited"]

Combinator = Callable[..., Any]
Law = Callable[[Combinator, BackendName], None]

policies = st.builds(RateLimitPolicy, st.floats(0.5, 1_000), st.integers(1, 50))
pauses = st.lists(st.sampled_from([0.0, 0.0, 0.01]) | st.floats(0.0, 5.0), min_size=5, max_size=60)
weights = st.lists(st.integers(1, 10), min_size=2, max_size=5)


def arriving_after(pauses: list[float]) -> Callable[[], AsyncIterator[float]]:
    """Return a stream whose items are the instants at which they become ready."""

    async def run() -> AsyncIterator[float]:
        for pause in pauses:
            await anyio.sleep(pause)
            yield anyio.current_time()

    return run


async def emissions(stream: Any) -> list[tuple[float, float]]:
    """Return when each item was ready and when it was emitted."""
    return [(ready_at, anyio.current_time()) async for ready_at in stream()]


def law_token_bucket(limited: Combinator, backend: BackendName) -> None:
    @given(policies, pauses)
    def law(policy: RateLimitPolicy, pauses: list[float]) -> None:
        times = [
            at for _, at in run_in_virtual_time(emissions, limited(arriving_after(pauses), policy), backend=backend)
        ]
        assert len(times) == len(pauses)
        for first, start in enumerate(times):
            for last in range(first, len(times)):
                # The only tolerance is the resolution of a float clock. It does not accumulate.
                slack = Fraction(policy.tokens_per_second) * Fraction(4 * math.ulp(times[last]))
                most = ExactTokenBucket.most_in_window(
                    policy.tokens_per_second, policy.burst_tokens, start, times[last]
                )
                assert last - first + 1 <= most + slack

    law()


def law_work_conserving_rate_limit(limited: Combinator, backend: BackendName) -> None:
    @given(policies, pauses)
    def law(policy: RateLimitPolicy, pauses: list[float]) -> None:
        bucket = ExactTokenBucket(policy.tokens_per_second, policy.burst_tokens)
        for ready_at, out_at in run_in_virtual_time(
            emissions, limited(arriving_after(pauses), policy), backend=backend
        ):
            earliest = bucket.ready_at(1, ready_at)
            assert out_at <= earliest + Fraction(8 * math.ulp(out_at))
            # The clock rounds, so an item may be early by the tolerance; the oracle's bucket does not round.
            bucket.try_take(1, max(out_at, math.nextafter(float(earliest), math.inf)))

    law()


def law_purity_of_the_rate_limit(limited: Combinator, backend: BackendName) -> None:
    def must_not_be_called(*_arguments: object) -> Any:
        raise AssertionError

    limited(must_not_be_called, RateLimitPolicy(), clock=must_not_be_called, sleep=must_not_be_called)


def law_no_starvation(merge: Combinator, backend: BackendName) -> None:
    @settings(max_examples=25)
    @given(weights, st.integers(1, 16))
    def law(weights: list[int], buffer: int) -> None:
        policy = FairnessPolicy(dict(enumerate(weights)), max_buffer_per_flow=buffer)
        streams = [endless(place) for place in range(len(weights))]
        received = run_in_virtual_time(collect_scoped, merge(streams, policy), 200, backend=backend)
        for place, weight in enumerate(weights):
            patience = sum(math.ceil(other / weight) for other in weights)
            if all(other % weight == 0 for other in weights):
                assert patience == sum(weights) / weight
            turns = [-1, *(turn for turn, each in enumerate(received) if each == place), len(received)]
            assert max(later - earlier for earlier, later in pairwise(turns)) <= patience

    law()


def law_proportional_share(merge: Combinator, backend: BackendName) -> None:
    @settings(max_examples=5)
    @given(weights, st.integers(1, 32))
    def law(weights: list[int], buffer: int) -> None:
        policy = FairnessPolicy(dict(enumerate(weights)), max_buffer_per_flow=buffer)
        streams = [endless(place) for place in range(len(weights))]
        received = run_in_virtual_time(collect_scoped, merge(streams, policy), 6_000, backend=backend)
        for prefix in (5_000, 5_500, 6_000):
            for place, weight in enumerate(weights):
                assert abs(received[:prefix].count(place) / prefix - weight / sum(weights)) <= 0.002

    law()


def law_bounded_memory(merge: Combinator, backend: BackendName) -> None:
    @settings(max_examples=25)
    @given(st.lists(st.sampled_from([0.0, 0.0, 0.001, 0.5]), min_size=1, max_size=5), st.integers(1, 8))
    def law(delays: list[float], buffer: int) -> None:
        async def run() -> None:
            sources = [Source(range(60), delay=delay) for delay in delays]
            taken = 0
            async with merge(sources, FairnessPolicy(max_buffer_per_flow=buffer))() as items:
                async for _ in items:
                    taken += 1
                    # A slow consumer fills every buffer.
                    await anyio.sleep(0.01)
                    assert sum(source.given for source in sources) - taken <= len(sources) * buffer
            assert taken == 60 * len(sources)

        run_in_virtual_time(run, backend=backend)

    law()


def law_work_conserving_merge(merge: Combinator, backend: BackendName) -> None:
    delays = st.lists(st.lists(st.sampled_from([0.0, 0.1, 1.0, 7.0]), max_size=8), min_size=1, max_size=4)

    @settings(max_examples=25)
    @given(delays)
    def law(delays: list[list[float]]) -> None:
        async def run() -> None:
            async with merge(
                [arriving_after(each) for each in delays], FairnessPolicy(max_buffer_per_flow=20)
            )() as items:
                received = [(ready_at, anyio.current_time()) async for ready_at in items]
            assert len(received) == sum(map(len, delays))
            # The consumer always waits, so each item must be emitted at the instant it is ready.
            assert all(out_at == ready_at for ready_at, out_at in received)

        run_in_virtual_time(run, backend=backend)

    law()


def law_nothing_is_lost_or_reordered(merge: Combinator, backend: BackendName) -> None:
    sources = st.lists(
        st.tuples(st.integers(0, 30), st.sampled_from([0.0, 0.1]), st.booleans()), min_size=1, max_size=4
    )

    @given(sources, st.integers(1, 5))
    def law(plans: list[tuple[int, float, bool]], buffer: int) -> None:
        async def run() -> None:
            streams = [
                Source(
                    [(place, number) for number in range(count)], delay=delay, error=KeyError(place) if fails else None
                )
                for place, (count, delay, fails) in enumerate(plans)
            ]
            received: list[tuple[int, int]] = []
            failures = 0
            try:
                await collect_scoped(merge(streams, FairnessPolicy(max_buffer_per_flow=buffer)), into=received)
            except* KeyError as group:
                failures = len(group.exceptions)
            assert failures == sum(fails for _, _, fails in plans)
            for place, (count, _, _) in enumerate(plans):
                assert [item for item in received if item[0] == place] == [(place, number) for number in range(count)]
            assert all(stream.closed == 1 for stream in streams)

        run_in_virtual_time(run, backend=backend)

    law()


def law_purity_of_the_merge(merge: Combinator, backend: BackendName) -> None:
    def must_not_be_called() -> Any:
        raise AssertionError

    merge([must_not_be_called, must_not_be_called], FairnessPolicy())


RATE_LAWS: list[Law] = [law_token_bucket, law_work_conserving_rate_limit, law_purity_of_the_rate_limit]
MERGE_LAWS: list[Law] = [
    law_no_starvation,
    law_proportional_share,
    law_bounded_memory,
    law_work_conserving_merge,
    law_nothing_is_lost_or_reordered,
    law_purity_of_the_merge,
]
BOTH_BACKENDS = pytest.mark.parametrize("backend", ["asyncio", "trio"])


@BOTH_BACKENDS
@pytest.mark.parametrize("law", RATE_LAWS)
def test_the_rate_limit_obeys_the_law(law, backend):
    law(rate_limited, backend)


@BOTH_BACKENDS
@pytest.mark.parametrize("law", MERGE_LAWS)
def test_the_merge_obeys_the_law(law, backend):
    law(fair_merge, backend)


def broken_limit(*replacements: tuple[str, str]) -> Combinator:
    combinator: Combinator = mutant_of(rate_limited_module, *replacements).rate_limited
    return combinator


def broken_merge(*replacements: tuple[str, str]) -> Combinator:
    combinator: Combinator = mutant_of(fair_merge_module, *replacements).fair_merge
    return combinator


BREAKS: list[tuple[str, Law, Callable[[], Combinator]]] = [
    (
        "one token too many",
        law_token_bucket,
        lambda: broken_limit(("policy.burst_tokens)]", "policy.burst_tokens + 1)]")),
    ),
    (
        "waiting only once",
        law_token_bucket,
        lambda: broken_limit(
            ("while not bucket.try_take", "if not bucket.try_take"), ("ready_at - now)", "0.9 * (ready_at - now))")
        ),
    ),
    (
        "sleeping a little longer",
        law_work_conserving_rate_limit,
        lambda: broken_limit(("await sleep(ready_at - now)", "await sleep(ready_at - now + 0.001)")),
    ),
    (
        "starting the stream while it is described",
        law_purity_of_the_rate_limit,
        lambda: broken_limit(('require_description("stream", stream)', "stream()")),
    ),
    (
        "streams are served in order of arrival",
        law_no_starvation,
        lambda: broken_merge(("self._queue.push((source, item), place, 1)", "self._queue.push((source, item), 0, 1)")),
    ),
    (
        "all streams have the same weight",
        law_proportional_share,
        lambda: broken_merge(("policy.weight_of(self._sources[place].flow)", "1")),
    ),
    (
        "not letting readers go on first",
        law_proportional_share,
        lambda: broken_merge(
            ("        await checkpoint()\n        while self._due:\n            await checkpoint()\n", "")
        ),
    ),
    (
        "reading ahead",
        law_bounded_memory,
        lambda: broken_merge(("if not source.free:", "if source.free < -1:")),
    ),
    (
        "waiting until every stream has something",
        law_work_conserving_merge,
        lambda: broken_merge(("while not self._queue:", "while len(self._queue) < self._reading or not self._queue:")),
    ),
    (
        "ending when the first stream ends",
        law_nothing_is_lost_or_reordered,
        lambda: broken_merge(
            (
                "            if not self._reading:\n",
                "            if self._reading < len(self._sources) or not self._sources:\n",
            )
        ),
    ),
    (
        "dropping what a stream that raises had buffered",
        law_nothing_is_lost_or_reordered,
        lambda: broken_merge(
            ("self._failures.append(error)", "self._failures.append(error); self._queue.remove(place, lambda _: True)")
        ),
    ),
    (
        "starting the streams while they are described",
        law_purity_of_the_merge,
        lambda: broken_merge(('require_description(f"stream {flow!r}", stream)', "stream()")),
    ),
]


@BOTH_BACKENDS
@pytest.mark.parametrize(("law", "break_it"), [pytest.param(law, break_it, id=name) for name, law, break_it in BREAKS])
def test_a_law_fails_on_a_broken_combinator(law, break_it, backend):
    broken = break_it()
    # The same examples each time, so the result is the same in every run.
    profile = settings(
        phases=[Phase.generate],
        max_examples=400,
        database=None,
        derandomize=True,
        verbosity=Verbosity.quiet,
        report_multiple_bugs=False,
    )
    settings.register_profile("breaking", profile)
    before = settings.get_current_profile_name()
    settings.load_profile("breaking")
    try:
        with pytest.raises((AssertionError, BaseExceptionGroup)) as raised:
            law(broken, backend)
    finally:
        settings.load_profile(before)
    if isinstance(raised.value, BaseExceptionGroup):
        assert raised.value.subgroup(AssertionError) is not None


def test_every_law_has_a_broken_case():
    assert {law for _, law, _ in BREAKS} == {*RATE_LAWS, *MERGE_LAWS}
