"""The head cache agrees with the parser: it recognises only heads that the parser would parse the same."""

from typing import Any, NamedTuple, cast

import httptools
import pytest
from hypothesis import example, given, strategies as st

from kpl_integrations.ingest.fast_path.head_cache import LONGEST_HEAD, HeadCache
from kpl_integrations.ingest.http.request_head import RecordsHead, records_head

START = b"POST /v1/streams/orders/records HTTP/1.1\r\n"
CHUNKED = START + b"transfer-encoding: chunked\r\n\r\n"
Field = tuple[bytes, bytes]


class Parsed(NamedTuple):
    """The result of a parser: complete messages with target, header fields and body, and whether it failed."""

    messages: list[tuple[bytes, list[Field], bytes]]
    begun: int
    failed: bool


def parsed(received: bytes) -> Parsed:
    messages: list[tuple[bytes, list[Field], bytes]] = []
    now: dict[str, Any] = {"begun": 0}

    class Callbacks:
        def on_message_begin(self) -> None:
            now.update(begun=now["begun"] + 1, url=b"", fields=[], body=b"")

        def on_url(self, url: bytes) -> None:
            now["url"] += url

        def on_header(self, name: bytes, value: bytes) -> None:
            now["fields"].append((name.lower(), value))

        def on_body(self, body: bytes) -> None:
            now["body"] += body

        def on_message_complete(self) -> None:
            messages.append((now["url"], now["fields"], now["body"]))

    parser = httptools.HttpRequestParser(Callbacks())
    try:
        parser.feed_data(received)
    except (httptools.HttpParserError, httptools.HttpParserUpgrade):
        return Parsed(messages, now["begun"], failed=True)
    return Parsed(messages, now["begun"], failed=False)


def the_only_one(received: bytes) -> tuple[bytes, list[Field], bytes] | None:
    found = parsed(received)
    return found.messages[0] if len(found.messages) == found.begun == 1 and not found.failed else None


def head_of(fields: list[Field]) -> RecordsHead:
    return records_head("orders", b"", dict(fields))


HEAD = head_of([])


def request(body: bytes, *fields: bytes, length: bytes | None = None, name: bytes = b"Content-Length") -> bytes:
    said = b"%d" % len(body) if length is None else length
    return START + b"".join(b"%b\r\n" % field for field in (*fields, name + b": " + said)) + b"\r\n" + body


NAMES = st.sampled_from([b"content-length", b"Content-Length", b"CONTENT-LENGTH", b"x-content-length", b"content-type"])
SPACES = st.sampled_from([b"", b" ", b"  ", b"\t", b" \t "])
LENGTHS = st.sampled_from([b"0", b"1", b"2", b"10", b"02", b"+2", b"2a", b"\xb2", b"1 0", b"", b"99999999999999999999"])
BODIES = st.sampled_from([b"", b"a", b"ab", b"0123456789", b"\r\n", b"\r\n\r\n", START, START + b"\r\n"])
OTHERS = st.sampled_from(
    [
        b"host: x",
        b"transfer-encoding: chunked",
        b"x: content-length: 1",
        b"x: y",
        b"x:",
        b"x: \x01",
        b"x : y",
        b" content-length: 2",
        b"authorization: Bearer a",
        b"Authorization:Bearer b",
        b"authorization:  Bearer b",
        b"authorization: Bearer b ",
        b"x-ack: queued",
        b"content-type: application/json",
        b"content-encoding: gzip",
        b"ce-id: 1",
    ]
)
# Values that the gateway reads and that a cached head must repeat.
READ = {b"host", b"transfer-encoding", b"x-ack", b"content-type", b"content-encoding", b"ce-id"}


@st.composite
def received(draw: st.DrawFn) -> bytes:
    """Bytes that resemble a request: mostly valid, with the changes that an attacker would make."""
    line = draw(NAMES) + b":" + draw(SPACES) + draw(LENGTHS) + draw(SPACES)
    fields = [*draw(st.lists(OTHERS, max_size=2)), line, *draw(st.lists(OTHERS, max_size=1))]
    before = draw(st.sampled_from([b"", b"", b"", b"\r\n", b"\r\n\r\n", b"GET / HTTP/1.1\r\n\r\n"]))
    behind = draw(st.sampled_from([b"", b"", b"", b"a", b"\r\n", START]))
    return before + START + b"".join(b"%b\r\n" % field for field in fields) + b"\r\n" + draw(BODIES) + behind


@given(received(), received())
@example(request(b"ab"), request(b"0123456789"))
@example(request(b"ab", b"host: x"), request(b"", b"host: x"))
def test_a_cached_head_means_what_the_parser_returns(first: bytes, second: bytes):
    known = the_only_one(first)
    # Only heads that the parser accepted are cached.
    remembered = None if known is None else HeadCache.of(first, len(known[2]), head_of(known[1]))
    body = None if remembered is None else remembered.body_of(second)
    if body is None:
        return
    target, fields, its_body = cast("Any", the_only_one(second))
    assert known is not None
    assert (target, its_body) == (known[0], body)
    assert len(fields) == len(known[1])
    assert all(
        a == b or (a[0] == b[0] and a[0] not in READ and (a[0] != b"content-length" or int(a[1]) == len(body)))
        for a, b in zip(fields, known[1], strict=True)
    )
    assert remembered is not None
    assert remembered.head.authorization == head_of(fields).authorization


CHUNK_STARTS = st.sampled_from([b"", b"", b"", b"0", b"+", b"-", b"0x", b" ", b"_"])
CHUNK_ENDS = st.sampled_from([b"\r\n", b"\r\n", b"\r\n", b"\n", b";a=b\r\n", b" \r\n", b""])


@st.composite
def chunked(draw: st.DrawFn) -> bytes:
    """A chunked request, mostly valid."""
    sizes = st.sampled_from([b"%x", b"%x", b"%x", b"%X", b"%d"])
    chunks = [
        draw(CHUNK_STARTS) + draw(sizes) % len(chunk) + draw(CHUNK_ENDS) + chunk + draw(CHUNK_ENDS)
        for chunk in (*draw(st.lists(BODIES, max_size=3)), draw(st.sampled_from([b"", b"", b"", b"a: b\r\n"])))
    ]
    head = START + draw(st.sampled_from([b"", b"content-length: 2\r\n"])) + b"Transfer-Encoding: chunked\r\n\r\n"
    return head + b"".join(chunks) + draw(st.sampled_from([b"", b"", b"", b"a", START]))


@given(chunked(), chunked())
@example(CHUNKED + b"2\r\nab\r\n0\r\n\r\n", CHUNKED + b"A\r\n0123456789\r\n1\r\nb\r\n0\r\n\r\n")
def test_a_cached_head_of_a_chunked_request_means_what_the_parser_returns(first: bytes, second: bytes):
    known = the_only_one(first)
    remembered = None if known is None else HeadCache.of(first, len(known[2]), head_of(known[1]))
    body = None if remembered is None else remembered.body_of(second)
    if body is not None:
        assert known is not None
        assert the_only_one(second) == (known[0], known[1], body)


@pytest.mark.parametrize("chunks", [(b"abc",), (b"ab", b"c"), ()])
def test_the_chunks_of_a_repeated_request_are_joined(chunks):
    head = HeadCache.of(CHUNKED + b"1\r\na\r\n0\r\n\r\n", 1, HEAD)
    assert head is not None
    asked = CHUNKED + b"".join(b"%x\r\n%b\r\n" % (len(chunk), chunk) for chunk in chunks) + b"0\r\n\r\n"
    assert head.body_of(asked) == b"".join(chunks)
    assert head.is_whole(asked)
    assert not head.is_whole(asked + b"x")


@pytest.mark.parametrize("behind", [(), (b"x: y",)])
@pytest.mark.parametrize("body", [b"", b"x", b"0123456789", b"x" * 70_000, b"\r\n\r\n"])
def test_another_length_is_the_same_head(body, behind):
    def asked(body: bytes) -> bytes:
        length = b"content-length:  %d " % len(body)
        return START + b"".join(b"%b\r\n" % field for field in (b"host: x", length, *behind)) + b"\r\n" + body

    head = HeadCache.of(asked(b"abc"), 3, HEAD)
    assert head is not None
    assert head.body_of(asked(body)) == body


@pytest.mark.parametrize(
    "other",
    [
        request(b"abc").replace(b"orders", b"others"),
        request(b"abc", b"host: x"),
        request(b"abc").replace(b"POST", b"PUT "),
        request(b"abc").replace(b"1.1", b"1.0"),
        request(b"abc")[:-1],
        request(b"abc") + b"d",
        request(b"abc") + request(b"abc"),
        request(b"abc")[1:],
        request(b"abc", length=b""),
        request(b"abc", length=b"-3"),
        request(b"abc", length=b"0x3"),
        request(b"abc", length="٣".encode()),
        request(b"abc", length=b"3\r\nx: y"),
        request(b"abc", length=b"00000000003"),
        b"",
    ],
)
def test_a_head_that_differs_in_more_than_its_length_is_not_the_cached_one(other):
    head = HeadCache.of(request(b"ab"), 2, HEAD)
    assert head is not None
    assert head.body_of(other) is None


@pytest.mark.parametrize(
    ("first", "body_bytes"),
    [
        (request(b"ab") + b"GET", 2),
        (request(b"ab") + request(b"ab"), 2),
        (request(b"", name=b"x-length"), 0),
        (request(b"ab", b"x: " + b"y" * LONGEST_HEAD), 2),
    ],
    ids=["a part of the next", "two", "no length", "long"],
)
def test_only_a_single_complete_request_of_usual_size_is_cached(first, body_bytes):
    assert HeadCache.of(first, body_bytes, HEAD) is None


def test_a_head_with_another_trace_or_other_credentials_is_known():
    fields = (b"host: x", b"authorization: Bearer a", b"traceparent: 1", b"accept: */*")
    cache = HeadCache.of(request(b"ab", *fields), 2, head_of([(b"authorization", b"Bearer a")]))
    assert cache is not None
    for credentials, trace, body in (
        (b"a", b"2", b"abc"),
        (b"b", b"33", b"x"),
        (b"b", b"33", b""),
        (b"a", b"1", b"ab"),
    ):
        changed = (b"host: x", b"authorization: Bearer " + credentials, b"traceparent: " + trace, b"accept: */*")
        assert cache.body_of(request(body, *changed)) == body
        assert cache.head.authorization == f"Bearer {credentials.decode()}"


@pytest.mark.parametrize("changed", [b"host: y", b"x-ack: delivered", b"ce-id: 2", b"x-partition-key: a", b"origin: z"])
def test_a_head_with_another_value_that_the_gateway_reads_is_parsed(changed):
    name = changed.partition(b":")[0]
    cache = HeadCache.of(request(b"ab", name + b": 1"), 2, HEAD)
    assert cache is not None
    assert cache.body_of(request(b"ab", changed)) is None


@pytest.mark.parametrize("padding", [0, 3_800])
@pytest.mark.parametrize("is_verified", [True, False])
def test_a_connection_stores_few_bytes_of_verified_credentials_only(padding, is_verified):
    cache = HeadCache.of(request(b"ab", b"authorization: a"), 2, head_of([(b"authorization", b"a")]))
    assert cache is not None
    for number in range(200):
        shown = b"%d" % number + b"x" * padding
        assert cache.body_of(request(b"ab", b"authorization: " + shown)) == b"ab"
        assert cache.head.authorization == shown.decode()
        if is_verified:
            cache.keep_credentials()
    stored = cache._heads  # noqa: SLF001 - what it stores
    assert bool(stored) is is_verified
    assert sum(2 * len(line) + 256 for line in stored) <= 8_192
    assert cache.body_of(request(b"ab", b"authorization: a")) == b"ab"


def test_a_head_of_many_lines_is_not_cached():
    assert HeadCache.of(request(b"ab", *[b"a:"] * 70), 2, HEAD) is None


def test_another_id_with_the_first_credentials_is_not_stored_as_other_credentials():
    """The credentials of the request before, which were refused, must not become those of the first head."""
    cache = HeadCache.of(
        request(b"ab", b"authorization: a", b"x-request-id: 1"), 2, head_of([(b"authorization", b"a")])
    )
    assert cache is not None
    for credentials, request_id in ((b"wrong", b"1"), (b"a", b"2"), (b"wrong", b"3"), (b"a", b"1")):
        fields = (b"authorization: " + credentials, b"x-request-id: " + request_id)
        assert cache.body_of(request(b"ab", *fields)) == b"ab"
        assert cache.head.authorization == credentials.decode()
        if credentials != b"wrong":
            cache.keep_credentials()


def test_stored_credentials_have_no_id_and_no_trace_of_another_request():
    cache = HeadCache.of(
        request(b"ab", b"authorization: a", b"x-request-id: 1"), 2, head_of([(b"authorization", b"a")])
    )
    assert cache is not None
    for request_id, expected in ((b"2", b"2"), (b"1", None)):
        assert cache.body_of(request(b"ab", b"authorization: b", b"x-request-id: " + request_id)) == b"ab"
        cache.keep_credentials()
        assert cache.head.authorization == "b"
        # The first head of this test was made without an id.
        assert (cache.head.correlation and cache.head.correlation.request_id) == expected
