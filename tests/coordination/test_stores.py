"""The contract on the stores without dependencies; S3, DynamoDB and Redis run it in tests/interop."""

import fcntl
import os
import sys
import threading
from collections.abc import Awaitable, Callable
from contextlib import suppress
from importlib import import_module
from inspect import iscoroutinefunction
from pathlib import Path

import anyio
import anyio.to_thread
import pytest

from kpl_core.coordination import stores
from kpl_core.coordination.store import CoordinationStore, MemoryStore, Reading, StoreFailed, Written
from kpl_core.coordination.stores import open_store
from kpl_core.coordination.stores.file import FileStore
from kpl_core.errors import ConfigError
from kpl_core.options.coordination_options import STORE_MODULES
from tests.support.store_contract import CONTRACT
from tests.support.waiting import until

pytestmark = pytest.mark.anyio


def own_folder(folder: Path, *, create: bool = False) -> Path:
    """Return the subfolder that the store keeps its files in."""
    own = folder / f"kpl-{os.geteuid()}"
    if create:
        own.mkdir(mode=0o700, exist_ok=True)
    return own


def modes_in(folder: Path) -> dict[str, int]:
    return {path.name: path.stat().st_mode & 0o777 for path in folder.iterdir()}


@pytest.fixture(params=["memory", "file"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> CoordinationStore:
    return MemoryStore() if request.param == "memory" else FileStore(tmp_path / "made" / "by the store")


@pytest.mark.parametrize("clause", CONTRACT, ids=lambda clause: clause.__name__)
async def test_a_store_keeps_the_contract(
    store: CoordinationStore, clause: Callable[[CoordinationStore], Awaitable[None]]
) -> None:
    await clause(store)


async def test_a_folder_is_readable_only_by_its_user(tmp_path: Path) -> None:
    store = FileStore(tmp_path / "new")
    await store.write("any.json", b"1")
    assert (tmp_path / "new").stat().st_mode & 0o777 == 0o700
    own = own_folder(tmp_path / "new")
    assert own.stat().st_mode & 0o777 == 0o700
    assert modes_in(own) == {".lock": 0o600, "any.json": 0o600}


async def test_a_link_instead_of_the_lock_file_overwrites_no_other_file(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_text("precious")
    (tmp_path / "store").mkdir()
    for folder in (tmp_path / "store", own_folder(tmp_path / "store", create=True)):
        (folder / ".lock").symlink_to(victim)
    with pytest.raises(StoreFailed, match="symbolic links"):
        await FileStore(tmp_path / "store").write("any.json", b"1")
    assert victim.read_text() == "precious"


@pytest.mark.parametrize("shared", [False, True])
async def test_a_folder_that_every_user_may_change_is_refused(tmp_path: Path, shared: bool) -> None:
    store = FileStore(tmp_path / "open", shared=shared)
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    for call in (store.write("any.json", b"1"), store.read("any.json"), store.read_all("any")):
        with pytest.raises(StoreFailed, match="mode 0777 lets every user replace its files") as failed:
            await call
        assert failed.value.reason == "denied"
    (tmp_path / "open").chmod(0o1777)
    assert (await store.write("any.json", b"1")).version


async def test_a_subfolder_that_is_a_link_or_open_to_others_is_refused(tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir(mode=0o700)
    own = own_folder(tmp_path)
    own.symlink_to(elsewhere)
    with pytest.raises(StoreFailed, match="a link or a file"):
        await FileStore(tmp_path).write("any.json", b"1")
    assert list(elsewhere.iterdir()) == []
    own.unlink()
    own.mkdir()
    own.chmod(0o750)
    with pytest.raises(StoreFailed, match="with mode 0750, not 0700"):
        await FileStore(tmp_path).write("any.json", b"1")


@pytest.mark.parametrize("name", ["../any.json", "..", ".lock", "a/b.json", "", "a\0b"])
async def test_a_name_that_leaves_the_folder_is_refused(tmp_path: Path, name: str) -> None:
    store = FileStore(tmp_path / "store")
    for call in (store.write(name, b"1"), store.read(name), store.delete(name)):
        with pytest.raises(StoreFailed, match="is not a file name"):
            await call
    assert not (tmp_path / "any.json").exists()


async def test_a_shared_folder_has_files_for_its_group(tmp_path: Path) -> None:
    store = await open_store(f"file://{tmp_path}?shared=true")
    await store.write("any.json", b"1")
    assert modes_in(tmp_path) == {".lock": 0o660, "any.json": 0o660}


async def test_a_shared_folder_that_the_store_creates_is_open_to_its_group(tmp_path: Path) -> None:
    before = os.umask(0o077)
    try:
        await (await open_store(f"file://{tmp_path}/made/here?shared=true")).write("any.json", b"1")
        assert (tmp_path / "made").stat().st_mode & 0o777 == 0o700
        # With the set-group-id bit, new files have the group of the folder.
        assert (tmp_path / "made" / "here").stat().st_mode & 0o7777 == 0o2770
        # The mode of an existing folder is its administrator's decision.
        (tmp_path / "made" / "here").chmod(0o750)
        await (await open_store(f"file://{tmp_path}/made/here?shared=true")).write("any.json", b"2")
        assert (tmp_path / "made" / "here").stat().st_mode & 0o777 == 0o750
    finally:
        os.umask(before)


async def test_a_file_in_place_of_the_folder_fails_with_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreFailed, match="check its disk") as failed:
        await FileStore(tmp_path / "file").write("any.json", b"1")
    assert failed.value.reason == "down"


async def test_a_lock_file_with_garbage_is_repaired(tmp_path: Path) -> None:
    (own_folder(tmp_path, create=True) / ".lock").write_bytes(b"no number, and longer than one")
    store = FileStore(tmp_path)
    first = await store.write("any.json", b"1")
    assert (await store.write("any.json", b"2", expected=first.version)).version


async def test_a_deleted_lock_file_is_not_the_lock_any_more(tmp_path: Path) -> None:
    """A clean-up job deletes the lock file while it is held; the next lock is another file."""
    store = FileStore(tmp_path)
    await store.write("any.json", b"1")
    own = own_folder(tmp_path)
    descriptor, folder = os.open(own / ".lock", os.O_RDWR), os.open(own, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        (own / ".lock").unlink()
        assert not store._is_locked(descriptor, folder)  # noqa: SLF001
        assert (await store.write("any.json", b"2")).version
        assert (own / ".lock").exists()
    finally:
        os.close(descriptor)
        os.close(folder)


async def test_a_disk_that_hangs_blocks_none_of_the_shared_worker_threads(tmp_path: Path) -> None:
    released = threading.Event()

    class Hanging(FileStore):
        def _read(self, name: str) -> Reading:
            released.wait(60)
            return super()._read(name)

    store = Hanging(tmp_path)
    shared = anyio.to_thread.current_default_thread_limiter()
    try:
        async with anyio.create_task_group() as tasks:
            for _ in range(int(shared.total_tokens) + 1):
                tasks.start_soon(store.read, "any.json")
            await until(lambda: store._threads.statistics().tasks_waiting)  # noqa: SLF001
            with anyio.fail_after(30):
                assert await anyio.to_thread.run_sync(lambda: "free") == "free"
            assert shared.borrowed_tokens == 0
            tasks.cancel_scope.cancel()
    finally:
        released.set()


class SlowFileStore(FileStore):
    """Its threads wait for `released` before they write, and count themselves in `waiting` meanwhile."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.released = threading.Event()
        self.waiting: list[str] = []

    def _write(self, name: str, body: bytes, expected: str | None) -> Written:
        self.waiting.append(name)
        self.released.wait(60)
        self.waiting.remove(name)
        return super()._write(name, body, expected)

    async def cancel_a_write(self, name: str, *, before: Callable[[], object] = lambda: None) -> None:
        """Cancel a write whose thread waits; call `before` first."""
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self.write, name, b"1")
            await until(lambda: name in self.waiting)
            before()
            tasks.cancel_scope.cancel()


async def test_a_cancelled_write_has_ended_when_its_call_returns(tmp_path: Path) -> None:
    store = SlowFileStore(tmp_path)
    timer = threading.Timer(0.1, store.released.set)
    await store.cancel_a_write("any.json", before=timer.start)
    await store.aclose()
    assert not store.waiting
    assert set(modes_in(own_folder(tmp_path))) == {".lock", "any.json"}
    timer.join()


async def test_a_cancelled_write_that_waits_for_the_lock_writes_nothing(tmp_path: Path) -> None:
    store = FileStore(tmp_path)
    await store.write("first.json", b"1")
    with (own_folder(tmp_path) / ".lock").open("r+b") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        with anyio.move_on_after(0.05):
            await store.write("second.json", b"2")
        # Not even its temporary file is left.
        assert set(modes_in(own_folder(tmp_path))) == {".lock", "first.json"}
    assert (await store.read("second.json")).body is None


@pytest.mark.long
async def test_cancelled_writes_to_a_disk_that_hangs_return_and_leave_at_most_four_threads(tmp_path: Path) -> None:
    store = SlowFileStore(tmp_path)
    try:
        with anyio.fail_after(30):
            for number in range(4):
                await store.cancel_a_write(str(number))
            # The fifth fails on asyncio, and waits on trio.
            with suppress(StoreFailed), anyio.move_on_after(0.05):
                await store.write("4", b"1")
        assert store.waiting == ["0", "1", "2", "3"]
    finally:
        store.released.set()


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
async def test_a_folder_without_write_permission_is_denied(tmp_path: Path) -> None:
    (tmp_path / "locked").mkdir(mode=0o500)
    with pytest.raises(StoreFailed, match="for this process") as failed:
        await FileStore(tmp_path / "locked").write("any.json", b"1")
    assert failed.value.reason == "denied"


async def test_a_memory_store_is_shared_by_its_name() -> None:
    one, other = await open_store("memory://same"), await open_store("memory://same")
    await one.write("any.json", b"1")
    assert (await other.read("any.json")).body == b"1"
    assert (await (await open_store("memory://another")).read("any.json")).body is None
    await one.aclose()


async def test_a_url_opens_a_folder(tmp_path: Path) -> None:
    store = await open_store(f"file://{tmp_path}/kpl%20orders")
    await store.write("any.json", b"1")
    assert (own_folder(tmp_path / "kpl orders") / "any.json").read_bytes() == b"1"


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("file://relative/path", "give the full path of a folder"),
        ("file:///", "give the full path of a folder"),
        ("file:///run/kpl?shared=maybe", "unknown parameter"),
        ("s3:///prefix", "names no bucket"),
        ("dynamodb://", "names no table"),
        ("ftp://host", "not a URL of a known kind"),
    ],
)
async def test_an_incomplete_url_names_what_is_missing(url: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        await open_store(url)


@pytest.mark.parametrize("scheme", STORE_MODULES)
def test_each_scheme_has_a_module_that_opens_its_store(scheme: str) -> None:
    module = import_module(f"kpl_core.coordination.{STORE_MODULES[scheme]}")
    assert iscoroutinefunction(module.open_store)
    assert f"{scheme}://" in (stores.__doc__ or "")


async def test_a_store_whose_package_is_missing_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "kpl_core.coordination.stores.redis", raising=False)
    monkeypatch.setitem(sys.modules, "redis", None)
    with pytest.raises(ConfigError, match=r"package redis is not installed; pip install 'kpl-integrations\[redis\]'"):
        await open_store("redis://127.0.0.1:1")


async def test_no_two_writes_have_the_same_version(store: CoordinationStore) -> None:
    versions = [(await store.write("any.json", b"same")).version for _ in range(300)]
    assert len(set(versions)) == 300
