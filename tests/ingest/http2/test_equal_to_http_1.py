"""A request has the same answer over HTTP/2 as over HTTP/1.1, and stores the same records."""

import asyncio
from typing import Any

import httptools
import pytest

from tests.ingest.http.test_equal_servers import LAST, REQUESTS, Server, post, shown
from tests.ingest.http2.scene import ONE, Http2Scene, Talk
from tests.support.virtual_time import run_in_virtual_time

pytestmark = pytest.mark.usefixtures("same_request_ids")

# What HTTP/2 does not have, or has in another place.
LEFT_OUT = {"host", "connection", "upgrade", "transfer-encoding", "content-length"}
# A body that is announced and never sent.
ONLY_HTTP_1 = {"expects and is too large"}


class Messages:
    """Requests of HTTP/1.1, taken apart."""

    def __init__(self, data: bytes) -> None:
        self.found: list[tuple[str, str, list[tuple[str, str]], bytes]] = []
        self._url, self._body, self._is_done = b"", b"", False
        self._fields: list[tuple[str, str]] = []
        self._parser = httptools.HttpRequestParser(self)
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            self._body = data[upgrade.args[0] :]
            self._end()

    def on_url(self, url: bytes) -> None:
        self._url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        # Trailer fields come behind the body, and no request has an effect of them.
        if name.decode().lower() not in LEFT_OUT and not self._body:
            self._fields.append((name.decode().lower(), value.decode().strip()))

    def on_body(self, body: bytes) -> None:
        self._body += body

    def on_message_complete(self) -> None:
        if not self._parser.should_upgrade():
            self._end()

    def _end(self) -> None:
        method = self._parser.get_method().decode()
        self.found.append((method, self._url.decode(), self._fields, self._body))
        self._url, self._fields, self._body = b"", [], b""


async def over_http_2(whole: bytes) -> tuple[list[tuple[int, bytes]], list[bytes]]:
    scene = Http2Scene()
    async with scene.gateway:
        talk = Talk(scene)
        await talk.ask("POST", Messages(post(ONE)).found[0][1], [("content-type", "application/json")], ONE)
        before = len(scene.stored())
        answers = []
        for request in Messages(whole).found:
            status, _, body = await talk.ask(*request)
            answers.append((status, body))
        await asyncio.sleep(0.1)
        records = scene.stored()[before:]
        await talk.close()
    return answers, records


@pytest.mark.parametrize("name", sorted(set(REQUESTS) - ONLY_HTTP_1))
def test_the_answer_is_the_same(name: str) -> None:
    async def both() -> None:
        own: Any = Server(is_own=True)
        async with own.gateway:
            await own.hear(post(ONE), LAST)
            answers, _, records = shown(await own.hear(REQUESTS[name]))
        found, found_records = await over_http_2(REQUESTS[name])
        final = [(status, body) for status, body in answers if status != 100]
        assert [(status, b"" if b"sequence_number" in body else body) for status, body in found] == final
        assert found_records == records

    run_in_virtual_time(both, backend="asyncio")
