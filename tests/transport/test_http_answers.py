"""Answers that h11 refuses are refused, and what is accepted is read as h11 reads it."""

import asyncio
import contextlib
import time
from typing import Any

import h11
import pytest
from hypothesis import example, given, settings, strategies as st

from kpl_core.transport.http_answers import parsed_head
from kpl_core.transport.http_connections import _Connection, _Reader

OK = b"HTTP/1.1 200 OK\r\n"
CHUNKED = OK + b"Transfer-Encoding: chunked\r\n\r\n"

# Refused by h11 too.
REFUSED = {
    "two lengths": OK + b"Content-Length: 1\r\nContent-Length: 2\r\n\r\nab",
    "two lengths in one field": OK + b"Content-Length: 1, 2\r\n\r\nab",
    "a negative length": OK + b"Content-Length: -1\r\n\r\n",
    "a length with a sign": OK + b"Content-Length: +2\r\n\r\nab",
    "a length with an underscore": OK + b"Content-Length: 1_0\r\n\r\n0123456789",
    "a hexadecimal length": OK + b"Content-Length: 0x2\r\n\r\nab",
    "an empty length": OK + b"Content-Length:\r\n\r\n",
    "a length of 21 digits": OK + b"Content-Length: 000000000000000000002\r\n\r\nab",
    "a length of other digits": OK + b"Content-Length: \xb2\r\n\r\nab",
    "a chunk that is longer than its size": CHUNKED + b"2\r\nabXX0\r\n\r\n",
    "a chunk without a line end": CHUNKED + b"2\r\nab0\r\n\r\n",
    "a chunk's size with 0x": CHUNKED + b"0x2\r\nab\r\n0\r\n\r\n",
    "a chunk's size with a sign": CHUNKED + b"+2\r\nab\r\n0\r\n\r\n",
    "a negative chunk's size": CHUNKED + b"-2\r\nab\r\n0\r\n\r\n",
    "a chunk's size with an underscore": CHUNKED + b"0_2\r\nab\r\n0\r\n\r\n",
    "a chunk's size after a blank": CHUNKED + b" 2\r\nab\r\n0\r\n\r\n",
    "no chunk's size": CHUNKED + b";x\r\nab\r\n0\r\n\r\n",
    "a chunk's size of 21 digits": CHUNKED + b"000000000000000000002\r\nab\r\n0\r\n\r\n",
    "a trailer that is no field": CHUNKED + b"0\r\nnot a field\r\n\r\n",
    "another coding": OK + b"Transfer-Encoding: gzip\r\n\r\nab",
    "two codings": OK + b"Transfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n",
    "chunked twice": OK + b"Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    "a coding that begins like chunked": OK + b"Transfer-Encoding: chunkedfoo\r\n\r\n0\r\n\r\n",
    "status 99999": b"HTTP/1.1 99999 OK\r\nContent-Length: 0\r\n\r\n",
    "status 20": b"HTTP/1.1 20 OK\r\nContent-Length: 0\r\n\r\n",
    "status 099": b"HTTP/1.1 099 OK\r\nContent-Length: 0\r\n\r\n",
    "status +20": b"HTTP/1.1 +20 OK\r\nContent-Length: 0\r\n\r\n",
    "status 2_0": b"HTTP/1.1 2_0 OK\r\nContent-Length: 0\r\n\r\n",
    "a status that goes on": b"HTTP/1.1 200OK\r\nContent-Length: 0\r\n\r\n",
    "another protocol": b"HTTP/1.1 101 Switching\r\nUpgrade: x\r\n\r\n",
    "a version of two digits": b"HTTP/1.11 200 OK\r\nContent-Length: 0\r\n\r\n",
    "no version": b"HTTP 200 OK\r\nContent-Length: 0\r\n\r\n",
    "a field without a colon": OK + b"Content-Length 0\r\n\r\n",
    "a name with a blank": OK + b"Content-Length : 2\r\n\r\nab",
    "a field without a name": OK + b": 2\r\n\r\nab",
    "a null byte in a value": OK + b"X: a\0b\r\nContent-Length: 0\r\n\r\n",
    "a carriage return in a value": OK + b"X: a\rb\r\nContent-Length: 0\r\n\r\n",
    "a line feed in the reason": b"HTTP/1.1 200 O\rK\r\nContent-Length: 0\r\n\r\n",
    "a folded first line": OK + b" X: 1\r\nContent-Length: 0\r\n\r\n",
}  # fmt: skip
# h11 accepts these. RFC 9112 calls the first an attack (6.3), the second obsolete (5.2), and the others invalid.
REFUSED_BY_US_ONLY = {
    "a length beside chunked": OK + b"Content-Length: 2\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    "a folded line": OK + b"X: 1\r\n 2\r\nContent-Length: 0\r\n\r\n",
    "a control character in a value": OK + b"X: a\x01b\r\nContent-Length: 0\r\n\r\n",
    "version 2.0": b"HTTP/2.0 200 OK\r\nContent-Length: 0\r\n\r\n",
}
ACCEPTED = {
    "a length": OK + b"Content-Length: 2\r\n\r\nab",
    "a length twice": OK + b"Content-Length: 2\r\nContent-Length: 2, 2\r\n\r\nab",
    "leading zeros": OK + b"Content-Length: 0002\r\n\r\nab",
    "no reason": b"HTTP/1.1 200\r\nContent-Length: 2\r\n\r\nab",
    "a reason with other letters": b"HTTP/1.1 200 D\xe4s\r\nX: \xe4 b\t\r\nContent-Length: 2\r\n\r\nab",
    "an empty value": OK + b"X:\r\nContent-Length: 2\r\n\r\nab",
    "chunks": CHUNKED + b"1;x=y\r\na\r\n1 \r\nb\r\n0\r\n\r\n",
    "a trailer": CHUNKED + b"2\r\nab\r\n0\r\nX: 1\r\nY: 2\r\n\r\n",
    "no body": b"HTTP/1.1 204 No\r\nContent-Length: 2\r\n\r\n",
    "up to the end": b"HTTP/1.0 200 OK\r\n\r\nab",
    "an interim answer": b"HTTP/1.1 100 Continue\r\n\r\n" + OK + b"Content-Length: 2\r\n\r\nab",
    "a status without a meaning": b"HTTP/1.1 999 Odd\r\nContent-Length: 2\r\n\r\nab",
}

Read = tuple[int, list[tuple[str, str]], bytes]


def by_us(answer: bytes) -> Read | None:
    """Return status, header fields and body, or None if the answer is refused or not complete."""

    async def read() -> Read:
        reader = _Reader(limit=64 * 1024, loop=asyncio.get_running_loop())
        reader.feed_data(answer)
        reader.feed_eof()
        nothing: Any = None
        got, _ = await _Connection(nothing, reader, nothing)._answer()  # noqa: SLF001
        return got.status, sorted(got.headers.items()), got.body

    try:
        return asyncio.run(read())
    except (ValueError, asyncio.IncompleteReadError):
        return None


def by_h11(answer: bytes) -> Read | None:
    """Return the same as `by_us`, as h11 reads it."""
    connection = h11.Connection(h11.CLIENT)
    connection.send(h11.Request(method="POST", target="/", headers=[("Host", "h"), ("Content-Length", "0")]))
    connection.send(h11.EndOfMessage())
    connection.receive_data(answer)
    connection.receive_data(b"")
    headers: dict[str, str] = {}
    status, body = 0, b""
    try:
        while not isinstance(event := connection.next_event(), h11.EndOfMessage):
            if isinstance(event, h11.Response):
                status = event.status_code
                for name, value in event.headers:
                    text = value.decode("latin-1")
                    key = name.decode()
                    headers[key] = f"{headers[key]}, {text}" if key in headers else text
            elif isinstance(event, h11.Data):
                body += event.data
            elif not isinstance(event, h11.InformationalResponse):
                return None
    except h11.RemoteProtocolError:
        return None
    return status, sorted(headers.items()), body


def without_lengths(read: Read | None) -> Read | None:
    """Leave the length out: h11 writes several equal ones as one."""
    return read and (read[0], [each for each in read[1] if each[0] != "content-length"], read[2])


@pytest.mark.parametrize("answer", REFUSED.values(), ids=REFUSED)
def test_an_answer_that_h11_refuses_is_refused(answer):
    assert (by_us(answer), by_h11(answer)) == (None, None)


@pytest.mark.parametrize("answer", REFUSED_BY_US_ONLY.values(), ids=REFUSED_BY_US_ONLY)
def test_an_answer_whose_end_another_reader_may_see_elsewhere_is_refused(answer):
    assert by_us(answer) is None
    assert by_h11(answer) is not None


@pytest.mark.parametrize("answer", ACCEPTED.values(), ids=ACCEPTED)
def test_a_valid_answer_is_read_as_h11_reads_it(answer):
    read = by_us(answer)
    assert read is not None
    assert read[2] == (b"" if answer.startswith(b"HTTP/1.1 204") else b"ab")
    assert without_lengths(read) == without_lengths(by_h11(answer))


pieces = st.sampled_from(
    [
        *[b"%c" % each for each in b"\r\n \t02+-_x;,:\0\xe4"],
        b"\r\n",
        b"Content-Length: 2\r\n",
        b"Transfer-Encoding: chunked\r\n",
        b"chunked",
        b"HTTP/1.1 200 OK\r\n",
    ]
)


@given(st.sampled_from(sorted(ACCEPTED.values())), st.lists(st.tuples(st.integers(0, 200), st.integers(0, 2), pieces)))
@example(b"HTTP/1.1 204 No\r\nContent-Length: 2\r\n\r\n", [(32, 0, b"0")])
@settings(max_examples=150)
def test_every_changed_answer_that_is_accepted_is_read_as_h11_reads_it(answer, changes):
    for place, deleted, inserted in changes[:3]:
        at = place % (len(answer) + 1)
        answer = answer[:at] + inserted + answer[at + deleted :]
    read = by_us(answer)
    if read is not None:
        assert without_lengths(read) == without_lengths(by_h11(answer))


@pytest.mark.parametrize("filling", [b" ", b"\t", b"a", b"a ", b",", b":", b"\r", b"1,"])
def test_a_head_of_64_kib_costs_little(filling):
    """An expression that repeats repetitions of blanks takes 30 s for it."""
    many = filling * (60_000 // len(filling))
    for head in (OK + b"X:" + many + b"\0", OK + many, b"HTTP/1.1 200 " + many + b"\0", OK + b"Content-Length:" + many):
        began = time.perf_counter()
        with contextlib.suppress(ValueError):
            parsed_head(head + b"\r\n\r\n")
        assert time.perf_counter() - began < 0.5
