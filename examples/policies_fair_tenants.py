"""Embed the documents of three tenants through one metered API: fairly, with bounds, retries and timeouts.

    pip install kpl-integrations stamina
    python examples/policies_fair_tenants.py

Each tenant has at most 4 calls at a time. stamina retries a rejected call, and a call that hangs is
cancelled after the tenant's timeout. The results of all tenants are merged by weight, then the merged
stream is limited to the API's rate: first fairness, then the limit. A tenant with ten times the
documents delays only itself.
"""

import json
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from contextlib import asynccontextmanager
from functools import partial
from typing import Literal, NamedTuple

import anyio
import stamina
from anyio.streams.memory import MemoryObjectSendStream

from kpl_core import FairnessPolicy, RateLimitPolicy
from kpl_core.limits import fair_merge, rate_limited

POLICIES = json.loads("""{
    "rate_limit": {"tokens_per_second": 400.0, "burst_tokens": 20},
    "fairness": {"weights": {"gold": 3, "silver": 2, "trial": 1}, "max_buffer_per_flow": 8}
}""")
DOCUMENTS = {"gold": 150, "silver": 150, "trial": 1_500}
CALLS_AT_A_TIME = 4
HANGING_DOCUMENT = 99
RESULTS = 600
TIMEOUT_SECONDS = {"gold": 0.5, "silver": 0.25, "trial": 0.1}


class Embedded(NamedTuple):
    """The result of one document. A failure is a result too, and is passed on like any other."""

    tenant: str
    document: int
    status: Literal["ok", "refused", "timed out"]


class TooManyRequestsError(Exception):
    """The API answered 429."""


class EmbeddingApi:
    """A stand-in for an API that rejects some calls and sometimes hangs."""

    def __init__(self) -> None:
        self.calls = 0

    async def embed(self, document: int) -> None:
        """Answer after 2 ms. Reject every 13th call; one document of each tenant hangs."""
        self.calls += 1
        if self.calls % 13 == 0:
            raise TooManyRequestsError
        await anyio.sleep(3_600.0 if document == HANGING_DOCUMENT else 0.002)


@asynccontextmanager
async def embedded(api: EmbeddingApi, tenant: str) -> AsyncGenerator[AsyncIterator[Embedded]]:
    """Process a tenant's documents, some at a time. A stream with its own tasks is a context manager."""
    results, receiver = anyio.create_memory_object_stream[Embedded](max_buffer_size=0)
    documents = iter(range(DOCUMENTS[tenant]))
    async with anyio.create_task_group() as workers, receiver:
        async with results:
            for _ in range(CALLS_AT_A_TIME):
                workers.start_soon(work, api, tenant, documents, results.clone())
        yield receiver
        workers.cancel_scope.cancel()


async def work(
    api: EmbeddingApi, tenant: str, documents: Iterator[int], results: MemoryObjectSendStream[Embedded]
) -> None:
    """Process the tenant's documents until none is left. The workers share the iterator."""
    async with results:
        for document in documents:
            await results.send(Embedded(tenant, document, await outcome(api, tenant, document)))


async def outcome(api: EmbeddingApi, tenant: str, document: int) -> Literal["ok", "refused", "timed out"]:
    """Call the API with retries and a timeout; return the status."""
    try:
        with anyio.fail_after(TIMEOUT_SECONDS[tenant]):
            async for attempt in stamina.retry_context(
                on=TooManyRequestsError, attempts=3, wait_initial=0.005, wait_max=0.02, wait_jitter=0.0
            ):
                with attempt:
                    await api.embed(document)
    except TimeoutError:
        return "timed out"
    except TooManyRequestsError:
        return "refused"
    return "ok"


async def main() -> None:
    """Merge fairly, then limit, and print the shares."""
    api = EmbeddingApi()
    fairness = FairnessPolicy(**POLICIES["fairness"])
    limit = RateLimitPolicy(**POLICIES["rate_limit"])

    merged = fair_merge({tenant: partial(embedded, api, tenant) for tenant in DOCUMENTS}, fairness)
    limited = rate_limited(merged, limit)

    started = anyio.current_time()
    first: Counter[str] = Counter()
    statuses: Counter[str] = Counter()
    async with limited() as results:
        async for result in results:
            if statuses.total() < RESULTS // 2:
                first[result.tenant] += 1
            statuses[result.status] += 1
            if statuses.total() == RESULTS:
                break
    seconds = anyio.current_time() - started

    print(f"of the first {RESULTS // 2} results, while every tenant had documents:")
    for tenant, count in first.items():
        weight = fairness.weight_of(tenant)
        due = weight / sum(fairness.weights.values())
        print(f"  {tenant:7} weight {weight}: {count:4} results, {count / (RESULTS // 2):.1%} ({due:.1%} due)")
    print(f"{RESULTS} results in {seconds:.2f} s (limit: {limit.tokens_per_second:g}/s after {limit.burst_tokens})")
    print("how they ended:", dict(statuses))


if __name__ == "__main__":
    stamina.instrumentation.set_on_retry_hooks([])  # the API rejects calls on purpose: log no retries
    anyio.run(main)
