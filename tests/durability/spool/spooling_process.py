"""A process that spools records until it is killed, and prints each acknowledgement.

Usage: python -m tests.durability.spool.spooling_process FILE FIRST_NUMBER. Each record's data is a number.
Lines: `a FIRST COUNT` after the commit of COUNT records from FIRST on was acknowledged, `c FIRST
COUNT` after they were confirmed (before that is on the disk).
"""

import os
import sys
from collections import deque
from concurrent.futures import Future
from pathlib import Path

from kpl_core.durability.spool import Spool, SpooledRecord, SpoolOptions

CHUNK = 7
IN_FLIGHT = 40
CONFIRM_AFTER = 100


def say(letter: str, first: int) -> None:
    os.write(1, f"{letter} {first} {CHUNK}\n".encode())


def main(path: Path, number: int) -> None:
    waiting: deque[tuple[int, Future[range]]] = deque()
    acknowledged: deque[tuple[int, range]] = deque()
    with Spool(SpoolOptions(path=path, commit_interval_ms=2.0)) as spool:
        while True:
            records = [
                SpooledRecord("orders", f"key-{each % 10}", b"%d" % each, 1.0) for each in range(number, number + CHUNK)
            ]
            waiting.append((number, spool.append_nowait(records, claim=True)))
            number += CHUNK
            if len(waiting) > IN_FLIGHT:
                first, stored = waiting.popleft()
                acknowledged.append((first, stored.result()))
                say("a", first)
            if len(acknowledged) > CONFIRM_AFTER:
                first, ids = acknowledged.popleft()
                spool.confirm(ids)
                say("c", first)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
