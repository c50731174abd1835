"""Measure the shared rate limiter beside a bare lock, and check its bounds with eight threads.

    python -m benchmarks.rate_limiter

First the uncontended cost of `acquire`: nanoseconds of CPU time, smallest (median) of interleaved
rounds. The bound is 500 ns more than taking and releasing a lock, for grants and for
rejections. Then eight threads take tokens for five seconds of real time: never below zero, never
above the capacity, never more granted than `capacity + rate * time`. Exits 1 if a bound is
broken.
"""

import gc
import math
import sys
import threading
import time
from collections.abc import Callable
from statistics import median

from kpl_core.limits import TokenBucketLimiter
from kpl_core.pipeline.token_bucket import TokenBucket
from kpl_core.records.user_record import TIERS, Tier

__all__ = ["cost_of", "main", "storm"]

MAX_NANOSECONDS_OVER_LOCK = 500
_CALLS = 100_000
_ROUNDS = 9
_THREADS = 8
_STORM_SECONDS = 5.0


def cost_of(call: Callable[[], object], calls: int = _CALLS) -> float:
    """Return the nanoseconds of CPU time of one call, the loop included."""
    gc.collect()
    gc.disable()
    try:
        started = time.process_time_ns()
        for _ in range(calls):
            call()
        return (time.process_time_ns() - started) / calls
    finally:
        gc.enable()


def _subjects() -> dict[str, Callable[[], object]]:
    lock = threading.Lock()
    plenty = TokenBucketLimiter(1e12, 1e12)
    empty = TokenBucketLimiter(1, 1e-9)
    empty.acquire()
    shard = TokenBucket([(1e12, 1e12), (1e15, 1e15)])

    def bare_lock() -> None:
        with lock:
            pass

    return {
        "a bare lock": bare_lock,
        "acquire, granted": plenty.acquire,
        "acquire, refused": empty.acquire,
        "TokenBucket.try_take, two streams, no lock": lambda: shard.try_take((1, 1_000), 0.0),
    }


def storm(limiter: TokenBucketLimiter, seconds: float) -> list[str]:
    """Let eight threads take tokens for some seconds; return the bounds that were broken."""
    counts: list[tuple[int, float, float]] = []
    started = time.monotonic()
    until = started + seconds

    def take(tier: Tier) -> None:
        granted, lowest, highest = 0, math.inf, -math.inf
        while time.monotonic() < until:
            was_granted, remaining = limiter.acquire(1, tier)
            granted += was_granted
            lowest, highest = min(lowest, remaining), max(highest, remaining)
        counts.append((granted, lowest, highest))

    threads = [threading.Thread(target=take, args=(TIERS[number % 3],)) for number in range(_THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    elapsed = time.monotonic() - started
    granted = sum(count for count, _, _ in counts)
    most = limiter.capacity + limiter.refill_rate * elapsed
    lowest, highest = min(low for _, low, _ in counts), max(high for _, _, high in counts)
    print(
        f"  capacity {limiter.capacity:g}, {limiter.refill_rate:,g}/s: granted {granted:,} in {elapsed:.2f} s "
        f"(at most {most:,.0f}), level {lowest:g} .. {highest:g}"
    )
    broken = {
        "a level below zero": lowest < 0,
        "a level above the capacity": highest > limiter.capacity,
        "more granted than capacity + rate * time": granted > most,
        "far less granted than was there": granted < 0.9 * limiter.refill_rate * elapsed - limiter.capacity,
    }
    return [name for name, is_broken in broken.items() if is_broken]


def main() -> int:
    """Print the figures; return 1 if a bound is broken."""
    subjects = _subjects()
    figures: dict[str, list[float]] = {name: [] for name in subjects}
    for _ in range(_ROUNDS):
        for name, call in subjects.items():
            figures[name].append(cost_of(call))
    for name, rounds in figures.items():
        print(f"{name:46}{min(rounds):7,.0f} ({median(rounds):,.0f}) ns")
    over = max(min(figures[name]) - min(figures["a bare lock"]) for name in ("acquire, granted", "acquire, refused"))
    broken = [f"{over:.0f} ns over a bare lock"] if over > MAX_NANOSECONDS_OVER_LOCK else []
    print(f"at most {over:.0f} ns more than a bare lock (bound {MAX_NANOSECONDS_OVER_LOCK})")
    print(f"{_THREADS} threads, {_STORM_SECONDS:g} s:")
    broken += storm(TokenBucketLimiter(1_000, 50_000, critical_share=0.2), _STORM_SECONDS)
    print("held" if not broken else f"BROKEN: {'; '.join(broken)}")
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
