"""Give requests what they need: bodies, look-ups, turns and results; and send the answers of those that ASGI receives.

Everything that a request may wait for is here, a method for each kind of need (`request/needs.py`).
"""

from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import Any, Final, TypeVar

from kpl_integrations.asgi.protocol import Receive, Send
from kpl_integrations.ingest.http.answers import send_answer
from kpl_integrations.ingest.http.bodies import ClientGone, drop_rest, read_body
from kpl_integrations.ingest.open_gateway import OpenGateway
from kpl_integrations.ingest.request import needs
from kpl_integrations.ingest.request.request import Request
from kpl_integrations.ingest.streams.upstream import Upstream

T = TypeVar("T")


class RequestDriver:
    """The driver of all requests of an open gateway that may wait."""

    def __init__(self, gateway: OpenGateway) -> None:
        self._gateway = gateway
        self._upstream = Upstream(gateway.transport, gateway.streams.describe_calls)

    async def answer(self, request: Request, receive: Receive, send: Send) -> None:
        """Run a request, and send its answer unless the client has gone."""
        try:
            answer = await self.run(request.run(), read=partial(_read, receive))
        except ClientGone:
            return
        if not answer.is_unread:
            await send_answer(send, answer.status, answer.headers(), answer.body)
            return
        # The rest of the body is dropped before the connection closes.
        await send({"type": "http.response.start", "status": answer.status, "headers": answer.headers()})
        await send({"type": "http.response.body", "body": answer.body, "more_body": True})
        await drop_rest(receive, self._gateway.closing)
        await send({"type": "http.response.body", "body": b""})

    async def run(
        self,
        steps: needs.Steps[T],
        need: needs.Need | None = None,
        read: Callable[[needs.Body], Awaitable[bytes]] | None = None,
    ) -> T:
        """Run these steps to their end, and return their result; they wait for `need` already. `read` gets a body."""
        step: Callable[[Any], needs.Need] = steps.send
        met: Any = None
        try:
            while True:
                if need is None:
                    need = step(met)
                try:
                    if isinstance(need, needs.Body):
                        assert read is not None  # noqa: S101 - other requests have their bodies
                        met = await read(need)
                    else:
                        met = await _MEET[type(need)](self, need)
                    step = steps.send
                except Exception as error:  # noqa: BLE001 - it belongs to the request
                    met, step = error, steps.throw
                need = None
        except StopIteration as end:
            result: T = end.value
            return result
        finally:
            steps.close()

    async def _stream_name(self, need: needs.StreamName) -> str | None:
        return await self._gateway.streams.admit(need.stream, need.allows, tenant=need.tenant)

    async def _call(self, need: needs.KinesisCall) -> Mapping[str, object]:
        return await self._upstream.call(need.operation, need.arguments, tenant=need.tenant)

    async def _large_body(self, need: needs.LargeBody) -> Any:  # noqa: ANN401 - the result of the steps
        async with self._gateway.large_bodies.turn(need.room, need.size_bytes):
            return await self.run(need.steps)

    async def _slices(self, need: needs.Slices) -> Any:  # noqa: ANN401 - the result of the steps
        return await self._gateway.large_bodies.run(need.steps)

    async def _group_slices(self, need: needs.GroupSlices) -> None:
        await self._gateway.large_bodies.put(need.group)

    async def _results(self, need: needs.Results) -> None:
        await need.deliveries.failures()

    async def _stored(self, need: needs.Stored) -> None:
        await self._gateway.producer.internal.acknowledged(need.deliveries)


async def _read(receive: Receive, need: needs.Body) -> bytes:
    return await read_body(receive, most_bytes=need.most_bytes, seconds=need.seconds, room=need.room)


_MEET: Final[Mapping[type, Callable[[RequestDriver, Any], Awaitable[Any]]]] = {
    needs.StreamName: RequestDriver._stream_name,  # noqa: SLF001 - its own, as all of these
    needs.KinesisCall: RequestDriver._call,  # noqa: SLF001
    needs.LargeBody: RequestDriver._large_body,  # noqa: SLF001
    needs.Slices: RequestDriver._slices,  # noqa: SLF001
    needs.GroupSlices: RequestDriver._group_slices,  # noqa: SLF001
    needs.Results: RequestDriver._results,  # noqa: SLF001
    needs.Stored: RequestDriver._stored,  # noqa: SLF001
}
