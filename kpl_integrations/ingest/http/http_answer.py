"""An answer on its way to the client: sent whole, and given up if a slow reader would hold it for ever."""

from typing import Final

import anyio

from kpl_integrations.asgi.protocol import Send
from kpl_integrations.ingest.admission.account import TenantAccount
from kpl_integrations.ingest.admission.admission import Refused
from kpl_integrations.ingest.admission.rate_limit_headers import rate_limit_headers
from kpl_integrations.ingest.http.problem import problem_of
from kpl_integrations.ingest.http.tally import Tally

__all__ = ["LARGE_ANSWER_BYTES", "Headers", "json_headers", "quota_headers", "send_answer", "send_refusal"]

# A client that reads its answer this slowly gets the rest of it from the server's buffers, or not at all.
_SEND_SECONDS: Final = 30.0
LARGE_ANSWER_BYTES: Final = 32_768

Headers = list[tuple[bytes, bytes]]

_JSON: Final = (b"content-type", b"application/json")


def json_headers(body: bytes) -> Headers:
    """Return the header fields of every JSON answer."""
    return [_JSON, (b"content-length", b"%d" % len(body))]


def quota_headers(account: TenantAccount, now: float) -> tuple[tuple[bytes, bytes], ...]:
    """Return the header fields that tell a tenant what its quotas are now; none if it has none."""
    return () if account.quota is None else rate_limit_headers(account.quota.states(1, 0, now))


async def send_answer(send: Send, status: int, headers: Headers, body: bytes) -> None:
    """Send one answer; `headers` name its length."""
    start = {"type": "http.response.start", "status": status, "headers": headers}
    if len(body) < LARGE_ANSWER_BYTES:
        await send(start)
        await send({"type": "http.response.body", "body": body})
        return
    with anyio.move_on_after(_SEND_SECONDS):
        await send(start)
        await send({"type": "http.response.body", "body": body})


async def send_refusal(send: Send, refused: Refused, tally: Tally) -> None:
    """Answer a refused request with its row of the table, and count it."""
    status, headers, body = problem_of(refused)
    tally.refusals[refused.refusal] += 1
    tally.answers[status] += 1
    await send_answer(send, status, headers, body)
