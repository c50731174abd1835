import os
import sys
import threading
from pathlib import Path

import anyio
import pytest
from hypothesis import given, strategies as st

from kpl_integrations.cli import put_input
from kpl_integrations.cli.exit_code import CommandFailure
from kpl_integrations.cli.put_input import InputLines


async def read_all(lines):
    return [line async for block in lines.blocks() for line in block]


@given(st.binary(max_size=200), st.integers(1, 50))
def test_lines_have_all_bytes_of_the_input(content, chunk_bytes):
    reading, writing = os.pipe()
    os.write(writing, content)
    os.close(writing)
    with pytest.MonkeyPatch.context() as patch, os.fdopen(reading) as file:
        patch.setattr(put_input, "_CHUNK_BYTES", chunk_bytes)
        lines = anyio.run(read_all, InputLines("a pipe", file.fileno()))
    assert b"".join(lines) == content
    assert all(line.count(b"\n") == line.endswith(b"\n") for line in lines)
    assert all(line.endswith(b"\n") for line in lines[:-1])


def test_an_endless_line_is_rejected_before_it_fills_the_memory(tmp_path, monkeypatch):
    monkeypatch.setattr(put_input, "_MAX_LINE_BYTES", 100)
    (tmp_path / "endless").write_bytes(b"x" * 101)
    with InputLines.opened(tmp_path / "endless") as lines, pytest.raises(CommandFailure, match="longer than 100 bytes"):
        anyio.run(read_all, lines)


def test_reading_can_be_cancelled_while_the_input_is_silent(monkeypatch):
    reading, writing = os.pipe()
    os.write(writing, b"first\n")

    async def leave():
        with anyio.move_on_after(5) as scope:
            async for block in InputLines("a pipe", reading).blocks():
                assert block == [b"first\n"]
                scope.cancel()

    anyio.run(leave)
    os.close(writing)  # wakes the thread, whose loop has ended
    for thread in threading.enumerate():
        if thread.name == "kpl-input":
            thread.join(5)
            assert not thread.is_alive()
    os.close(reading)


def test_only_a_regular_file_has_a_known_size(tmp_path, monkeypatch):
    (tmp_path / "file").write_bytes(b"12345")
    with InputLines.opened(tmp_path / "file") as lines:
        assert lines.size_bytes == 5
    reading, writing = os.pipe()
    with os.fdopen(reading) as standard_input, os.fdopen(writing, "w"):
        monkeypatch.setattr(sys, "stdin", standard_input)
        with InputLines.opened(Path("-")) as lines:
            assert (lines.size_bytes, lines.name) == (None, "standard input")


def test_a_long_line_is_joined_once(tmp_path, monkeypatch):
    monkeypatch.setattr(put_input, "_CHUNK_BYTES", 64)
    line = bytes(range(256)).replace(b"\n", b"") * 40 + b"\n"
    (tmp_path / "lines").write_bytes(b"first\n" + line + b"last")

    async def count_joins():
        with InputLines.opened(tmp_path / "lines") as lines:
            return [(len(block), [len(each) for each in block]) async for block in lines.blocks()]

    blocks = anyio.run(count_joins)
    assert blocks == [(1, [6]), (1, [len(line)]), (1, [4])]
