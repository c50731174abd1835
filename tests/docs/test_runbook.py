"""docs/runbook.md quotes the program's own messages, and its commands work as described."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from kpl_core.durability.dead_letters import DeadLetterQueue
from kpl_core.durability.spool import Spool, SpooledRecord, SpoolOptions, spool_error

PAGE = (Path(__file__).parents[2] / "docs" / "runbook.md").read_text(encoding="utf-8")
DAMAGED = PAGE[PAGE.index("**A damaged file.**") : PAGE.index("**Is it damaged?**")]
PAGE_BYTES = 16_384
RECORDS = 5_000


def commands() -> list[str]:
    return re.findall(r"```sh\n(.*?)```", DAMAGED, flags=re.DOTALL)


def test_the_spool_messages_match_the_code():
    sources = [path.read_text(encoding="utf-8") for path in Path(spool_error.__file__).parent.glob("*.py")]
    # The code may split a message into several string literals.
    said = re.sub(r'"\s*f?"', "", " ".join(sources))
    table = PAGE[PAGE.index("| message | do |") : PAGE.index("**A damaged file.**")]
    rows = [row for row in table.splitlines() if row.startswith("| `")]
    quoted = [words for row in rows for words in re.findall(r"`([^`]+)`", row.split("|")[1])]
    assert len(quoted) > 8
    for words in quoted:
        pattern = r"\{[^}]+\}".join(map(re.escape, words.split("N")))
        assert re.search(pattern, said), words


@pytest.fixture
def damaged(tmp_path: Path) -> Path:
    """Return a folder with MOVED, a spool in which one page in the middle of the records was overwritten."""
    moved = tmp_path / "MOVED"
    with Spool(SpoolOptions(path=moved)) as spool:
        queue = DeadLetterQueue(spool)
        record = SpooledRecord("orders", "key", bytes(200), 1_700_000_000.0)
        spool.append_nowait([record] * RECORDS, claim=False).result()
        queue.add_nowait([queue.letter(record, "ttl")] * 10).result()
    with moved.open("r+b") as file:
        file.seek(PAGE_BYTES * 20)
        file.write(b"\xa5" * PAGE_BYTES)
    return tmp_path


def typed(script: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run commands in a shell that ends at the first failing command."""
    return subprocess.run(
        ["sh", "-e", "-c", script], cwd=folder, capture_output=True, text=True, timeout=60, check=False
    )


@pytest.mark.skipif(shutil.which("sqlite3") is None, reason="the command sqlite3 is not installed")
@pytest.mark.parametrize("way", [0, 1])
def test_the_printed_commands_save_the_records_of_a_damaged_file(damaged: Path, way: int):
    recover, dump, count = commands()
    saved = typed((recover, dump)[way], damaged)
    recovered = damaged / "RECOVERED"
    if way == 0 and saved.returncode != 0:
        # As on Debian: it reports an error and leaves no empty file that would open as a spool.
        assert "error" in saved.stderr
        assert not recovered.exists()
        return
    assert saved.returncode == 0, saved.stderr
    assert recovered.stat().st_mode & 0o077 == 0
    records, letters = map(int, typed(count, damaged).stdout.split())
    assert (RECORDS - 100 < records < RECORDS, letters) == (True, 10)
    with Spool(SpoolOptions(path=recovered)) as spool:
        backlog = spool.claim_backlog_nowait(2 * RECORDS, max_bytes=1 << 30).result()
        assert (len(backlog), spool.statistics().letters) == (records, 10)
