"""A client for a busy gateway: it honours Retry-After, loses no record and puts none twice.

    kpl serve --local &
    python examples/ingest/httpx_client.py http://127.0.0.1:8080/v1/streams/demo/records

429 and 503 have a Retry-After. The gateway accepts the request after that time and rejects earlier retries. All
attempts of a request have the same Idempotency-Key, so a lost response does not put its records twice.
"""

import os
import sys
import time
import uuid
from collections.abc import Sequence
from typing import Any

import httpx

# Statuses to retry: those of the gateway, and those of a proxy that cannot reach it.
RETRYABLE = {429, 502, 503, 504}
LONGEST_SECONDS = 120.0


def put_records(
    client: httpx.Client, url: str, records: Sequence[dict[str, Any]], *, seconds: float = 300.0
) -> dict[str, Any]:
    """Put records, with retries for `seconds`; return the gateway's response.

    Raises:
        httpx.HTTPStatusError: the gateway rejects them (the problem document says why), or stays busy for too long.
        httpx.TransportError: the gateway could not be reached in time.
    """
    headers = {"Idempotency-Key": f'"{uuid.uuid4()}"'}
    deadline = time.monotonic() + seconds
    attempt = 0
    while True:
        attempt += 1
        # Without a Retry-After: exponential backoff.
        wait = min(0.2 * 2**attempt, 10.0)
        try:
            answer = client.post(url, json={"records": list(records)}, headers=headers)
        except httpx.TransportError:
            if time.monotonic() + wait > deadline:
                raise
        else:
            if answer.is_success:
                return dict(answer.json())
            wait = min(float(answer.headers.get("Retry-After", wait)), LONGEST_SECONDS)
            if answer.status_code not in RETRYABLE or time.monotonic() + wait > deadline:
                answer.raise_for_status()
        time.sleep(wait)


def main() -> None:
    """Put a thousand records in requests of a hundred."""
    url = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8080/v1/streams/demo/records"
    key = os.environ.get("KPL_KEY")
    with httpx.Client(timeout=60, headers={"Authorization": f"Bearer {key}"} if key else {}) as client:
        accepted = 0
        for first in range(0, 1_000, 100):
            records = [
                {"partition_key": str(number), "data": {"number": number}} for number in range(first, first + 100)
            ]
            accepted += put_records(client, url, records)["accepted"]
        print(f"{accepted} accepted")


if __name__ == "__main__":
    main()
