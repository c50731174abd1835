"""Decode a large body in steps, so that the event loop can do other work between them.

A body is cut where a record ends: NDJSON at line breaks, a JSON array between its elements, an OTLP request in protobuf
between its fields. Each run of whole records is decoded by the same decoders as a small body. A compressed body is
never in memory as a whole. What cannot be cut, such as a single record, is bounded instead.

The functions are generators. They yield after each step of about a millisecond and return their result.
"""

import hashlib
import re
import sys
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from functools import partial
from typing import Final, NamedTuple

import msgspec

from kpl_integrations.ingest.decoding.cloud_events import batched_events, is_binary_mode, structured_event
from kpl_integrations.ingest.decoding.decoded import (
    Decoded,
    DecodeLimits,
    DecodeRefusal,
    NeighbourKeys,
    random_partition_key,
)
from kpl_integrations.ingest.decoding.inflate import inflated_pieces
from kpl_integrations.ingest.decoding.json_records import (
    json_body,
    ndjson_body,
    record_in_steps,
    require_count,
)
from kpl_integrations.ingest.decoding.json_text import BLANKS, json_pattern, printable, require_depth, too_deep
from kpl_integrations.ingest.decoding.request_body import decode, decode_plain, media_type_of

# A step handles at most so many bytes and, about, so many records.
STEP_BYTES: Final = 32_768
STEP_RECORDS: Final = 500
# A step looks at so many brackets and strings: about 1 ms.
STEP_TOKENS: Final = 2_000
# A run with more bytes has one record, because shorter records of two pieces have fewer.
_LONG_BYTES: Final = 2 * STEP_BYTES
_HASH_BYTES: Final = 1 << 20
_MOST_PIECES: Final = 256
# After an array come a few brackets, spaces and, in a PutRecords request, the name of the stream.
_MOST_TAIL_BYTES: Final = 8_192
# An object or an array without another one in it, a string, a run of equal brackets, or the quotation mark of a string
# that does not end here. Each alternative begins with one character, so that `re` searches for these characters only.
TOKEN: Final = re.compile(
    rb'\{(?:[^][{}"]++|"(?:[^"\\]++|\\.)*+")*+\}|\[(?:[^][{}"]++|"(?:[^"\\]++|\\.)*+")*+\]'
    rb'|"(?:[^"\\]++|\\.)*+"|\[\[*+|\]\]*+|\{\{*+|\}\}*+|"',
    re.DOTALL,
)
# The rest of a string that begins before.
_STRING_END: Final = re.compile(rb'(?:[^"\\]++|\\.)*+"', re.DOTALL)
# The change of the depth by a bracket.
_SIGNS: Final = {ord("["): 1, ord("{"): 1, ord("]"): -1, ord("}"): -1}
_RECORDS_HEAD: Final = json_pattern(rb' \{ "records" : \[')
_RECORDS_TAIL: Final = json_pattern(rb" \} ")
_BATCH_HEAD: Final = json_pattern(rb" \[")
_BATCH_TAIL: Final = json_pattern(rb" ")
_LINE_BREAK: Final = b"\n"


def hash_in_steps(hashed: "hashlib.blake2b | hashlib._Hash", body: bytes) -> Generator[None, None, None]:
    """Add a body to a hash."""
    for at in range(0, len(body), _HASH_BYTES):
        hashed.update(memoryview(body)[at : at + _HASH_BYTES])
        yield


class ArrayRuns:
    """Cuts the text of a JSON array into runs of whole elements, looking only at brackets and strings.

    `too_deep` is the refusal of an element that is nested more than `max_depth` deep.
    `is_closed` is True after the bracket that closes the array; `tail` is the text after it.
    """

    def __init__(self, most_bytes: int, max_depth: int, too_deep: DecodeRefusal) -> None:
        self._most_bytes = most_bytes
        self._max_depth = max_depth
        self._too_deep = too_deep
        self._text = b""
        self._at = 0
        self._depth = 0
        self._is_in_string = False
        self.is_closed = False
        self.tail = b""

    def feed(self, piece: bytes) -> Iterator[bytes]:
        """Add text, and return the runs that are complete: elements with their commas, without the brackets.

        Raises:
            DecodeRefusal: an element is too large, or nested too deep.
        """
        if self.is_closed:
            self.tail += piece
            yield b""
            return
        self._text += piece
        if self._is_in_string:
            string_end = _STRING_END.match(self._text, self._at)
            self._is_in_string = string_end is None
            self._at = _end_of_whole_characters(self._text, self._at) if string_end is None else string_end.end()
        if not self._is_in_string:
            yield from self._complete_runs()
        if len(self._text) > self._most_bytes:
            raise uncut(self._most_bytes)
        # A step in which no element ended.
        yield b""

    def _complete_runs(self) -> Iterator[bytes]:
        text, at, depth = self._text, self._at, self._depth
        start = whole = count = 0
        for tokens, token in enumerate(TOKEN.finditer(text, at), 1):
            if not tokens % STEP_TOKENS:
                yield b""
            found = token.group()
            if found == b'"':
                # The rest of the string is in the next piece.
                at, self._is_in_string = _end_of_whole_characters(text, token.end()), True
                break
            at = token.end()
            is_leaf = found[0] != found[-1]
            step = 0 if is_leaf else _SIGNS.get(found[0], 0) * len(found)
            if depth + step < 0:
                # The bracket after those of the element closes the array.
                yield text[start : self._close(token.start() + depth)]
                return
            depth += step
            if depth + is_leaf > self._max_depth:
                raise self._too_deep
            if not depth and (is_leaf or step < 0):
                whole, count = at, count + 1
                if count >= STEP_RECORDS or whole - start >= STEP_BYTES:
                    yield text[start:whole]
                    start, count = whole, 0
        else:
            at = len(text)
        if whole > start:
            yield text[start:whole]
            start = whole
        # The start of an element, for the next piece.
        self._text, self._at, self._depth = text[start:], at - start, depth

    def _close(self, end: int) -> int:
        if self._text[end : end + 1] != b"]":
            detail = "this is not JSON: the array ends with a brace; end it with a bracket"
            raise DecodeRefusal(400, "malformed", detail, field="$")
        self.is_closed, self.tail, self._text = True, self._text[end + 1 :], b""
        return end


def _end_of_whole_characters(text: bytes, at: int) -> int:
    """Return the end of a string's text from `at` on, without a last backslash that escapes what follows."""
    rest = text[at:]
    return len(text) - (len(rest) - len(rest.rstrip(b"\\"))) % 2


def elements_in_steps(
    head: "re.Match[bytes]",
    pieces: Iterable[bytes],
    runs: ArrayRuns,
    tail: "re.Pattern[bytes] | None",
    most_tail_bytes: int = _MOST_TAIL_BYTES,
) -> Iterator[bytes]:
    """Return JSON arrays of successive elements of the array that begins after `head`, a match in the first piece.

    An empty text is a step in which no element ended. With `tail=None` the caller checks what follows the array.

    Raises:
        DecodeRefusal: an element is too large, the array does not end, or what follows it does not match `tail` or is
            larger than `most_tail_bytes`.
    """
    first = head.string[head.end() :]
    is_first = True
    for piece in _chain(first, pieces):
        for run_text in runs.feed(piece):
            text = run_text.lstrip(BLANKS)
            if not is_first and text:
                if text[:1] != b",":
                    detail = "this is not JSON: two elements of the array have no comma between them"
                    raise DecodeRefusal(400, "malformed", detail, field="$")
                text = text[1:]
                if not text.strip(BLANKS):
                    detail = "this is not JSON: no element follows the last comma of the array"
                    raise DecodeRefusal(400, "malformed", detail, field="$")
            is_first = is_first and not text
            yield b"[" + text + b"]" if text else b""
        if len(runs.tail) > most_tail_bytes:
            detail = f"after the array come more than {most_tail_bytes:,} bytes; send nothing after a large array"
            raise DecodeRefusal(400, "malformed", detail, field="$")
    if not runs.is_closed:
        raise DecodeRefusal(400, "truncated", "the JSON ends too early; send all of it", field="$")
    if tail is not None and tail.fullmatch(runs.tail) is None:
        shown = printable(runs.tail[:100].decode("utf-8", "replace"))
        detail = f"after the array comes {shown!r}; send a large body with the array as its last member"
        raise DecodeRefusal(400, "malformed", detail, field="$")


def _chain(first: bytes, rest: Iterable[bytes]) -> Iterator[bytes]:
    for at in range(0, len(first), STEP_BYTES):
        yield first[at : at + STEP_BYTES]
    yield from rest


def lines_in_steps(pieces: Iterable[bytes], most_bytes: int) -> Iterator[bytes]:
    """Return runs of whole lines; an empty one is a step in which no line ended.

    Raises:
        DecodeRefusal: a line is too large.
    """
    rest = b""
    for piece in pieces:
        end = piece.rfind(_LINE_BREAK) + 1
        if not end:
            rest += piece
            if len(rest) > most_bytes:
                raise uncut(most_bytes)
            yield b""
            continue
        start = 0
        if len(rest) >= STEP_BYTES:
            start = piece.find(_LINE_BREAK) + 1
            yield rest + piece[:start]
            rest = b""
        yield from _fewer_lines(rest + piece[start:end])
        rest = piece[end:]
    if rest:
        yield rest


def _fewer_lines(text: bytes) -> Iterator[bytes]:
    """Cut a run of lines into runs of about `STEP_RECORDS` lines."""
    runs = text.count(_LINE_BREAK) // STEP_RECORDS + 1
    size, at = len(text) // runs + 1, 0
    while at < len(text):
        end = text.find(_LINE_BREAK, at + size) + 1 or len(text)
        yield text[at:end]
        at = end


def pieces_of(
    content_encoding: bytes | None, body: bytes, max_inflated_bytes: int, inflated: list[int]
) -> Iterator[bytes]:
    """Return the body in pieces of at most `STEP_BYTES`, decompressed; raises DecodeRefusal as `inflate`.

    The first item of `inflated` is how many bytes were decompressed so far.
    """
    encoding = None if content_encoding is None else content_encoding.decode("latin-1")
    most = len(body) if encoding is None else max_inflated_bytes
    small: list[bytes] = []
    small_bytes = 0
    for piece in inflated_pieces(encoding, body, max_inflated_bytes=most):
        if encoding is not None:
            inflated[0] += len(piece)
        # Decompressed pieces may be a few bytes.
        small.append(piece)
        small_bytes += len(piece)
        if small_bytes >= STEP_BYTES or len(small) == _MOST_PIECES:
            text = b"".join(small) if len(small) > 1 else piece
            for at in range(0, len(text), STEP_BYTES):
                yield text[at : at + STEP_BYTES]
            small, small_bytes = [], 0
    yield b"".join(small)


def gathered(pieces: Iterable[bytes], most_bytes: int) -> Generator[None, None, bytes]:
    """Return a body that cannot be cut.

    Raises:
        DecodeRefusal: it is too large.
    """
    parts: list[bytes] = []
    size = 0
    for piece in pieces:
        parts.append(piece)
        size += len(piece)
        if size > most_bytes:
            raise uncut(most_bytes)
        yield
    return b"".join(parts)


def uncut(most_bytes: int) -> DecodeRefusal:
    """Return the refusal of a record, or of a body that cannot be cut into records, that is too large."""
    detail = (
        f"a record, or a body that cannot be cut into records, has more than {most_bytes:,} bytes (max_uncut_bytes); "
        f'send smaller records, as NDJSON or as {{"records": [...]}} without other members'
    )
    return DecodeRefusal(413, "too-large", detail)


class _Form(NamedTuple):
    """How the runs of a body are decoded: all records of a run, or one that is long."""

    decoder: Callable[[bytes, DecodeLimits, NeighbourKeys], Decoded]
    alone: Callable[[bytes, DecodeLimits, NeighbourKeys], Generator[None, None, Decoded]]
    plain_type: str = ""
    # The runs are arrays, whose depth is checked where they are cut. As a body, an array stands between two texts.
    is_array: bool = True
    before: bytes = b""
    after: bytes = b""


def _event_in_steps(text: bytes, limits: DecodeLimits, keys: NeighbourKeys) -> Generator[None, None, Decoded]:
    yield
    return structured_event(text, limits, keys)


_LINES: Final = _Form(ndjson_body, partial(record_in_steps, is_line=True), "application/x-ndjson", is_array=False)
_RECORDS: Final = _Form(json_body, record_in_steps, "application/json", before=b'{"records":', after=b"}")
_EVENTS: Final = _Form(batched_events, _event_in_steps)


def decode_in_steps(
    content_type: str,
    pieces: Iterator[bytes],
    *,
    limits: DecodeLimits,
    headers: Mapping[str, str],
    new_key: Callable[[], str] = random_partition_key,
) -> Generator[None, None, Decoded]:
    """Return the records of a large body as `decode` does. `pieces` is the decompressed body, cut by `STEP_BYTES`.

    Raises:
        DecodeRefusal: as `decode`, or a part that cannot be cut is too large or nested too deep.
    """
    keys = NeighbourKeys(new_key)
    media_type = "" if is_binary_mode(content_type, headers) else media_type_of(content_type)
    most = limits.max_uncut_bytes
    first = next(pieces, b"")
    if media_type == "application/x-ndjson":
        return (yield from _joined(lines_in_steps(_chain(first, pieces), most), limits, keys, _LINES))
    is_native = media_type == "application/json"
    # The data of a record may be nested so deep, and an event with its data.
    depth, refusal = limits.max_depth + is_native, too_deep("data" if is_native else "an event", limits.max_depth)
    if is_native and (head := _RECORDS_HEAD.match(first)) is not None:
        runs = elements_in_steps(head, pieces, ArrayRuns(most, depth, refusal), _RECORDS_TAIL)
        return (yield from _joined(runs, limits, keys, _RECORDS))
    if media_type == "application/cloudevents-batch+json" and (head := _BATCH_HEAD.match(first)) is not None:
        runs = elements_in_steps(head, pieces, ArrayRuns(most, depth, refusal), _BATCH_TAIL)
        return (yield from _joined(runs, limits, keys, _EVENTS))
    body = yield from gathered(_chain(first, pieces), most)
    if media_type.endswith("json"):
        yield from require_depth(depth, body, refusal)
        limits = _of_any_depth(limits)
    if is_native:
        made = yield from record_in_steps(body, limits, keys, is_line=True)
        # Otherwise it may be another form of JSON.
        if made.records or made.problems[0].field == "data":
            return made
        yield
    return decode(content_type, body, limits=limits, headers=headers, new_key=new_key, is_plain=False)


def _of_any_depth(limits: DecodeLimits) -> DecodeLimits:
    """Return the limits of a text whose depth is checked already."""
    return msgspec.structs.replace(limits, max_depth=sys.maxsize)


def _is_one_record(run: bytes, form: _Form) -> bool:
    """Return True for a long run that is one record. In an array, numbers, words and strings may come before it."""
    return run[1:].lstrip(BLANKS)[:1] in (b"{", b"[") if form.is_array else run.strip(BLANKS) != b""


def _joined(
    runs: Iterable[bytes], limits: DecodeLimits, keys: NeighbourKeys, form: _Form
) -> Generator[None, None, Decoded]:
    """Decode the runs of a body and join their records. They are pairs if each run of a `plain_type` is plain."""
    decoded = Decoded([], [], pairs=[] if form.plain_type else None)
    count = 0
    for run in runs:
        is_long = len(run) > _LONG_BYTES and _is_one_record(run, form)
        text = form.before + run + form.after if not is_long and run.strip(BLANKS) else b""
        pairs = None
        if text and decoded.pairs is not None:
            pairs = decode_plain(form.plain_type, text, limits, keys)
        if pairs and decoded.pairs is not None and len(pairs[0]) == len((decoded.pairs or pairs)[0]):
            decoded.pairs.extend(pairs)  # type: ignore[arg-type] # of the same kind
            count += len(pairs)
        elif text or is_long:
            try:
                if is_long and not form.is_array:
                    most = limits.max_depth
                    yield from require_depth(most + 1, run, too_deep("data", most))
                if is_long:
                    one = run[1:-1].strip(BLANKS) if form.is_array else run
                    made = yield from form.alone(one, _of_any_depth(limits), keys)
                else:
                    made = form.decoder(text, limits, keys)
            except DecodeRefusal as refusal:
                if count and refusal.code != "too-many-records":
                    refusal.detail += f"; this is said of the part of the body that begins with records[{count}]"
                raise
            decoded = decoded.with_records().with_more(made, count)
            count += len(made.records) + len({problem.index for problem in made.problems})
        if count > limits.max_records:
            require_count(limits.max_records + 1, limits, is_whole=False)
        yield
    require_count(count, limits)
    return decoded
