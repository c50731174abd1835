"""The nesting depth of a JSON text, and the cost of finding it."""

import json
import tracemalloc
from typing import Any
from unittest import mock

import pytest
from hypothesis import given, strategies as st

from kpl_integrations.ingest.decoding import json_text
from kpl_integrations.ingest.decoding.json_text import is_deeper_than

MIB = 1024 * 1024
texts = st.text(st.sampled_from('[]{}"\\a\n'), max_size=8)
values = st.recursive(
    texts | st.none(), lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3)
)


def depth_of(value: Any) -> int:
    if isinstance(value, dict):
        return 1 + max(map(depth_of, value.values()), default=0)
    return 1 + max(map(depth_of, value), default=0) if isinstance(value, list) else 0


@given(values, st.integers(0, 5), st.sampled_from([1, 2, 3, 7, 65_536]))
def test_brackets_in_strings_do_not_count(value, depth, piece_bytes):
    with mock.patch.object(json_text, "_PIECE_BYTES", piece_bytes):
        assert is_deeper_than(depth, json.dumps(value).encode()) == (depth_of(value) > depth)


@pytest.mark.parametrize(
    "text",
    [
        b'{"data":"' + b"[" * MIB + b'"}',
        b'{"data":"' + b"\\\\[" * (MIB // 3) + b'"}',
        b'{"data":[' + b'[],"",' * (MIB // 6) + b"[]]}",
    ],
    ids=["a long string", "escapes", "many"],
)
def test_the_check_needs_memory_for_a_few_copies_of_the_text_at_most(text):
    assert json.loads(text)
    tracemalloc.start()
    try:
        assert not is_deeper_than(64, text)
        assert tracemalloc.get_traced_memory()[1] < 4 * MIB
    finally:
        tracemalloc.stop()
