"""One HTTP/2 connection: requests side by side, windows, time limits, ends. In virtual time, without sockets."""

import asyncio
from typing import Any

from h2.errors import ErrorCodes
from h2.events import InformationalResponseReceived, StreamReset
from h2.settings import SettingCodes

from kpl_integrations.asgi.protocol import Receive, Scope, Send
from kpl_integrations.ingest.http2.frames import CONNECTION_WINDOW_BYTES
from kpl_integrations.ingest.http2.share import MOST_STREAMS
from tests.ingest.http2.scene import AS_JSON, ONE, PATH, Http2Scene, Talk, answers_after, in_virtual_time, talking
from tests.support.http2_frames import (
    GOAWAY,
    START,
    frame,
    frames_of,
    goaway_code,
    post,
    request,
    reset_codes,
    statuses,
)

LARGE = b'{"data":"' + b"x" * 1_000_000 + b'"}'


async def upload(talk: Talk, body: bytes) -> int:
    """Send a POST whose body is as large as the windows allow at a time, until all is sent or the server resets it."""
    client = talk.client.h2
    stream = talk.client.begin("POST", PATH, AS_JSON)
    while body and not any(isinstance(event, StreamReset) for event in talk.client.events):
        size = min(len(body), client.local_flow_control_window(stream), 16_384)
        if size:
            client.send_data(stream, body[:size], end_stream=size == len(body))
        body = body[size:]
        await talk.exchange(0.001)
    await talk.exchange()
    return stream


@in_virtual_time
async def test_answers_come_in_the_order_in_which_they_are_known():
    async with talking(record_max_buffered_time_ms=500) as (scene, talk):
        await talk.ask("POST", PATH, AS_JSON, ONE)
        late = talk.client.ask("POST", PATH + "?ack=delivered", AS_JSON, ONE)
        soon = talk.client.ask("GET", "/livez")
        talk.write(talk.client.say())
        for _ in range(5):
            await asyncio.sleep(0)
        assert set(talk.http2.streams) == {late}
        await talk.exchange(1.0)
        assert list(talk.client.answers)[-2:] == [soon, late]
        assert talk.client.answers[late][0] == 200
        assert scene.stored() == [b"x", b"x"]


@in_virtual_time
async def test_a_preface_may_come_byte_by_byte():
    scene = Http2Scene()
    async with scene.gateway:
        talk = Talk(scene)
        stream = talk.client.ask("GET", "/livez")
        for byte in talk.client.say():
            talk.write(bytes([byte]))
        await talk.exchange()
        assert talk.client.answers[stream][0] == 200
        await talk.close()


@in_virtual_time
async def test_a_body_above_the_window_arrives_and_gives_the_window_back():
    async with talking() as (_, talk):
        await talk.ask("GET", "/livez")
        for _ in range(3):
            stream = await upload(talk, LARGE)
            assert talk.client.answers[stream][0] == 202
        assert talk.client.h2.outbound_flow_control_window >= CONNECTION_WINDOW_BYTES // 2


@in_virtual_time
async def test_a_body_that_is_too_large_is_refused_and_its_rest_not_wanted():
    async with talking() as (_, talk):
        stream = await upload(talk, b"x" * (17 << 20))
        status, fields, _ = talk.client.answers[stream]
        assert (status, fields.get("connection")) == (413, None)
        assert reset_codes(talk.wire.said) == {stream: ErrorCodes.NO_ERROR}
        # The connection goes on, with all of its window.
        assert (await talk.ask("GET", "/livez"))[0] == 200
        assert talk.client.h2.outbound_flow_control_window >= CONNECTION_WINDOW_BYTES // 2


@in_virtual_time
async def test_an_answer_waits_for_the_window_of_its_client():
    async with talking() as (_, talk):
        talk.client.returns_window = False
        talk.client.h2.update_settings({SettingCodes.INITIAL_WINDOW_SIZE: 10})
        await talk.exchange()
        stream = talk.client.ask("GET", "/livez")
        await talk.exchange(20.0)
        assert talk.client.answers[stream][2] == b'{"status":'
        talk.client.h2.increment_flow_control_window(100, stream)
        await talk.exchange()
        assert talk.client.answers[stream][2] == b'{"status":"alive"}'
        assert stream in talk.client.ended


@in_virtual_time
async def test_a_larger_window_in_the_settings_lets_answers_go_on():
    async with talking() as (_, talk):
        talk.client.h2.update_settings({SettingCodes.INITIAL_WINDOW_SIZE: 0})
        await talk.exchange()
        stream = talk.client.ask("GET", "/livez")
        await talk.exchange(5.0)
        talk.client.h2.update_settings({SettingCodes.INITIAL_WINDOW_SIZE: 1_000})
        await talk.exchange()
        assert stream in talk.client.ended


@in_virtual_time
async def test_an_answer_that_its_client_does_not_take_is_aborted_after_30_seconds():
    async with talking() as (_, talk):
        talk.client.h2.update_settings({SettingCodes.INITIAL_WINDOW_SIZE: 0})
        await talk.exchange()
        stream = talk.client.ask("GET", "/livez")
        await talk.exchange(29.0)
        assert talk.http2.streams
        await talk.exchange(2.0)
        assert reset_codes(talk.wire.said) == {stream: ErrorCodes.INTERNAL_ERROR}
        assert not talk.http2.streams


@in_virtual_time
async def test_a_connection_has_a_hundred_requests_and_reset_ones_count_until_they_end():
    ended = asyncio.Event()
    async with talking(answers_after(ended)) as (_, talk):
        streams = [talk.client.ask("GET", "/livez") for _ in range(MOST_STREAMS)]
        await talk.exchange()
        for stream in streams[:50]:
            talk.client.h2.reset_stream(stream)
        refused = talk.client.ask("GET", "/livez")
        await talk.exchange()
        assert reset_codes(talk.wire.said) == {refused: ErrorCodes.REFUSED_STREAM}
        ended.set()
        await talk.exchange()
        assert {talk.client.answers[stream][0] for stream in streams[50:]} == {204}
        assert (await talk.ask("GET", "/livez"))[0] == 204


@in_virtual_time
async def test_a_client_that_has_reset_its_request_is_not_answered_and_its_window_comes_back():
    async with talking() as (_, talk):
        for _ in range(4):
            stream = talk.client.begin("POST", "/nowhere", AS_JSON)
            talk.client.h2.send_data(stream, b"x" * 16_000)
            talk.client.h2.reset_stream(stream)
            await talk.exchange()
            assert stream not in talk.client.answers
        assert not talk.http2.streams
        assert talk.client.h2.outbound_flow_control_window >= CONNECTION_WINDOW_BYTES // 2


@in_virtual_time
async def test_an_idle_connection_ends_with_goaway():
    async with talking() as (_, talk):
        assert (await talk.ask("GET", "/livez"))[0] == 200
        await asyncio.sleep(70)
        assert (await talk.ask("GET", "/livez"))[0] == 200
        await asyncio.sleep(74)
        assert not talk.wire.closed
        await asyncio.sleep(2)
        assert talk.wire.closed
        assert goaway_code(talk.wire.said) == ErrorCodes.NO_ERROR


@in_virtual_time
async def test_pings_do_not_keep_an_idle_connection_open():
    async with talking() as (_, talk):
        await talk.ask("GET", "/livez")
        for _ in range(80):
            if not talk.wire.closed:
                talk.client.h2.ping(bytes(8))
                await talk.exchange(1.0)
        assert talk.wire.closed


@in_virtual_time
async def test_a_connection_without_a_request_and_a_head_without_an_end_have_ten_seconds():
    for start in (b"", START, START + frame(1, b"x", stream=1)):
        scene = Http2Scene()
        async with scene.gateway:
            talk = Talk(scene)
            talk.write(start or START[:20])
            await asyncio.sleep(9)
            assert not talk.wire.closed
            await asyncio.sleep(2)
            assert talk.wire.closed
            assert goaway_code(talk.wire.said) == ErrorCodes.ENHANCE_YOUR_CALM
            await talk.close()


@in_virtual_time
async def test_a_head_that_begins_behind_an_answer_has_ten_seconds_too():
    async with talking() as (_, talk):
        for seconds in (0, 30):
            await asyncio.sleep(seconds)
            assert not talk.wire.closed
            await talk.ask("GET", "/livez")
        talk.write(frame(1, b"x", stream=5))
        await asyncio.sleep(9)
        assert not talk.wire.closed
        await asyncio.sleep(2)
        assert talk.wire.closed


@in_virtual_time
async def test_a_client_that_leaves_gets_the_answers_that_it_waits_for():
    async with talking() as (scene, talk):
        talk.write(START + post(1, PATH + "?ack=delivered", ONE, *AS_JSON) + frame(GOAWAY, bytes(8)))
        await asyncio.sleep(0.5)
        assert talk.wire.closed
        assert [kind for kind, _, stream, _ in frames_of(talk.wire.said) if stream == 1] == [1, 0]
        assert scene.stored() == [b"x"]


@in_virtual_time
async def test_a_server_that_stops_answers_what_it_has_and_takes_no_more():
    async with talking() as (_, talk):
        await talk.ask("POST", PATH, AS_JSON, ONE)
        talk.write(post(3, PATH + "?ack=delivered", ONE, *AS_JSON))
        talk.http2.shutdown()
        talk.http2.shutdown()
        assert goaway_code(talk.wire.said) == ErrorCodes.NO_ERROR
        assert not talk.wire.closed
        talk.write(request(5))
        assert reset_codes(talk.wire.said) == {5: ErrorCodes.REFUSED_STREAM}
        await asyncio.sleep(0.5)
        assert talk.wire.closed
        assert [kind for kind, _, stream, _ in frames_of(talk.wire.said) if stream == 3] == [1, 0]


@in_virtual_time
async def test_an_idle_connection_closes_at_once_when_the_server_stops():
    async with talking() as (_, talk):
        await talk.ask("GET", "/livez")
        talk.http2.shutdown()
        assert talk.wire.closed


@in_virtual_time
async def test_a_client_asks_before_it_sends_its_body():
    async with talking() as (_, talk):
        stream = talk.client.begin("POST", PATH, [*AS_JSON, ("expect", "100-continue")])
        await talk.exchange()
        assert any(isinstance(event, InformationalResponseReceived) for event in talk.client.events)
        talk.client.h2.send_data(stream, ONE, end_stream=True)
        await talk.exchange()
        assert talk.client.answers[stream][0] == 202


@in_virtual_time
async def test_fields_reach_the_application_as_in_http_1_and_leave_it_without_those_of_connections():
    seen: list[Scope] = []

    async def application(scope: Scope, _receive: Receive, send: Send) -> None:
        seen.append(scope)
        fields = [(b"Connection", b"close"), (b"Transfer-Encoding", b"chunked"), (b"X-A", b"1")]
        await send({"type": "http.response.start", "status": 200, "headers": fields})
        await send({"type": "http.response.body", "body": b"a", "more_body": True})
        await send({"type": "http.response.body", "body": b"b", "more_body": True})
        await send({"type": "http.response.body"})

    async with talking(application) as (_, talk):
        cookies = [("cookie", "a=1"), ("cookie", "b=2")]
        status, fields, body = await talk.ask("GET", "/a%20b?c=d", cookies)
    assert (status, body) == (200, b"ab")
    assert {"connection", "transfer-encoding"}.isdisjoint(fields)
    assert fields["x-a"] == "1"
    (scope,) = seen
    assert (scope["path"], scope["raw_path"], scope["query_string"]) == ("/a b", b"/a%20b", b"c=d")
    assert (scope["http_version"], scope["method"]) == ("2", "GET")
    assert scope["headers"] == [(b"host", b"x"), (b"cookie", b"a=1; b=2")]


@in_virtual_time
async def test_an_application_that_fails_answers_500_or_aborts_its_answer():
    fails_at: list[str] = []

    async def application(_scope: Scope, _receive: Receive, send: Send) -> None:
        if fails_at == ["start"]:
            raise OSError
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"4")]})
        if fails_at == ["head"]:
            raise OSError
        await send({"type": "http.response.body", "body": b"a", "more_body": True})
        if fails_at == ["middle"]:
            raise OSError
        await send({"type": "http.response.body", "body": b"a" if fails_at == ["short"] else b"aaaa"})

    async with talking(application) as (_, talk):
        for place in ("start", "head"):
            fails_at[:] = [place]
            assert (await talk.ask("GET", "/"))[0] == 500
        for place in ("middle", "short", "long"):
            fails_at[:] = [place]
            stream = talk.client.ask("GET", "/")
            await talk.exchange()
            assert reset_codes(talk.wire.said)[stream] == ErrorCodes.INTERNAL_ERROR
            assert any(isinstance(event, StreamReset) for event in talk.client.events)


@in_virtual_time
async def test_an_application_says_the_end_of_its_answer_once():
    """The connection ends an answer with its last byte, and the application may say so afterwards."""
    refused: list[str] = []

    async def application(scope: Scope, _receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
        await send({"type": "http.response.body", "body": b"ab", "more_body": True})
        try:
            for more_body in (True, False, False)[: int(scope["query_string"])]:
                await send({"type": "http.response.body", "body": b"", "more_body": more_body})
        except RuntimeError:
            refused.append(scope["query_string"])

    async with talking(application) as (_, talk):
        for parts in range(4):
            assert (await talk.ask("GET", f"/?{parts}"))[2] == b"ab"
    assert refused == [b"3"]


@in_virtual_time
async def test_a_client_that_asks_for_a_huge_table_of_fields_does_not_get_one():
    async with talking() as (_, talk):
        talk.client.h2.update_settings({SettingCodes.HEADER_TABLE_SIZE: 2**31})
        await talk.exchange()
        assert talk.http2.frames.encoder.header_table_size == 4_096
        assert (await talk.ask("GET", "/livez"))[0] == 200


@in_virtual_time
async def test_a_connection_that_its_client_does_not_read_is_not_read_either():
    async with talking() as (scene, talk):
        await talk.ask("GET", "/livez")
        talk.http2.pause_writing()
        assert talk.http2.flow.read_paused
        stream = talk.client.ask("GET", "/openapi.json")
        await talk.exchange(1.0)
        assert talk.client.answers[stream][2] == b""
        # No task waits for it.
        assert not scene.server.tasks
        talk.http2.resume_writing()
        await talk.exchange()
        assert not talk.http2.flow.read_paused
        assert stream in talk.client.ended


@in_virtual_time
async def test_a_stream_of_events_waits_for_a_client_that_does_not_read_and_then_ends():
    """Its window may be huge, and nothing else bounds what waits for the socket."""
    sent = 0

    async def application(_scope: Scope, _receive: Receive, send: Send) -> None:
        nonlocal sent
        await send({"type": "http.response.start", "status": 200, "headers": []})
        while sent < 1_000:
            await send({"type": "http.response.body", "body": b"event", "more_body": True})
            sent += 1
            await asyncio.sleep(1.0)

    async with talking(application) as (_, talk):
        stream = talk.client.ask("GET", "/events")
        await talk.exchange(3.0)
        talk.http2.pause_writing()
        before = sent
        await asyncio.sleep(20.0)
        assert sent <= before + 1
        assert stream in talk.http2.streams
        await asyncio.sleep(40.0)
        assert not talk.http2.streams
        assert reset_codes(talk.wire.said) == {stream: ErrorCodes.INTERNAL_ERROR}


@in_virtual_time
async def test_an_application_that_fails_before_a_client_that_takes_nothing():
    async def application(_scope: Scope, _receive: Receive, _send: Send) -> None:
        raise OSError

    async with talking(application) as (scene, talk):
        talk.client.h2.update_settings({SettingCodes.INITIAL_WINDOW_SIZE: 0})
        await talk.exchange()
        stream = talk.client.begin("POST", "/", AS_JSON)
        await talk.exchange(29.0)
        assert not scene.server.tasks
        await talk.exchange(2.0)
        assert reset_codes(talk.wire.said) == {stream: ErrorCodes.INTERNAL_ERROR}
        assert not talk.http2.streams
        # The connection goes on, and no task has failed.
        talk.client.h2.update_settings({SettingCodes.INITIAL_WINDOW_SIZE: 1_000})
        assert (await talk.ask("GET", "/"))[0] == 500
        assert not scene.server.tasks


@in_virtual_time
async def test_a_server_with_too_many_connections_answers_503_on_the_last_and_ends_it():
    async with talking() as (scene, first):
        await first.ask("GET", "/livez")
        scene.server.connections.update(range(100_000))
        last = Talk(scene)
        last.write(last.client.say() + request(1))
        await asyncio.sleep(0.1)
        assert statuses(last.wire.said) == {1: 503}
        assert goaway_code(last.wire.said) == ErrorCodes.NO_ERROR
        assert last.wire.closed
        assert (await first.ask("GET", "/livez"))[0] == 200


@in_virtual_time
async def test_what_a_lost_connection_had_begun_is_told():
    told: list[Any] = []

    async def application(_scope: Scope, receive: Receive, _send: Send) -> None:
        while (message := await receive())["type"] != "http.disconnect":
            told.append(message)
        told.append("gone")

    scene = Http2Scene(application)
    async with scene.gateway:
        talk = Talk(scene)
        talk.client.begin("POST", "/", AS_JSON)
        await talk.exchange()
        await talk.close()
        assert told[-1] == "gone"
        assert not scene.server.connections
        assert not scene.server.tasks


@in_virtual_time
async def test_http_2_can_be_turned_off():
    async with talking(http2=False) as (_, talk):
        talk.write(talk.client.say())
        assert talk.wire.closed
        assert goaway_code(talk.wire.said) == ErrorCodes.HTTP_1_1_REQUIRED
