"""What a terminal shows: a screen for the escape codes that `kpl` prints, and a run in a pseudo-terminal."""

import fcntl
import os
import pty
import re
import struct
import subprocess
import termios
import time
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from typing import NamedTuple

__all__ = ["Line", "Run", "Screen", "Style", "outputs_of"]

_ROWS = 40
_CODE = re.compile(r"\x1b\[(?P<arguments>[\d;?]*)(?P<command>[A-Za-z])")
_BOLD, _DIM = 1, 2
_EXTENDED, _DEFAULT = 38, 39
_ANSI = range(30, 38)


class Style(NamedTuple):
    """How a character looks. `colour` is `#rrggbb`, the number of an ANSI colour, or empty for that of all text."""

    colour: str = ""
    is_bold: bool = False
    is_dim: bool = False


class Run(NamedTuple):
    """Characters of one style that stand side by side, from a column on."""

    column: int
    text: str
    style: Style


Line = tuple[Run, ...]


class Screen:
    """The lines of a terminal that is high enough to keep all of them."""

    def __init__(self) -> None:
        self._lines: list[list[tuple[str, Style]]] = [[]]
        self._row = self._column = 0
        self._style = Style()

    def feed(self, output: str) -> None:
        """Take output of a program.

        Raises:
            ValueError: the output has an escape code that this screen does not know.
        """
        at = 0
        while at < len(output):
            if code := _CODE.match(output, at):
                self._obey(code["command"], code["arguments"])
                at = code.end()
                continue
            self._write(output[at])
            at += 1

    def lines(self) -> list[Line]:
        """Return the lines without spaces at their ends."""
        return [tuple(_runs(line)) for line in self._lines]

    def _write(self, character: str) -> None:
        if character == "\r":
            self._column = 0
        elif character == "\n":
            self._row += 1
            while len(self._lines) <= self._row:
                self._lines.append([])
        elif character == "\x1b":
            message = "an escape code that is not known, or that two outputs share"
            raise ValueError(message)
        else:
            line = self._lines[self._row]
            line.extend([(" ", Style())] * (self._column + 1 - len(line)))
            line[self._column] = (character, self._style)
            self._column += 1

    def _obey(self, command: str, arguments: str) -> None:
        if command == "A":
            self._row = max(0, self._row - int(arguments or 1))
        elif command == "K" and arguments == "2":
            self._lines[self._row].clear()
        elif command == "m":
            self._style = _styled(self._style, [int(each or 0) for each in arguments.split(";")])
        elif arguments != "?25":  # of the cursor, which the picture does not show
            message = f"the escape code {arguments}{command} is not known"
            raise ValueError(message)


def _styled(style: Style, codes: Sequence[int]) -> Style:
    rest = iter(codes)
    for code in rest:
        if code == 0:
            style = Style()
        elif code == _BOLD:
            style = style._replace(is_bold=True)
        elif code == _DIM:
            style = style._replace(is_dim=True)
        elif code in _ANSI:
            style = style._replace(colour=str(code - _ANSI.start))
        elif code == _DEFAULT:
            style = style._replace(colour="")
        elif code == _EXTENDED:
            style = style._replace(colour=_extended(rest))
        else:
            message = f"the style {code} is not known"
            raise ValueError(message)
    return style


def _extended(rest: Iterator[int]) -> str:
    """Return the colour of `38;5;number`, a grey, or `38;2;red;green;blue`."""
    if next(rest) == _DIM:
        return "#" + "".join(f"{next(rest):02x}" for _ in range(3))
    number = next(rest)
    if number < 232:
        message = f"the colour {number} of 256 is not known; greys are"
        raise ValueError(message)
    return f"#{8 + 10 * (number - 232):02x}" + f"{8 + 10 * (number - 232):02x}" * 2


def _runs(line: Sequence[tuple[str, Style]]) -> Iterator[Run]:
    column = 0
    for style, characters in groupby(line, key=lambda each: each[1]):
        text = "".join(character for character, _ in characters)
        stripped = text.rstrip()
        if stripped:
            yield Run(column + len(stripped) - len(stripped.lstrip()), stripped.lstrip(), style)
        column += len(text)


def outputs_of(command: Sequence[str], *, columns: int, environment: Mapping[str, str]) -> list[tuple[float, str]]:
    """Run a command in a terminal of this width; return its outputs with the seconds since its start.

    Raises:
        ChildProcessError: the command failed.
    """
    terminal, inside = pty.openpty()
    fcntl.ioctl(inside, termios.TIOCSWINSZ, struct.pack("HHHH", _ROWS, columns, 0, 0))
    began_at, outputs, left = time.monotonic(), list[tuple[float, str]](), b""
    with subprocess.Popen(command, stdin=inside, stdout=inside, stderr=inside, env=dict(environment)) as process:
        os.close(inside)
        while piece := _read(terminal):
            # An output may end within a character or an escape code.
            complete, left = _complete(left + piece)
            outputs.append((time.monotonic() - began_at, complete.decode()))
    os.close(terminal)
    if process.returncode:
        said = "".join(output for _, output in outputs)
        message = f"{' '.join(command)} ended with {process.returncode}: {said[-1000:]}"
        raise ChildProcessError(message)
    return outputs


def _read(terminal: int) -> bytes:
    try:
        return os.read(terminal, 65_536)
    except OSError:  # on Linux the end of the program is an error
        return b""


def _complete(output: bytes) -> tuple[bytes, bytes]:
    """Return the output up to an escape code or a character that has not ended, and the rest."""
    cut = re.search(rb"(\x1b(\[[\d;?]*)?|[\xc0-\xff][\x80-\xbf]{0,2})\Z", output)
    if cut is None or _is_whole(cut[0]):
        return output, b""
    return output[: cut.start()], cut[0]


def _is_whole(ending: bytes) -> bool:
    """Return True if the bytes are a character."""
    try:
        ending.decode()
    except UnicodeDecodeError:
        return False
    return not ending.startswith(b"\x1b")
