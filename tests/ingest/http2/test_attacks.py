"""Hostile frames: GOAWAY with RFC 9113's code, and no other connection notices."""

import asyncio
from collections.abc import Callable

import pytest

from tests.ingest.http2.scene import Http2Scene, Talk
from tests.support.http2_attacks import ATTACKS, BROKEN_FRAMES, Attack
from tests.support.http2_frames import START, block, frame, goaway_code, request, statuses
from tests.support.virtual_time import run_in_virtual_time

SIZE = 60_000


def beside_another(told: Callable[[Talk], None], data: bytes) -> None:
    """Say this on one connection while another has a request in progress, which is answered."""

    async def run() -> None:
        scene = Http2Scene()
        async with scene.gateway:
            talk, other = Talk(scene), Talk(scene)
            waiting = other.client.begin("POST", "/v1/streams/orders/records", [("content-type", "application/json")])
            await other.exchange()
            talk.write(data)
            await asyncio.sleep(1.0)
            told(talk)
            other.client.h2.send_data(waiting, b'{"data":"x"}', end_stream=True)
            await other.exchange()
            assert other.client.answers[waiting][0] == 202
            for each in (talk, other):
                await each.close()
            assert not scene.server.tasks
            assert not scene.server.connections

    run_in_virtual_time(run, backend="asyncio")


@pytest.mark.parametrize("attack", ATTACKS, ids=[each.name for each in ATTACKS])
def test_a_flood_ends_its_own_connection(attack: Attack) -> None:
    def told(talk: Talk) -> None:
        assert goaway_code(talk.wire.said) == attack.code
        assert talk.wire.closed is (attack.code is not None)
        if attack.code is None:
            assert statuses(talk.wire.said)[2**31 - 1] == 200

    beside_another(told, attack.make(SIZE))


@pytest.mark.parametrize("name", BROKEN_FRAMES)
def test_a_broken_frame_gets_the_code_of_its_error(name: str) -> None:
    data, code = BROKEN_FRAMES[name]

    def told(talk: Talk) -> None:
        assert goaway_code(talk.wire.said) == code
        assert talk.wire.closed

    beside_another(told, data)


@pytest.mark.parametrize("target", ["x", "http://x/", "/a b", ""])
def test_a_target_that_is_no_path_is_refused(target: str) -> None:
    def told(talk: Talk) -> None:
        # The library refuses an empty one itself.
        assert statuses(talk.wire.said) == ({1: 400} if target else {})
        assert goaway_code(talk.wire.said) == (None if target else 1)

    beside_another(told, START + request(1, "GET", target))


def test_frames_that_are_cut_into_bytes_are_refused_alike() -> None:
    async def run() -> None:
        scene = Http2Scene()
        async with scene.gateway:
            talk = Talk(scene)
            for byte in START + frame(6, bytes(8)) * 401 + request(1):
                talk.write(bytes([byte]))
            assert goaway_code(talk.wire.said) == 11
            await talk.close()

    run_in_virtual_time(run, backend="asyncio")


def test_many_frames_in_one_piece_are_handled_in_several_iterations_of_the_loop() -> None:
    """Else 256 KiB of frames would stop the gateway for half a second."""
    most: list[int] = []

    async def run() -> None:
        scene = Http2Scene()
        async with scene.gateway:
            talk = Talk(scene)
            await talk.ask("GET", "/livez")
            parse = talk.http2.frames.receive_data

            def receive(data: bytes) -> object:
                most.append(len(data))
                return parse(data)

            talk.http2.frames.receive_data = receive  # type: ignore[method-assign, assignment]
            head = frame(1, block("POST", "/v1/streams/orders/records"), flags=4, stream=3)
            talk.write(head + frame(0, b"x", stream=3) * 20_000)
            assert sum(most) < 20_000
            await asyncio.sleep(0.5)
            await talk.close()

    run_in_virtual_time(run, backend="asyncio")
    assert max(most) <= 4_096 + 9
    assert sum(most) > 200_000
