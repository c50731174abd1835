"""Which policy, and in which order? This example measures all four answers.

    pip install kpl-integrations
    python examples/policies_decision_table.py

The rule: first fairness, which decides which item is next; then the rate limit on the merged stream,
which bounds the total. If each tenant has its own limit, reverse the order: a limit for each tenant,
then fairness for all.
"""

from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from typing import NamedTuple

import anyio

from kpl_core import FairnessPolicy, RateLimitPolicy
from kpl_core.limits import AnyStream, Stream, fair_merge, rate_limited

API_LIMIT = RateLimitPolicy(tokens_per_second=400.0, burst_tokens=4)
TENANT_LIMIT = RateLimitPolicy(tokens_per_second=100.0, burst_tokens=2)
WEIGHTS = FairnessPolicy(weights={"large": 3, "small": 1})


def documents(tenant: str) -> Stream[str]:
    """Describe a tenant's documents: an endless stream, as fast as it is read."""

    async def run() -> AsyncIterator[str]:
        while True:
            yield tenant

    return run


class Row(NamedTuple):
    """One line of the table."""

    scenario: str
    needs_hard_rate_cap: bool
    has_competing_streams: bool
    policies: str
    describe: Callable[[], AnyStream[str]]


def tenants() -> dict[str, Stream[str]]:
    """Describe the streams that compete."""
    return {tenant: documents(tenant) for tenant in ("large", "small")}


TABLE = (
    Row(
        "a single embedding API",
        needs_hard_rate_cap=True,
        has_competing_streams=False,
        policies="rate limit only",
        describe=lambda: rate_limited(documents("only"), API_LIMIT),
    ),
    Row(
        "multi-tenant batch processing",
        needs_hard_rate_cap=True,
        has_competing_streams=True,
        policies="fairness, then rate limit",
        describe=lambda: rate_limited(fair_merge(tenants(), WEIGHTS), API_LIMIT),
    ),
    Row(
        "internal work without a limit",
        needs_hard_rate_cap=False,
        has_competing_streams=True,
        policies="fairness only",
        describe=lambda: fair_merge(tenants(), WEIGHTS),
    ),
    Row(
        "a shared model with a limit per tenant",
        needs_hard_rate_cap=True,
        has_competing_streams=True,
        policies="rate limit for each, then fairness for all",
        describe=lambda: fair_merge(
            {tenant: rate_limited(stream, TENANT_LIMIT) for tenant, stream in tenants().items()}, WEIGHTS
        ),
    ),
)


async def run(row: Row, count: int) -> tuple[Counter[str], float]:
    """Take `count` items; return how many each tenant got, and the seconds it took."""
    served: Counter[str] = Counter()
    started = anyio.current_time()
    async with AsyncExitStack() as stack:
        running = row.describe()()
        # A stream with its own tasks is a context manager; a plain one is iterated directly.
        items = running if isinstance(running, AsyncIterator) else await stack.enter_async_context(running)
        close = getattr(items, "aclose", None)
        if close is not None:
            stack.push_async_callback(close)
        async for tenant in items:
            served[tenant] += 1
            if served.total() == count:
                break
    return served, anyio.current_time() - started


async def main() -> None:
    """Run the table."""
    for row in TABLE:
        served, seconds = await run(row, 100)
        rate = f"{served.total() / seconds:9,.0f}/s"
        print(f"{row.scenario:40}{row.policies:44}{rate}  {dict(sorted(served.items()))}")


if __name__ == "__main__":
    anyio.run(main)
