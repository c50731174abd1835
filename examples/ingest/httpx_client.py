"""A client that loses nothing to a busy gateway: it comes back when it is told to, and no record is put twice.

    kpl serve --local &
    python examples/ingest/httpx_client.py http://127.0.0.1:8080/v1/streams/demo/records

429 and 503 say in Retry-After when the request will be taken; whoever comes earlier is refused again. A request
keeps its Idempotency-Key over all attempts, so that an answer lost on the way is no reason to put its records twice.
"""

import os
import sys
import time
import uuid
from collections.abc import Sequence
from typing import Any

import httpx

# Said by the gateway to come again, and what a proxy in between says when it cannot reach it.
COME_AGAIN = {429, 502, 503, 504}
LONGEST_SECONDS = 120.0


def put_records(
    client: httpx.Client, url: str, records: Sequence[dict[str, Any]], *, seconds: float = 300.0
) -> dict[str, Any]:
    """Put records, trying for `seconds`; return the gateway's answer.

    Raises:
        httpx.HTTPStatusError: the gateway will never take them (the problem document says why), or not in time.
        httpx.TransportError: it could not be reached in time.
    """
    headers = {"Idempotency-Key": f'"{uuid.uuid4()}"'}
    deadline = time.monotonic() + seconds
    attempt = 0
    while True:
        attempt += 1
        # Where nobody says when: twice as long each time.
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
            if answer.status_code not in COME_AGAIN or time.monotonic() + wait > deadline:
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
