"""The contract of every store: each function is a test that the store's own test file runs."""

import time
from itertools import pairwise

import anyio

from kpl_core.coordination.store import ABSENT, CoordinationStore

__all__ = ["CONTRACT"]


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
