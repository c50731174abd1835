import os
import sys
import threading
from pathlib import Path

import anyio
import pytest
from hypothesis import given, strategies as st

from kpl_integrations.cli.failure import CommandFailure
from kpl_integrations.cli.put import input_lines
from kpl_integrations.cli.put.input_lines import InputLines


async def read_all(lines):
    return [line async for block in lines.blocks() for line in block]


@given(st.binary(max_size=200), st.integers(1, 50))
def test_no_byte_is_lost_or_moved_to_another_line(content, chunk_bytes):
    reading, writing = os.pipe()
    os.write(writing, content)
    os.close(writing)
    with pytest.MonkeyPatch.context() as patch, os.fdopen(reading) as file:
        patch.setattr(input_lines, "_CHUNK_BYTES", chunk_bytes)
        lines = anyio.run(read_all, InputLines("a pipe", file.fileno()))
    assert b"".join(lines) == content
    assert all(line.count(b"\n") == line.endswith(b"\n") for line in lines)
    assert all(line.endswith(b"\n") for line in lines[:-1])


def test_a_line_without_end_is_refused_before_it_fills_the_memory(tmp_path, monkeypatch):
    monkeypatch.setattr(input_lines, "_LONGEST_LINE_BYTES", 100)
    (tmp_path / "endless").write_bytes(b"x" * 101)
    with InputLines.opened(tmp_path / "endless") as lines, pytest.raises(CommandFailure, match="longer than 100 bytes"):
        anyio.run(read_all, lines)


def test_reading_can_be_left_while_the_input_is_silent(monkeypatch):
    reading, writing = os.pipe()
    os.write(writing, b"first\n")

    async def leave():
        with anyio.move_on_after(5) as scope:
            async for block in InputLines("a pipe", reading).blocks():
                assert block == [b"first\n"]
                scope.cancel()

    anyio.run(leave)
    os.close(writing)  # which wakes the thread, to find its loop gone
    for thread in threading.enumerate():
        if thread.name == "kpl-input":
            thread.join(5)
            assert not thread.is_alive()
    os.close(reading)


def test_the_size_of_a_file_is_known_and_that_of_a_pipe_is_not(tmp_path, monkeypatch):
    (tmp_path / "file").write_bytes(b"12345")
    with InputLines.opened(tmp_path / "file") as lines:
        assert lines.size_bytes == 5
    reading, writing = os.pipe()
    with os.fdopen(reading) as standard_input, os.fdopen(writing, "w"):
        monkeypatch.setattr(sys, "stdin", standard_input)
        with InputLines.opened(Path("-")) as lines:
            assert (lines.size_bytes, lines.name) == (None, "standard input")


def test_a_long_line_is_joined_once_however_many_pieces_it_comes_in(tmp_path, monkeypatch):
    monkeypatch.setattr(input_lines, "_CHUNK_BYTES", 64)
    line = bytes(range(256)).replace(b"\n", b"") * 40 + b"\n"
    (tmp_path / "lines").write_bytes(b"first\n" + line + b"last")

    async def count_joins():
        with InputLines.opened(tmp_path / "lines") as lines:
            return [(len(block), [len(each) for each in block]) async for block in lines.blocks()]

    blocks = anyio.run(count_joins)
    assert blocks == [(1, [6]), (1, [len(line)]), (1, [4])]
