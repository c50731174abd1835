"""Put each known fault in, and simulate until a sentence is false: `python -m tests.world.find_faults`.

It prints a table of the faults, with the seed that finds each, the CPU time that it took, and the false sentence. Each
fault has a process of its own, which imports the changed text in place of the file.
"""

import argparse
import gc
import logging
import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import FrameType
from typing import NoReturn

from tests.support.changed_module import import_changed
from tests.world.known_faults import KNOWN_FAULTS, KnownFault
from tests.world.world_loop import HASH_SEED

MODULE = "tests.world.find_faults"
SECONDS = 180.0
# Of CPU time. A whole run takes less than two.
ONE_RUN_SECONDS = 60.0
LEASES = "leases: "
SHOWN = 100
NOT_FOUND = "not found"


class Endless(BaseException):
    """One run takes too long; nothing in it may catch this."""


def main() -> int:
    """Print the table, or find the one fault that the parent asks for. A process that crashes has found nothing."""
    parser = argparse.ArgumentParser(prog=f"python -m {MODULE}", description=__doc__)
    _ = parser.add_argument("--only", default="", help="faults whose name contains these words")
    _ = parser.add_argument("--seconds", type=float, default=SECONDS, help="of CPU time for each fault")
    _ = parser.add_argument("--one", type=int, default=None, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.one is not None:
        sys.stdout.write(found(KNOWN_FAULTS[given.one], given.seconds))
        return 0
    numbers = [number for number, fault in enumerate(KNOWN_FAULTS) if given.only in fault.name]
    sys.stdout.write("| fault | from | story | found by seed | CPU seconds | what is false |\n|" + " --- |" * 6 + "\n")
    not_found = 0
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for number, asked in zip(numbers, pool.map(lambda each: _ask(each, given.seconds), numbers), strict=True):
            fault, row = KNOWN_FAULTS[number], row_of(asked)
            not_found += NOT_FOUND in row
            sys.stdout.write(f"| {fault.name} | {fault.origin} | {fault.story} | {row} |\n")
            sys.stdout.flush()
    sys.stdout.write(f"\n{len(numbers) - not_found} of {len(numbers)} found\n")
    return 0


def _ask(number: int, seconds: float) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", MODULE, "--one", str(number), "--seconds", str(seconds)]
    environment = os.environ | {"PYTHONHASHSEED": HASH_SEED}
    return subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=False)


def row_of(asked: "subprocess.CompletedProcess[str]") -> str:
    """Return the last columns of a fault: what its process found."""
    if asked.returncode:
        return f"{NOT_FOUND} | | the process ended with {asked.returncode}"
    return asked.stdout.strip() or f"{NOT_FOUND} | |"


def changed_text(fault: KnownFault) -> str:
    """Return the text of the fault's file with the fault in it.

    Raises:
        ValueError: the piece that it replaces does not occur once.
    """
    text = Path(fault.path).read_text(encoding="utf-8")
    if text.count(fault.before) != 1:
        message = f"{fault.path} has {text.count(fault.before)} times {fault.before!r}, for {fault.name!r}"
        raise ValueError(message)
    return text.replace(fault.before, fault.after)


def found(fault: KnownFault, seconds: float) -> str:
    """Put a fault into this process, and return the columns about the first run that is false; "" for none."""
    logging.disable()
    _ = import_changed(fault.path, changed_text(fault))
    gc.freeze()
    _ = signal.signal(signal.SIGPROF, _end_run)
    seed, began = 1, time.process_time()
    while time.process_time() - began < seconds:
        _ = signal.setitimer(signal.ITIMER_PROF, ONE_RUN_SECONDS)
        try:
            false = _false(fault.story, seed)
        except Endless:
            false = ["the run does not end"]
        _ = signal.setitimer(signal.ITIMER_PROF, 0.0)
        if false:
            sentence = " ".join(false[0].split()).replace("|", "/")
            shown = sentence if len(sentence) <= SHOWN else f"{sentence[:SHOWN]}..."
            return f"{seed} | {time.process_time() - began:.1f} | {shown}"
        seed += 1
    return ""


def _false(story: str, seed: int) -> list[str]:
    # Not before the changed text is in its place.
    from tests.world.kinds_of_faults import KINDS  # noqa: PLC0415
    from tests.world.lease_law import run_law  # noqa: PLC0415
    from tests.world.simulate import run_of  # noqa: PLC0415

    if not story.startswith(LEASES):
        return run_of(story, seed).false
    kind = story.removeprefix(LEASES)
    return run_law(kind, seed).broken(KINDS[kind])


def _end_run(_number: int, _frame: FrameType | None) -> NoReturn:
    raise Endless


if __name__ == "__main__":
    sys.exit(main())
