"""Record `kpl demo` as moving pictures: `python -m benchmarks.front_page.demo [FOLDER]`, for a minute.

The command runs in a terminal of 80 columns, and in one of 54 for phones. A picture plays once, in five seconds, and
then shows the last screen. Where the reader's system asks for less motion, it shows that screen from the beginning.
"""

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from xml.sax.saxutils import escape

from benchmarks.front_page.colours import DARK, MONO, svg
from benchmarks.front_page.terminal import Line, Run, Screen, Style, outputs_of

__all__ = ["COLUMNS", "draw", "frames_of"]

FOLDER = Path(__file__).parents[2] / "docs" / "pictures"
#: The name of each picture, and the width of its terminal.
COLUMNS = {"demo": 80, "demo-phone": 54}
_COMMAND = "kpl demo"
_PLAY_SECONDS = 5.0
_TYPING_SECONDS = 0.6
_FRAMES_PER_SECOND = 6
_FONT, _ADVANCE, _LINE = 14, 8.4, 20
_PADDING = 14
# The eight colours of ANSI, light enough for the dark background.
_ANSI = ("#6c858b", "#ff8f8f", "#6fdc8c", "#e3a94a", "#7fb3ff", "#d7a4f5", "#4cc4cc", "#e6f0f2")

# The lines of the screen, from so many seconds after the start on.
Frame = tuple[float, list[Line]]


def frames_of(outputs: Sequence[tuple[float, str]]) -> list[Frame]:
    """Return the screens that are shown, at most so many in a second of the picture; the last one is complete."""
    screen, frames = Screen(), list[Frame]()
    every = outputs[-1][0] / (_PLAY_SECONDS * _FRAMES_PER_SECOND)
    for number, (at, output) in enumerate(outputs):
        screen.feed(output)
        is_last = number == len(outputs) - 1
        if is_last or not frames or at - frames[-1][0] >= every:
            lines = screen.lines()
            while lines and not lines[-1]:
                lines.pop()
            frames.append((at, lines))
    return frames


def _run(run: Run, row: int) -> str:
    colour, is_bold, is_dim = run.style
    fill = _ANSI[int(colour)] if colour.isdigit() else colour
    style = "".join(
        (f' style="fill:{fill}"' if fill else "", ' class="b"' if is_bold else ' class="d"' if is_dim else "")
    )
    return (
        f'<text{style} x="{_PADDING + run.column * _ADVANCE:.1f}" y="{_PADDING + 14 + row * _LINE}" '
        f'textLength="{len(run.text) * _ADVANCE:.1f}">{escape(run.text)}</text>'
    )


def _screen(lines: Sequence[Line]) -> str:
    return "".join(_run(run, row) for row, line in enumerate(lines, 1) for run in line)


def _share(at: float, seconds: float) -> float:
    """Return when something of the run happens in the picture, in percent of its time."""
    played = _TYPING_SECONDS + at / seconds * (_PLAY_SECONDS - _TYPING_SECONDS)
    return 100 * played / _PLAY_SECONDS


def draw(frames: Sequence[Frame], *, columns: int) -> str:
    """Return the SVG. Each screen is a group that is visible for its time; without motion only the last one is."""
    seconds, last = frames[-1]
    width, height = round(columns * _ADVANCE + 2 * _PADDING), (1 + len(last)) * _LINE + 2 * _PADDING
    shares = [_share(at, seconds) for at, _ in frames]
    rules, groups = [], []
    for number, (_, lines) in enumerate(frames[:-1]):
        begin, end = (f"{share:.2f}%" for share in shares[number : number + 2])
        rules.append(f"@keyframes f{number}{{0%{{opacity:0}}{begin}{{opacity:1}}{end},to{{opacity:0}}}}")
        rules.append(f".f{number}{{animation-name:f{number}}}\n")
        groups.append(f'<g class="f f{number}">{_screen(lines)}</g>\n')
    style = (
        f"text{{font:{_FONT}px {MONO};fill:{DARK.ink};white-space:pre}}.b{{font-weight:700}}"
        f".d{{fill:{DARK.muted}}}.f{{opacity:0}}\n@media (prefers-reduced-motion:no-preference){{"
        f".f,.last{{animation:{_PLAY_SECONDS:g}s step-end both}}.last{{animation-name:last}}"
        f"@keyframes last{{0%{{opacity:0}}{shares[-1]:.2f}%,to{{opacity:1}}}}\n{''.join(rules)}}}"
    )
    size = f'x="0.5" y="0.5" width="{width - 1}" height="{height - 1}"'
    body = (
        f'<rect {size} rx="8" fill="{DARK.page}" stroke="{DARK.line}"/>\n'
        f"{_run(Run(0, '$', Style(colour=DARK.brand)), 0)}{_run(Run(2, _COMMAND, Style(is_bold=True)), 0)}\n"
        f'{"".join(groups)}<g class="last">{_screen(last)}</g>\n'
    )
    printed = "; ".join(" ".join(run.text for run in line) for line in last)
    title = f"Recording of {_COMMAND}: {seconds:.0f} seconds, played in {_PLAY_SECONDS:.0f}. It prints: {printed}."
    return svg(width, height, title=title, style=style, body=body)


def main(folder: Path) -> None:
    """Run the command once for each picture, and write it."""
    command = [sys.executable, "-m", "kpl_integrations.cli", *_COMMAND.split()[1:]]
    environment = os.environ | {"TERM": "xterm-256color", "COLORTERM": "truecolor"}
    for name, columns in COLUMNS.items():
        frames = frames_of(outputs_of(command, columns=columns, environment=environment))
        path = folder / f"{name}.svg"
        path.write_text(draw(frames, columns=columns), encoding="utf-8")
        print(f"{path}: {len(frames)} screens, {path.stat().st_size / 1024:.0f} KiB")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else FOLDER)
