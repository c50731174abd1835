"""The contract of every store: each function is a test that the store's own test file runs.

`assert_never_two_winners` adds two processes that compete for one object: at most one of them replaces each version.
"""

import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path

import anyio

import kpl_core
from kpl_core.coordination.store import ABSENT, CoordinationStore


async def a_missing_object_reads_as_none(store: CoordinationStore) -> None:
    reading = await store.read("nothing.json")
    assert (reading.body, reading.version) == (None, ABSENT)


async def an_object_is_read_back_byte_for_byte(store: CoordinationStore) -> None:
    body = bytes(range(256)) * 40
    written = await store.write("any.json", body)
    reading = await store.read("any.json")
    assert (reading.body, reading.version) == (body, written.version)


async def an_object_is_created_once(store: CoordinationStore) -> None:
    assert (await store.write("new.json", b"1", expected=ABSENT)).version
    assert (await store.write("new.json", b"2", expected=ABSENT)).version is None
    assert (await store.read("new.json")).body == b"1"


async def a_version_can_be_replaced_once(store: CoordinationStore) -> None:
    first = (await store.write("one.json", b"1")).version
    second = (await store.write("one.json", b"2", expected=first)).version
    assert second not in {None, ABSENT, first}
    assert (await store.write("one.json", b"3", expected=first)).version is None
    assert (await store.read("one.json")).body == b"2"


async def a_deleted_object_has_no_version(store: CoordinationStore) -> None:
    version = (await store.write("gone.json", b"1")).version
    await store.delete("gone.json")
    await store.delete("gone.json")
    assert (await store.write("gone.json", b"2", expected=version)).version is None
    assert (await store.read("gone.json")).body is None
    assert (await store.write("gone.json", b"3", expected=ABSENT)).version


async def read_all_returns_exactly_the_objects_of_a_prefix(store: CoordinationStore) -> None:
    for number in range(25):
        await store.write(f"report-{number}.json", str(number).encode())
    await store.write("summary.json", b"no")
    await store.delete("report-3.json")
    listing = await store.read_all("report-")
    assert dict(listing.bodies) == {f"report-{n}.json": str(n).encode() for n in range(25) if n != 3}
    assert dict((await store.read_all("missing-")).bodies) == {}


async def every_answer_has_the_stores_clock(store: CoordinationStore) -> None:
    instants = [
        (await store.write("clock.json", b"1")).at,
        (await store.write("clock.json", b"1", expected=ABSENT)).at,
        (await store.read("clock.json")).at,
        (await store.read("no-clock.json")).at,
        (await store.read_all("clock")).at,
    ]
    assert all(abs(at - time.time()) < 5 for at in instants)
    # The HTTP Date header has whole seconds.
    assert all(later >= earlier - 1 for earlier, later in pairwise(instants))


async def of_many_concurrent_writes_one_wins(store: CoordinationStore) -> None:
    version = ABSENT
    for turn in range(10):
        winners: list[str] = []

        async def fight(number: int, turn: int = turn, expected: str = version, winners: list[str] = winners) -> None:
            written = await store.write("prize.json", f"{turn}-{number}".encode(), expected=expected)
            if written.version is not None:
                winners.append(written.version)

        async with anyio.create_task_group() as fighters:
            for number in range(8):
                fighters.start_soon(fight, number)
        assert len(winners) == 1
        version = winners[0]


CONTRACT = [
    a_missing_object_reads_as_none,
    an_object_is_read_back_byte_for_byte,
    an_object_is_created_once,
    a_version_can_be_replaced_once,
    a_deleted_object_has_no_version,
    read_all_returns_exactly_the_objects_of_a_prefix,
    every_answer_has_the_stores_clock,
    of_many_concurrent_writes_one_wins,
]


FIGHTER = Path(__file__).parent / "programs" / "fighter.py"
PACKAGES = str(Path(next(iter(kpl_core.__path__))).parent)


def assert_never_two_winners(url: str, *, attempts: int, environment: Mapping[str, str] | None = None) -> None:
    """Let two processes compete, and check that no version was replaced twice."""
    fighters = [
        subprocess.Popen(
            [sys.executable, FIGHTER, url, str(attempts)],
            stdout=subprocess.PIPE,
            env=os.environ | {"PYTHONPATH": PACKAGES} | dict(environment or {}),
        )
        for _ in range(2)
    ]
    try:
        said = [json.loads(fighter.communicate(timeout=200)[0]) for fighter in fighters]
    finally:
        for fighter in fighters:
            fighter.kill()
            fighter.wait()
    replaced = [version for each in said for version in each["replaced"]]
    assert len(replaced) == len(set(replaced))
    # For each loser there is a winner, and the processes really competed.
    assert len(replaced) + sum(each["refused"] for each in said) == 2 * attempts
    assert sum(each["refused"] for each in said) > 0
    assert len(replaced) >= attempts
