"""`make drill`: breaks each part of a real gateway in turn, and prints what is said about it and how it ends.

    python -m tests.drill                          all cases
    python -m tests.drill "store away" "spool full"
    python -m tests.drill --markdown               as the tables of docs/drill.md

The exit status is 1 if something was said wrongly, or did not end by itself.
"""

import re
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from tests.drill.board import Board
from tests.drill.cases import CASES, Case, NotRun, logged, unmounted
from tests.drill.scene import LogLine, Look, Scene, running
from tests.drill.traces import Sent
from tests.support.chromium import NO_CHROMIUM
from tests.support.prometheus_server import NO_PROMETHEUS, needs_prometheus
from tests.support.waiting import wait_until


class Drilled(NamedTuple):
    """What one case showed: lines to print, and what was wrong."""

    lines: list[str]
    problems: list[str]


def drill(case: Case, folder: Path) -> Drilled:
    """Run one case in an empty folder.

    Raises:
        NotRun: this machine lacks what the case needs.
    """
    with unmounted(folder):
        settings = case.prepare(folder)
        with running(folder, dict(settings), workers=case.workers) as scene:
            scene.ack = case.ack
            return _drill(case, scene)


def _drill(case: Case, scene: Scene) -> Drilled:
    problems: list[str] = []
    before = scene.watch(time.time(), lambda looks: _is_well(case, looks[-1]), case.seconds)[-1]
    if not _is_well(case, before):
        problems.append(f"before the fault: {_state(case, before)}, alerts {before.alerts}")
    broken_at = time.time()
    case.breaks(scene)
    looks = scene.watch(broken_at, lambda looks: _is_said(case, scene, looks, broken_at), case.seconds)
    if scene.board is not None:
        scene.board.take_pictures(case.name)
    lines = [f"client    puts of a quiet tenant with ack={case.ack}: {_statuses(looks)}"]
    lines += [_about_readiness(case, looks, problems), _about_alert(case, looks, problems)]
    lines.append(_about_board(case, looks, problems))
    lines.append(_about_log(case, scene.lines(broken_at), broken_at, problems))
    lines.append(_about_doctor(case, scene, problems))
    repaired_at = time.time()
    case.repairs(scene)
    looks = scene.watch(repaired_at, lambda looks: _is_well(case, looks[-1]), case.seconds)
    lines.append(_about_end(case, looks, problems))
    lines.append(_about_trace(case, scene, _affected(scene.sent, broken_at), problems))
    return Drilled(lines, problems)


def _is_well(case: Case, look: Look) -> bool:
    has_alert = case.alert in look.alerts and not case.alert_ends
    is_shown = look.board is None or look.board.parts.get(case.part or "", "ok") == "ok"
    return look.ready == 200 and _state(case, look) in {"ok", ""} and not has_alert and look.client == 202 and is_shown


def _is_said(case: Case, scene: Scene, looks: list[Look], since: float) -> bool:
    has_log = not case.log or any(logged(case, line.text) for line in scene.lines(since))
    last = looks[-1]
    return has_log and case.alert in last.alerts and _state(case, last) == case.state and _is_shown(case, last.board)


def _is_shown(case: Case, board: Board | None) -> bool:
    if board is None:
        return True
    is_part_shown = case.part is None or board.parts.get(case.part) == case.state
    return is_part_shown and all(re.search(wanted, board.texts[card]) for card, wanted in case.board.items())


def _state(case: Case, look: Look) -> str:
    return look.parts.get(case.part, {}).get("state", "") if case.part is not None else ""


def _statuses(looks: list[Look]) -> str:
    counts: dict[int, int] = {}
    for look in looks:
        counts[look.client] = counts.get(look.client, 0) + 1
    return ", ".join(f"{count} x {status or 'no answer'}" for status, count in counts.items())


def _about_readiness(case: Case, looks: list[Look], problems: list[str]) -> str:
    # A connection to a worker that is killed ends.
    statuses = {look.ready for look in looks} - {0}
    if statuses != {case.ready}:
        problems.append(f"/readyz is {statuses}, not {case.ready}")
    if case.part is None:
        return f"/readyz   {case.ready}; no part is concerned"
    found = next((look for look in looks if _state(case, look) == case.state), None)
    if found is None:
        problems.append(f"the part {case.part} is {_state(case, looks[-1])}, not {case.state}")
        return f"/readyz   the part {case.part} is {_state(case, looks[-1])}"
    part = found.parts[case.part]
    return (
        f"/readyz   {found.ready}; {case.part} is {case.state} after {found.seconds:.1f} s: {part['detail']}. "
        f"Do: {part['action']}"
    )


def _about_alert(case: Case, looks: list[Look], problems: list[str]) -> str:
    found = next((look for look in looks if case.alert in look.alerts), None)
    others = sorted({name for look in looks for name in look.alerts} - {case.alert})
    beside = f"; beside it {', '.join(others)}" if others else ""
    if found is None:
        problems.append(f"{case.alert} is inactive")
        return f"alert     {case.alert} is inactive{beside}"
    return f"alert     {case.alert} is {found.alerts[case.alert]} after {found.seconds:.1f} s{beside}"


def _about_board(case: Case, looks: list[Look], problems: list[str]) -> str:
    if looks[-1].board is None:
        return f"dashboard not run: {NO_CHROMIUM}"
    found = next((look for look in looks if _is_shown(case, look.board)), None)
    if found is None:
        problems.append(f"the dashboard does not show {case.state} or {dict(case.board)}: {looks[-1].board}")
    shown = found or looks[-1]
    return f"dashboard after {shown.seconds:.1f} s: {shown.board}"


def _affected(sent: list[Sent], since: float) -> Sent:
    """Return the first request that was refused while the part was broken, else the first one.

    The span of a request without an answer may have ended with its worker.
    """
    during = [each for each in sent if each.at >= since and each.status]
    return next((each for each in during if not each.is_accepted), during[0])


def _about_trace(case: Case, scene: Scene, sent: Sent, problems: list[str]) -> str:
    wait_until(lambda: scene.traces.span(sent.trace_id), f"the span of {sent.request_id} in trace {sent.trace_id}")
    expected = sent.records if sent.is_accepted and not case.loses else 0
    with suppress(AssertionError):  # records that were tried again and again wait for the next time
        wait_until(lambda: scene.arrived(sent) >= expected, "the records")
    span, arrived = scene.traces.span(sent.trace_id), scene.arrived(sent)
    if f" {sent.status}," not in str(span):
        problems.append(f"the client got {sent.status}, and the span of the gateway says {span}")
    if arrived != expected:
        problems.append(f"{arrived} of {sent.records} records of a request that got {sent.status} are in Kinesis")
    records = f"{arrived} of {sent.records} record{'s' if sent.records > 1 else ''} in Kinesis"
    return f"trace     {sent.trace_id}: client POST {sent.request_id} {sent.status} > gateway {span} > {records}"


def _about_log(case: Case, lines: list[LogLine], since: float, problems: list[str]) -> str:
    if not case.log:
        wrong = [line.text for line in lines if line.level in {"warning", "error"}]
        problems += [f"the log has a line: {text}" for text in wrong]
        return "log       nothing, because nothing is wrong with the gateway"
    found = [line for line in lines if logged(case, line.text)]
    if not found:
        problems.append(f"the log has no line with {case.log!r}")
        return "log       nothing about it"
    if case.part is not None and len(found) > 1:
        problems.append(f"the log has {len(found)} lines about one change")
    return f"log       after {found[0].at - since:.1f} s: {found[0].level}: {found[0].text}"


def _about_doctor(case: Case, scene: Scene, problems: list[str]) -> str:
    status, checks = scene.doctor()
    if case.doctor is not None and not any(check.startswith(f"{case.doctor}: failed") for check in checks):
        problems.append(f"kpl doctor has no failed check {case.doctor}: status {status}, {checks}")
    return f"doctor    status {status}: {'; '.join(checks) or 'nothing is wrong with what it checks'}"


def _about_end(case: Case, looks: list[Look], problems: list[str]) -> str:
    last = looks[-1]
    if not _is_well(case, last):
        problems.append(f"it does not end: {_state(case, last)}, /readyz {last.ready}, alerts {last.alerts}")
        return "end       it does not end"
    well = next((look for look in looks if look.ready == 200 and _state(case, look) in {"ok", ""}), last)
    part = f"{case.part} is ok" if case.part is not None else "puts are accepted"
    alert = f"ends {case.alert_ends}" if case.alert_ends else f"is over after {last.seconds:.1f} s"
    return f"end       by itself: {part} {well.seconds:.1f} s after the repair, the alert {alert}"


def _table(case: Case, lines: list[str]) -> str:
    rows = (line.replace("|", "\\|").split(maxsplit=1) for line in lines)
    cells = "".join(f"| {name} | {text} |\n" for name, text in rows)
    return f"\n## {case.name[0].upper()}{case.name[1:]}\n\n| | |\n| --- | --- |\n{cells}"


def main(names: list[str]) -> int:
    """Run the cases with these names, or all; return the exit status. "--markdown": print tables."""
    if needs_prometheus.args[0]:
        sys.stdout.write(f"not run: {NO_PROMETHEUS}\n")
        return 0
    is_page, names = "--markdown" in names, [name for name in names if name != "--markdown"]
    unknown = set(names) - {case.name for case in CASES}
    if unknown:
        sys.stdout.write(f"no such case: {', '.join(sorted(unknown))}; there are: {', '.join(c.name for c in CASES)}\n")
        return 2
    status = 0
    for case in CASES:
        if names and case.name not in names:
            continue
        with tempfile.TemporaryDirectory(prefix="kpl-drill-") as folder:
            try:
                lines, problems = drill(case, Path(folder))
            except NotRun as error:
                lines, problems = [f"not run: {error}"], []
        lines = [line.replace(folder, "/var/lib/kpl") for line in lines]
        sys.stdout.write(
            _table(case, lines) if is_page else "\n".join(["", case.name, *(f"  {line}" for line in lines), ""])
        )
        sys.stdout.write("".join(f"  WRONG: {problem}\n" for problem in problems))
        sys.stdout.flush()
        status = 1 if problems else status
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
