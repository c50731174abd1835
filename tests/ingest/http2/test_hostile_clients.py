"""Clients that take no answers, or occupy places: what others hear, and how it ends."""

import asyncio
from typing import Any

import anyio
import pytest
from h2.settings import SettingCodes

from kpl_integrations.asgi.protocol import Receive, Scope, Send
from kpl_integrations.ingest.http.connection_flow import LINGER_SECONDS
from kpl_integrations.ingest.http.places import ConnectionPlaces
from kpl_integrations.ingest.http.request_head import SERVER
from kpl_integrations.ingest.http2.share import (
    FEW_UNSENT_BYTES,
    MOST_UNSENT_BYTES,
    MOST_UNVERIFIED,
    MOST_UNVERIFIED_STREAMS,
    ConnectionShare,
)
from tests.ingest.http2.scene import AS_JSON, ONE, PATH, Http2Scene, Talk, answers_after, in_virtual_time, talking
from tests.support.http2_attacks import settings_of
from tests.support.http2_frames import (
    CONTINUATION,
    END_HEADERS,
    END_STREAM,
    HEADERS,
    RST_STREAM,
    START,
    block,
    frame,
    frames_of,
    goaway_code,
    request,
    statuses,
)


@in_virtual_time
async def test_answers_that_nobody_takes_hold_no_task_and_fill_no_gateway():
    """A thousand of them were as many requests as there may be, and everybody else got 503, probes too."""
    async with talking() as (scene, talk):
        rude = [Talk(scene) for _ in range(15)]
        for each in rude:
            each.write(START + settings_of(0) + b"".join(request(1 + 2 * number) for number in range(100)))
        await asyncio.sleep(1.0)
        assert sum(len(each.http2.streams) for each in rude) == 1_500
        assert not scene.server.tasks
        assert (await talk.ask("GET", "/livez"))[0] == 200
        assert (await talk.ask("POST", PATH, AS_JSON, ONE))[0] == 202
        await asyncio.sleep(31.0)
        assert not any(each.http2.streams for each in rude)
        for each in rude:
            await each.close()


@in_virtual_time
async def test_refusals_whose_bodies_come_late_hold_no_task_either():
    """The gateway says the end of such an answer behind it, and waited there for the client."""
    async with talking() as (scene, talk):
        talk.client.h2.update_settings({SettingCodes.INITIAL_WINDOW_SIZE: 0})
        await talk.exchange()
        for _ in range(90):
            talk.client.begin("POST", PATH, [*AS_JSON, ("content-length", "99999999")])
        await talk.exchange(1.0)
        assert len(talk.http2.streams) == 90
        assert not scene.server.tasks
        assert scene.places.http_2_requests == 0


@in_virtual_time
async def test_an_application_goes_on_after_a_part_that_it_did_not_wait_for():
    """The dashboard sends a last event after its task was cancelled: a part may still wait for the client's window."""

    async def application(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        with anyio.move_on_after(1.0):
            for part in (b"taken", b"waits", b"not sent"):
                await send({"type": "http.response.body", "body": part, "more_body": True})
        await send({"type": "http.response.body", "body": b"last"})

    async with talking(application) as (scene, talk):
        talk.client.h2.update_settings({SettingCodes.INITIAL_WINDOW_SIZE: 7})
        talk.client.returns_window = False
        await talk.exchange()
        stream = talk.client.ask("GET", "/")
        await talk.exchange(3.0)
        talk.client.h2.increment_flow_control_window(1_000, stream)
        await talk.exchange(1.0)
        assert talk.client.answers[stream][2] == b"takenwaitslast"
        assert stream in talk.client.ended
        assert scene.places.unsent_bytes == 0


@in_virtual_time
async def test_a_connection_whose_answers_wait_for_its_client_makes_place_for_others():
    async with talking() as (scene, talk):
        talk.write(START + settings_of(0) + request(1))
        await asyncio.sleep(0.1)
        places = ConnectionPlaces()
        places.take(talk.http2, 1, 10)
        newest = Talk(scene)
        places.take(newest.connection, 10, 10)
        assert talk.wire.aborted
        assert not newest.wire.closed
        await newest.close()


@in_virtual_time
async def test_a_connection_that_speaks_http_2_late_stays_as_old_as_it_was():
    scene = Http2Scene()
    first, second = Talk(scene), Talk(scene)
    first.write(START)
    assert list(first.http2.places.unverified) == [first.wire, second.wire]
    for each in (first, second):
        await each.close()


@in_virtual_time
async def test_few_requests_run_at_a_time_before_credentials_are_verified():
    is_verified = asyncio.Event()

    async def application(scope: Scope, _receive: Receive, _send: Send) -> None:
        await is_verified.wait()
        scope["extensions"][SERVER]["request"].verified()
        await asyncio.Event().wait()

    async with talking(application) as (scene, talk):
        scene.places.reserves = True
        talk.write(START + b"".join(request(1 + 2 * number) for number in range(50)))
        await asyncio.sleep(0.1)
        assert len(talk.http2.streams) == 50
        assert len(scene.server.tasks) == MOST_UNVERIFIED
        # One that is reset runs until it has ended.
        talk.write(frame(RST_STREAM, bytes(4), stream=1))
        await asyncio.sleep(0.1)
        assert len(scene.server.tasks) == MOST_UNVERIFIED
        is_verified.set()
        await asyncio.sleep(0.1)
        assert len(scene.server.tasks) == talk.http2.places.http_2_requests == 50
        for task in scene.server.tasks:
            task.cancel()


@in_virtual_time
async def test_while_as_many_requests_run_as_may_each_connection_has_one_at_a_time():
    ended = asyncio.Event()
    async with talking(answers_after(ended)) as (_, talk):
        await talk.exchange()
        talk.http2.places.http_2_requests = 1_000
        streams = [talk.client.ask("GET", "/livez") for _ in range(5)]
        await talk.exchange()
        assert talk.http2.places.http_2_requests == 1_001
        ended.set()
        await talk.exchange()
        assert [talk.client.answers[stream][0] for stream in streams] == [204] * 5
        assert talk.http2.places.http_2_requests == 1_000


@in_virtual_time
async def test_frames_that_come_with_the_preface_are_handled_in_several_iterations():
    scene = Http2Scene()
    async with scene.gateway:
        talk = Talk(scene)
        talk.write(START + request(1) * 1_000)
        assert talk.http2.frames.highest_inbound_stream_id == 1
        assert talk.http2.turns.paused_connections == 1 or talk.wire.closed
        await talk.close()


@in_virtual_time
async def test_a_head_whose_payload_never_ends_has_ten_seconds():
    async with talking() as (_, talk):
        talk.write(START + request(1) + frame(HEADERS, bytes(10), flags=5, stream=3)[:-1])
        await asyncio.sleep(9.0)
        assert not talk.wire.closed
        await asyncio.sleep(2.0)
        assert goaway_code(talk.wire.said) == 11
        assert talk.wire.closed


@in_virtual_time
async def test_a_request_that_ends_without_the_body_it_announces_is_reset():
    async with talking() as (_, talk):
        talk.write(START + request(1, "POST", PATH, ("content-length", "5")) + request(3))
        await asyncio.sleep(0.1)
        resets = [(stream, payload[-1]) for kind, _, stream, payload in frames_of(talk.wire.said) if kind == 3]
        assert resets == [(1, 1)]
        assert not talk.wire.closed


@pytest.mark.parametrize("is_http_2", [True, False])
def test_a_closed_connection_does_not_stay_for_a_client_that_does_not_read(is_http_2: bool) -> None:
    @in_virtual_time
    async def run() -> None:
        scene = Http2Scene()
        async with scene.gateway:
            talk = Talk(scene)
            talk.write(START if is_http_2 else b"GET /livez HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
            talk.wire.unread_bytes = 1_000
            if is_http_2:
                talk.http2.shutdown()
            await asyncio.sleep(LINGER_SECONDS - 1.0)
            assert talk.wire.closed
            assert not talk.wire.aborted
            await asyncio.sleep(2.0)
            assert talk.wire.aborted
            await talk.close()

    run()


@in_virtual_time
async def test_a_connection_that_became_idle_during_a_pause_keeps_its_own_time():
    async with talking() as (_, talk):
        await talk.ask("GET", "/livez")
        talk.http2.stop_timers()
        await asyncio.sleep(50.0)
        stream = talk.client.ask("GET", "/livez")
        await talk.exchange()
        assert stream in talk.client.ended
        talk.http2.restart_timers()
        await talk.exchange(74.0)
        assert not talk.wire.closed
        await talk.exchange(2.0)
        assert talk.wire.closed


@in_virtual_time
async def test_an_answer_that_begins_late_has_its_thirty_seconds_too_and_leaves_no_timer():
    """The timer of an idle connection is later, and each answer that was aborted left one more."""
    async with talking() as (_, talk):
        await talk.ask("GET", "/livez")
        talk.client.h2.update_settings({SettingCodes.INITIAL_WINDOW_SIZE: 0})
        await talk.exchange()
        for _ in range(3):
            await asyncio.sleep(20.0)
            talk.client.ask("GET", "/livez")
            await talk.exchange(29.0)
            assert talk.http2.streams
            await talk.exchange(2.0)
            assert not talk.http2.streams
        loop: Any = asyncio.get_running_loop()
        timers = [each for each in loop._scheduled if not each.cancelled() and "_look_at_time" in repr(each)]  # noqa: SLF001
        assert len(timers) == 1


@in_virtual_time
async def test_unsent_answers_count_among_the_requests_of_a_client_without_credentials():
    async with talking() as (scene, talk):
        scene.places.reserves = True
        talk.write(START + settings_of(0) + b"".join(request(1 + 2 * number) for number in range(30)))
        await asyncio.sleep(0.1)
        assert statuses(talk.wire.said) == {1 + 2 * number: 200 for number in range(MOST_UNVERIFIED)}
        assert scene.places.unverified_streams == 30
        talk.write(settings_of(1_000))
        await asyncio.sleep(0.1)
        assert len(statuses(talk.wire.said)) == 30
        assert scene.places.unverified_streams == scene.places.unsent_bytes == 0


def test_few_streams_of_all_connections_without_credentials_are_in_progress() -> None:
    places = ConnectionPlaces()
    share = ConnectionShare(places, None)
    places.unverified_streams = MOST_UNVERIFIED_STREAMS
    assert share.has_place(0)
    assert not share.has_place(1)
    share.verify(0)
    assert share.has_place(99)
    assert not share.has_place(100)


def test_few_bytes_of_answers_wait_on_all_connections() -> None:
    places = ConnectionPlaces()
    share = ConnectionShare(places, None)
    share.waits(MOST_UNSENT_BYTES)
    assert share.may_wait(1_000_000)
    share.waits(1)
    assert not share.may_wait(1_000_000)
    assert share.may_wait(FEW_UNSENT_BYTES)


@in_virtual_time
async def test_an_answer_that_finds_no_room_to_wait_is_reset():
    async with talking() as (_, talk):
        talk.client.h2.update_settings({SettingCodes.INITIAL_WINDOW_SIZE: 0})
        await talk.exchange()
        talk.http2.places.unsent_bytes = MOST_UNSENT_BYTES
        streams = [talk.client.ask("GET", "/openapi.json") for _ in range(20)]
        await talk.exchange()
        kept = MOST_UNSENT_BYTES + FEW_UNSENT_BYTES
        assert MOST_UNSENT_BYTES < talk.http2.places.unsent_bytes <= kept
        assert 0 < len(talk.http2.streams) < len(streams)


@in_virtual_time
async def test_unfinished_heads_do_not_lengthen_the_time_of_an_answer_that_waits():
    """Only the time of the head was looked at while there was one."""
    async with talking() as (_, talk):
        talk.write(START + settings_of(0) + request(1))
        for number in range(7):
            talk.write(frame(HEADERS, block(), flags=END_STREAM, stream=3 + 2 * number))
            await asyncio.sleep(5.0)
            talk.write(frame(CONTINUATION, flags=END_HEADERS, stream=3 + 2 * number))
        assert 1 in {stream for kind, _, stream, _ in frames_of(talk.wire.said) if kind == RST_STREAM}
        assert not talk.wire.closed
