"""Call an API that allows 50 requests a second, without a sleep in the code and without a rejected call.

    pip install kpl-integrations
    python examples/policies_rate_limited_calls.py

The policy is a value that can come from a configuration file.
The limited stream is only described at first. It runs when the program iterates over it.
"""

from collections.abc import AsyncIterator

import anyio

from kpl_core import RateLimitPolicy
from kpl_core.limits import rate_limited

REQUESTS = 40
# A small tolerance, because two clocks never agree exactly.
WHOLE_TOKEN = 0.999


class RefusedError(Exception):
    """The API answered 429."""


class GeocodingApi:
    """A stand-in for an API that allows so many requests a second, and a burst."""

    def __init__(self, requests_per_second: float, burst: int) -> None:
        self._rate = requests_per_second
        self._burst = burst
        self._level = float(burst)
        self._asked_at = anyio.current_time()

    async def locate(self, address: str) -> str:
        """Answer, or raise RefusedError."""
        now = anyio.current_time()
        self._level = min(self._burst, self._level + (now - self._asked_at) * self._rate)
        self._asked_at = now
        if self._level < WHOLE_TOKEN:
            raise RefusedError(address)
        self._level -= 1.0
        return f"{address} is at 52.{len(address)} N"


async def addresses() -> AsyncIterator[str]:
    """Yield addresses as fast as they are read."""
    for number in range(REQUESTS):
        yield f"Hauptstrasse {number}"


async def main() -> None:
    """Send the same requests unlimited and limited."""
    api = GeocodingApi(requests_per_second=50.0, burst=10)
    refused = 0
    async for address in addresses():
        try:
            await api.locate(address)
        except RefusedError:
            refused += 1
    print(f"as fast as possible: {refused} of {REQUESTS} requests refused")

    # After a pause the API allows its burst again. Leave some of the rate to other clients.
    await anyio.sleep(0.25)
    policy = RateLimitPolicy(tokens_per_second=45.0, burst_tokens=10)
    limited = rate_limited(addresses, policy)

    started = anyio.current_time()
    answers = [await api.locate(address) async for address in limited()]
    seconds = anyio.current_time() - started
    print(f"rate_limited: {len(answers)} of {REQUESTS} answered, none refused, in {seconds:.2f} s")
    print(f"the policy allows no less than {(REQUESTS - policy.burst_tokens) / policy.tokens_per_second:.2f} s")
    print("last answer:", answers[-1])


if __name__ == "__main__":
    anyio.run(main)
