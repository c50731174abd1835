"""Put the single records of many connections together: those that the event loop has read in one iteration.

Most of the cost of a request with one record is the same for a put of any size. Under load the loop reads many
connections in one iteration. So a request in the ordinary form waits until the loop has read the others, or until 64
requests wait, and one put takes the records of all requests with the same tenant and stream. The loop calls `flush`
before it reads again. asyncio and uvloop call what `call_soon` gets in the next iteration, before they look for
received bytes.

A group of requests is accepted as a whole or not at all. If anything about it is not ordinary, nothing has happened,
and each request is answered alone. So every answer, count and refusal is that of a request without a batch.

While connections are read in turns, only those whose turn it is wait for each other. The CPU time of a group is charged
when it has been put, so the turns learn of it 64 requests late at most, which is less than one round.
"""

import logging
from collections.abc import Collection, Sequence
from typing import Any, Final, Protocol

from kpl_integrations.asgi.protocol import Send
from kpl_integrations.ingest.http.answers import FAILED, Answer, EncodedAnswer, Headers, encoded
from kpl_integrations.ingest.http.read_turns import ConnectionReader, ReadTurns
from kpl_integrations.ingest.http.request_head import ACK_HEADER, FORWARDED_FOR, RecordsHead, Server
from kpl_integrations.ingest.request.needs import Need, Steps
from kpl_integrations.ingest.request.records import RecordsRequest

_log: Final = logging.getLogger(__name__)
_MOST_REQUESTS: Final = 64
_OPEN: Final = ord("{")
_CLOSE: Final = ord("}")


class Requests(Protocol):
    """What a connection calls before it calls the application."""

    most_single_bytes: int
    """The largest body of a request that may wait in a batch; 0: none may."""

    def head_of(self, target: bytes, headers: Headers) -> RecordsHead | None:
        """Return the parsed head of a POST that a connection may run itself, else None."""

    def begin(self, head: RecordsHead, body: bytes, client: str, server: Server | None) -> RecordsRequest | None:
        """Return a complete request from this address; None: the application has to handle it."""

    def put_together(self, head: RecordsHead, bodies: Sequence[bytes]) -> Answer | list[Steps[Answer]] | None:
        """Put the records of several requests with one each.

        Return the answer to each, or what each of them does next; None: run each alone.
        `head` is the head of one of them. The others have the same tenant, stream and options.
        """

    async def finish(self, steps: Steps[Answer], need: Need, send: Send) -> None:
        """Run a request that waits for `need` to its end, and send its answer."""


class BatchedConnection(Protocol):
    """What a batch needs of a connection."""

    loop: Any
    reader: ConnectionReader

    def answer_batched(self, request: "BatchedRequest", answer: EncodedAnswer | Steps[Answer] | None) -> None:
        """Send the answer that a group of requests shares, or go on with these steps.

        None: answer this request as without a batch.
        """


# The connection, the head and the body of a request, and all its bytes. A tuple: each request makes one.
BatchedRequest = tuple[BatchedConnection, RecordsHead, bytes, bytes]


class RequestBatch:
    """The requests of all connections of one gateway that wait for the end of this iteration."""

    __slots__ = ("_most_bytes", "_requests", "_turns", "_waiting")

    def __init__(self, requests: Requests, turns: ReadTurns) -> None:
        self._requests = requests
        self._turns = turns
        self._most_bytes = requests.most_single_bytes
        self._waiting: list[BatchedRequest] = []

    def takes(self, body: bytes) -> bool:
        """Return True if this may be one JSON record: a line break in a text would not be JSON."""
        return 0 < len(body) <= self._most_bytes and body[0] == _OPEN and body[-1] == _CLOSE and b"\n" not in body

    def add(self, request: BatchedRequest) -> None:
        """Let a request wait. Its connection calls `flush` before it handles more bytes."""
        waiting = self._waiting
        if not waiting:
            request[0].loop.call_soon(self.flush)
        waiting.append(request)
        if len(waiting) == _MOST_REQUESTS:
            self.flush()

    def flush(self) -> None:
        """Answer all waiting requests."""
        waiting, self._waiting = self._waiting, []
        for group in _groups(waiting):
            if self._turns.is_attentive:
                # All of them are of one tenant.
                with self._turns.charges.charged(group[0][0].reader):
                    self._answer(group)
            else:
                self._answer(group)

    def _answer(self, group: Sequence[BatchedRequest]) -> None:
        if len(group) == 1:
            group[0][0].answer_batched(group[0], None)
            return
        for request, answer in zip(group, self._answers_to(group), strict=True):
            request[0].answer_batched(request, answer)

    def _answers_to(self, group: Sequence[BatchedRequest]) -> Sequence[EncodedAnswer | Steps[Answer] | None]:
        _, head, _, _ = group[0]
        try:
            answer = self._requests.put_together(head, [body for _, _, body, _ in group])
        except Exception:  # noqa: BLE001 - it is logged, and answered 500
            # Their records may have been put, so they are not answered alone.
            _log.exception("Exception in the fast path")
            return [FAILED] * len(group)
        if isinstance(answer, list):
            return answer
        return [None if answer is None else encoded(answer)] * len(group)


def _groups(requests: list[BatchedRequest]) -> Collection[list[BatchedRequest]]:
    """Return the requests that one put may take: those with the same tenant, stream and options."""
    if len(requests) == 1:
        return (requests,)
    groups: dict[tuple[object, ...], list[BatchedRequest]] = {}
    for request in requests:
        head = request[1]
        fields = head.headers
        is_correlated = head.correlation is not None
        key = (
            head.authorization,
            head.stream,
            head.query,
            fields.get(ACK_HEADER),
            FORWARDED_FOR in fields,
            is_correlated,
        )
        group = groups.get(key)
        if group is None:
            groups[key] = [request]
        else:
            group.append(request)
    return groups.values()
