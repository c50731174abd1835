"""Embed the documents of three tenants through one metered API: fairly, bounded, retried, in time.

    pip install kpl-integrations
    python examples/policies_fair_tenants.py

Each tenant's documents are worked on by at most 4 calls at a time; a call that is refused is
retried by stamina, one that hangs is given up after the tenant's timeout. The results of all
tenants are merged by weight, then the merged stream is held to the API's rate: fairness first,
then the limit. A tenant with ten times the documents waits for itself.
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

from kpl_core.limits import fair_merge, rate_limited
from kpl_core.options.policy import FairnessPolicy, RateLimitPolicy

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
    """What became of one document: a failure is a result too, and passes through like any other."""

    tenant: str
    document: int
    status: Literal["ok", "refused", "timed out"]


class TooManyRequestsError(Exception):
    """The API answered 429."""


class EmbeddingApi:
    """Stands for an API that refuses now and then, and sometimes hangs."""

    def __init__(self) -> None:
        self.calls = 0

    async def embed(self, document: int) -> None:
        """Answer after 2 ms; every 13th call is refused, and one document of each tenant hangs."""
        self.calls += 1
        if self.calls % 13 == 0:
            raise TooManyRequestsError
        await anyio.sleep(3_600.0 if document == HANGING_DOCUMENT else 0.002)


@asynccontextmanager
async def embedded(api: EmbeddingApi, tenant: str) -> AsyncGenerator[AsyncIterator[Embedded]]:
    """Work on a tenant's documents, some at a time. A stream with tasks of its own has a scope."""
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
    """Take the tenant's next document until there is none; the workers share the iterator."""
    async with results:
        for document in documents:
            await results.send(Embedded(tenant, document, await outcome(api, tenant, document)))


async def outcome(api: EmbeddingApi, tenant: str, document: int) -> Literal["ok", "refused", "timed out"]:
    """Call the API, retried and in time; say how it ended."""
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
    """Merge fairly, then limit; look at what comes out."""
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

    print(f"of the first {RESULTS // 2} results, while everybody had documents:")
    for tenant, count in first.items():
        weight = fairness.weight_of(tenant)
        due = weight / sum(fairness.weights.values())
        print(f"  {tenant:7} weight {weight}: {count:4} results, {count / (RESULTS // 2):.1%} ({due:.1%} due)")
    print(f"{RESULTS} results in {seconds:.2f} s (limit: {limit.tokens_per_second:g}/s after {limit.burst_tokens})")
    print("how they ended:", dict(statuses))


if __name__ == "__main__":
    stamina.instrumentation.set_on_retry_hooks([])  # this example is refused on purpose, and quiet about it
    anyio.run(main)
