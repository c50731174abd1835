"""Answers whose client decides when it takes them: all bytes, in order, within its windows, and in turn."""

from h2.config import H2Configuration
from h2.connection import H2Connection
from h2.events import DataReceived, StreamEnded
from h2.settings import SettingCodes
from hypothesis import given, strategies as st

from kpl_integrations.ingest.http.connection_flow import LEAST_BYTES, SEND_SECONDS
from kpl_integrations.ingest.http2.frames import server_frames
from kpl_integrations.ingest.http2.sending import AnswerSender

FIELDS = [(":method", "GET"), (":scheme", "http"), (":authority", "x"), (":path", "/")]


class Pair:
    """A client, and the sender of its server. The client takes so many bytes of each answer at first."""

    def __init__(self, *, answers: int, window: int) -> None:
        self.client = H2Connection(H2Configuration(client_side=True))
        self.client.initiate_connection()
        self.client.update_settings({SettingCodes.INITIAL_WINDOW_SIZE: window})
        self.server = server_frames(1_000, most_streams=100, count_fields=lambda _: None)
        self.server.initiate_connection()
        self.streams = [1 + 2 * number for number in range(answers)]
        for stream in self.streams:
            self.client.send_headers(stream, FIELDS, end_stream=True)
        self.server.receive_data(self.client.data_to_send())
        for stream in self.streams:
            self.server.send_headers(stream, [(":status", "200")])
        self.ended: list[int] = []
        self.sent: list[int] = []
        self.waits: list[int] = []
        self.is_paused = False
        self.sender = AnswerSender(
            self.server,
            flush=self.flush,
            is_paused=lambda: self.is_paused,
            sent=self.sent.append,
            ended=self.ended.append,
            failed=self.fail,
            waits=self.waits.append,
        )
        self.heard = dict.fromkeys(self.streams, b"")
        self.complete: list[int] = []

    def flush(self) -> None:
        for event in self.client.receive_data(self.server.data_to_send()):
            if isinstance(event, DataReceived):
                self.heard[event.stream_id] += event.data
            elif isinstance(event, StreamEnded):
                self.complete.append(event.stream_id)

    def fail(self, stream: int) -> None:
        self.sender.drop(stream)

    def open(self, size: int, stream: int, now: float = 0.0) -> None:
        self.client.increment_flow_control_window(size, stream or None)
        self.server.receive_data(self.client.data_to_send())
        self.sender.window_opened(stream, now)
        self.flush()


def body_of(stream: int, size: int) -> bytes:
    return (b"%d." % stream * size)[:size]


@given(
    sizes=st.lists(st.integers(0, 60_000), min_size=1, max_size=6),
    window=st.integers(0, 40_000),
    opened=st.lists(st.tuples(st.integers(1, 30_000), st.integers(0, 6)), max_size=30),
)
def test_each_client_gets_all_bytes_in_order_and_none_beyond_its_windows(sizes, window, opened):
    pair = Pair(answers=len(sizes), window=window)
    allowed = dict.fromkeys(pair.streams, window)
    allowed[0] = 65_535
    for stream, size in zip(pair.streams, sizes, strict=True):
        pair.sender.send(stream, body_of(stream, size), 0.0, is_end=True)
    pair.flush()
    for size, chosen in opened:
        stream = 0 if chosen == 0 else pair.streams[(chosen - 1) % len(sizes)]
        if stream in pair.complete:
            continue
        allowed[stream] += size
        pair.open(size, stream)
        assert all(len(pair.heard[each]) <= allowed[each] for each in pair.streams)
        assert sum(pair.waits) == pair.sender.unsent_bytes == sum(sizes) - sum(pair.sent)
        assert sum(map(len, pair.heard.values())) == sum(pair.sent) <= allowed[0]
        left = min(allowed[0] - sum(pair.sent), sum(allowed[each] - len(pair.heard[each]) for each in pair.streams))
        waiting = [each for each in pair.streams if each in pair.sender]
        assert not left or all(allowed[each] == len(pair.heard[each]) for each in waiting)
    pair.open(2**30, 0)
    for stream in pair.streams:
        if stream not in pair.complete:
            pair.open(60_000, stream)
    assert pair.heard == {stream: body_of(stream, size) for stream, size in zip(pair.streams, sizes, strict=True)}
    assert sorted(pair.ended) == sorted(pair.complete) == pair.streams
    assert pair.sender.next_end() is None


def test_answers_take_turns_frame_by_frame() -> None:
    pair = Pair(answers=3, window=200_000)
    pair.is_paused = True
    for stream in pair.streams:
        pair.sender.send(stream, bytes(40_000), 0.0, is_end=True)
    pair.is_paused = False
    pair.sender.serve(0.0)
    pair.flush()
    # The connection's window has 65,535 bytes.
    assert [len(data) for data in pair.heard.values()] == [16_384 + 16_383, 16_384, 16_384]


def test_a_larger_connection_window_of_a_byte_costs_one_frame_however_many_wait() -> None:
    pair = Pair(answers=90, window=200_000)
    for stream in pair.streams:
        pair.sender.send(stream, bytes(40_000), 0.0, is_end=True)
    before = len(pair.sent)
    for _ in range(50):
        pair.open(1, 0)
    assert len(pair.sent) == before + 50


def test_new_settings_let_answers_go_on() -> None:
    pair = Pair(answers=2, window=0)
    for stream in pair.streams:
        pair.sender.send(stream, b"answer", 0.0, is_end=True)
    pair.client.update_settings({SettingCodes.INITIAL_WINDOW_SIZE: 4})
    pair.server.receive_data(pair.client.data_to_send())
    pair.sender.windows_changed(1.0)
    pair.flush()
    assert set(pair.heard.values()) == {b"answ"}


def test_an_answer_is_overdue_when_its_client_took_nothing_for_so_long() -> None:
    pair = Pair(answers=2, window=1)
    first, second = pair.streams
    for stream in pair.streams:
        pair.sender.send(stream, bytes(5_000), 0.0, is_end=True)
    pair.open(LEAST_BYTES - 2, first, now=10.0)
    # Bytes one by one keep no answer.
    assert sorted(pair.sender.overdue(SEND_SECONDS)) == pair.streams
    pair.open(1, first, now=20.0)
    assert pair.sender.next_end() == SEND_SECONDS
    assert pair.sender.overdue(SEND_SECONDS) == [second]
    pair.sender.drop(second)
    assert pair.sender.next_end() == 20.0 + SEND_SECONDS


def test_a_stream_that_was_reset_in_the_same_piece_is_forgotten() -> None:
    pair = Pair(answers=2, window=0)
    first, second = pair.streams
    for stream in pair.streams:
        pair.sender.send(stream, b"answer", 0.0, is_end=True)
    for stream in pair.streams:
        pair.client.increment_flow_control_window(10, stream)
    pair.client.reset_stream(first)
    pair.server.receive_data(pair.client.data_to_send())
    # The connection handles the events one after the other.
    pair.sender.windows_changed(1.0)
    pair.flush()
    assert first not in pair.sender
    assert pair.ended == [second]
