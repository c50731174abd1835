"""What a client may send over HTTP/2 before it is parsed: control frames, header blocks, GOAWAY; cut anywhere."""

from itertools import pairwise

import pytest
from h2.errors import ErrorCodes
from hypothesis import given, strategies as st

from kpl_integrations.ingest.http2.frame_bounds import TOKENS_PER_ANSWER, FrameBounds, TooMuch
from tests.support.http2_frames import (
    CONTINUATION,
    DATA,
    END_HEADERS,
    END_STREAM,
    GOAWAY,
    HEADERS,
    PING,
    PREFACE,
    PRIORITY,
    RST_STREAM,
    SETTINGS,
    WINDOW_UPDATE,
    frame,
)

MOST = 1_000
CONTROL = [SETTINGS, PING, RST_STREAM, WINDOW_UPDATE, PRIORITY, 0xFE]

frames = st.builds(
    lambda kind, payload, flags: (kind, frame(kind, payload, flags=flags | END_HEADERS, stream=1)),
    st.sampled_from([DATA, HEADERS, GOAWAY, *CONTROL]),
    st.binary(max_size=40),
    st.sampled_from([0, END_STREAM]),
)


def started(now: float = 0.0) -> FrameBounds:
    bounds = FrameBounds(MOST, now)
    assert bounds.receive(PREFACE, now) == PREFACE
    return bounds


def pieces(data: bytes, cuts: list[int]) -> list[bytes]:
    places = [0, *sorted(cut % (len(data) + 1) for cut in cuts), len(data)]
    return [data[start:end] for start, end in pairwise(places)]


@given(st.lists(frames, max_size=20), st.lists(st.integers(0, 2_000), max_size=8))
def test_everything_but_goaway_is_passed_on_wherever_it_is_cut(sent, cuts):
    bounds = FrameBounds(MOST, 0.0)
    data = PREFACE + b"".join(each for _, each in sent)
    passed = b"".join(bounds.receive(piece, 0.0) for piece in pieces(data, cuts))
    assert passed == PREFACE + b"".join(each for kind, each in sent if kind != GOAWAY)
    assert bounds.has_left == any(kind == GOAWAY for kind, _ in sent)


@given(st.lists(frames, max_size=20), st.lists(st.integers(0, 2_000), max_size=8))
def test_frames_are_counted_wherever_they_are_cut(sent, cuts):
    bounds = FrameBounds(MOST, 0.0)
    counted = 0
    for piece in pieces(PREFACE + b"".join(each for _, each in sent), cuts):
        counted += bounds.frames_in(piece)
        bounds.receive(piece, 0.0)
    assert counted == len(sent)


@pytest.mark.parametrize(
    ("kind", "payload", "flags"),
    [
        *[(kind, bytes(8), 0) for kind in CONTROL],
        (DATA, b"", 0),
        (CONTINUATION, b"", 0),
        (GOAWAY, bytes(8), 0),
    ],
)
def test_a_frame_that_costs_its_client_nothing_takes_a_token(kind, payload, flags):
    bounds = started()
    for _ in range(200):
        bounds.receive(frame(kind, payload, flags=flags), 0.0)
    with pytest.raises(TooMuch, match="more than 50 control frames a second"):
        bounds.receive(frame(kind, payload, flags=flags), 0.0)


@pytest.mark.parametrize(
    ("kind", "payload", "flags"),
    [(DATA, b"x", 0), (DATA, b"", END_STREAM), (HEADERS, b"x", END_HEADERS)],
)
def test_bodies_and_requests_take_none(kind, payload, flags):
    bounds = started()
    for _ in range(1_000):
        bounds.receive(frame(kind, payload, flags=flags), 0.0)


def test_time_and_answers_give_tokens_back_up_to_the_most():
    bounds = started()
    for _ in range(200):
        bounds.receive(frame(PING, bytes(8)), 0.0)
    bounds.receive(frame(PING, bytes(8)), 0.02)
    bounds.earn(TOKENS_PER_ANSWER)
    for _ in range(4):
        bounds.receive(frame(PING, bytes(8)), 0.02)
    bounds.earn(10_000)
    for _ in range(200):
        bounds.receive(frame(PING, bytes(8)), 0.02)
    with pytest.raises(TooMuch):
        bounds.receive(frame(PING, bytes(8)), 0.02)


@given(st.lists(st.floats(0, 2), max_size=60), st.integers(1, 200))
def test_no_client_gets_more_frames_through_than_the_bound(gaps, per_step):
    bounds, now, passed = started(), 0.0, 0
    try:
        for gap in gaps:
            now += gap
            for _ in range(per_step):
                bounds.receive(frame(PING, bytes(8)), now)
                passed += 1
    except TooMuch:
        pass
    assert passed <= 200 + 50 * now + 1e-6


def test_a_header_block_is_bounded_with_its_continuations_before_it_is_complete():
    bounds = started()
    bounds.receive(frame(HEADERS, bytes(600), stream=1), 5.0)
    assert bounds.head_began_at == 5.0
    bounds.receive(frame(CONTINUATION, bytes(400), stream=1), 6.0)
    assert bounds.head_began_at == 5.0
    with pytest.raises(TooMuch, match="a header block of more than 1,000 bytes"):
        bounds.receive(frame(CONTINUATION, bytes(1), stream=1)[:9], 6.0)


def test_the_next_header_block_begins_anew():
    bounds = started()
    for _ in range(3):
        bounds.receive(frame(HEADERS, bytes(600), stream=1), 5.0)
        bounds.receive(frame(CONTINUATION, bytes(400), flags=END_HEADERS, stream=1), 6.0)
        assert bounds.head_began_at is None


def test_a_frame_is_refused_by_its_length_before_any_of_its_payload_is_kept():
    bounds = started()
    with pytest.raises(TooMuch) as refused:
        bounds.receive(frame(DATA, bytes(16_385), stream=1)[:9], 0.0)
    assert refused.value.code == ErrorCodes.FRAME_SIZE_ERROR
    assert started().receive(frame(DATA, bytes(16_384), stream=1)[:9], 0.0)


def test_a_header_block_has_begun_until_all_of_its_payload_is_there():
    bounds = started()
    head = frame(HEADERS, b"xyz", flags=END_HEADERS, stream=1)
    for end in range(1, len(head)):
        bounds.receive(head[end - 1 : end], float(end))
        assert bounds.head_began_at == (None if end < 9 else 9.0)
    bounds.receive(head[-1:], 20.0)
    assert bounds.head_began_at is None


def test_data_of_a_request_that_has_ended_takes_a_token_and_other_data_none():
    bounds = FrameBounds(MOST, 0.0, lambda stream_id: stream_id == 1)
    bounds.receive(PREFACE + frame(DATA, b"x", stream=3) * 1_000, 0.0)
    bounds.receive(frame(DATA, b"x", stream=1) * 200, 0.0)
    with pytest.raises(TooMuch):
        bounds.receive(frame(DATA, b"x", stream=1), 0.0)


def test_fields_take_tokens_and_bytes_of_answers_give_some():
    bounds = started()
    bounds.take_for_fields(15, 0.0)
    bounds.take_for_fields(200 * 16, 0.0)
    with pytest.raises(TooMuch):
        bounds.take_for_fields(16, 0.0)
    bounds = started()
    bounds.take_for_fields(200 * 16, 0.0)
    for _ in range(4_096):
        bounds.earn_for_data(1)
    bounds.take_for_fields(32, 0.0)
    with pytest.raises(TooMuch):
        bounds.take_for_fields(16, 0.0)


def test_new_settings_take_a_token_for_every_four_answers_that_wait():
    bounds = started()
    bounds.take_for_answers(3, 0.0)
    for _ in range(8):
        bounds.take_for_answers(100, 0.0)
    with pytest.raises(TooMuch):
        bounds.take_for_answers(4, 0.0)
