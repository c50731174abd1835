"""The cases of the drill: how a part is broken and repaired, and what must be said meanwhile."""

import os
import re
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

from kpl_core.testing import ErrorAnswer, RecordError, When
from tests.drill.scene import Scene
from tests.support.certificates import certificate_pair, days_from_now
from tests.support.small_disk import MIB, fill_disk, free_disk
from tests.support.waiting import wait_until

_DISK_BYTES = 64 * MIB
_LOST_RECORDS = 50


class NotRun(Exception):  # noqa: N818 - reads as a sentence where it is raised
    """This machine lacks what the case needs; the text says what."""


class Case(NamedTuple):
    """One row.

    `prepare` makes the files in the folder, and returns settings. While the part is broken, `ready` is the status of
    `/readyz`, `part` is in `state` (no part: None), `alert` is pending or firing, `log` is in the log, and `kpl doctor`
    has a failed check `doctor` (None: it finds nothing). The dashboard shows the part, and in the cards of `board` what
    these patterns match. `loses`: records of accepted requests never arrive. Without `repairs`, it ends by itself;
    without `alert_ends`, the alert ends with its cause.
    """

    name: str
    alert: str
    breaks: Callable[[Scene], None]
    part: str | None = None
    state: str = ""
    log: str = ""
    doctor: str | None = None
    board: Mapping[str, str] = MappingProxyType({})
    loses: bool = False
    prepare: Callable[[Path], Mapping[str, str]] = lambda _folder: {}
    repairs: Callable[[Scene], None] = lambda _scene: None
    ready: int = 200
    ack: str = "queued"
    workers: int = 1
    alert_ends: str = ""
    seconds: float = 60.0


def _mount(folder: Path) -> Mapping[str, str]:
    disk = folder / "disk"
    disk.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={_DISK_BYTES}", "tmpfs", str(disk)]
    if subprocess.run(command, capture_output=True, check=False).returncode:
        message = "only root may mount a file system"
        raise NotRun(message)
    return {"SPOOL": str(disk / "spool.db")}


@contextmanager
def unmounted(folder: Path) -> Iterator[None]:
    """Unmount the disk of a case at the end of the block."""
    try:
        yield
    finally:
        if (folder / "disk").is_mount():
            subprocess.run(["umount", "--lazy", str(folder / "disk")], check=False)


def _store(folder: Path) -> Mapping[str, str]:
    (folder / "store").mkdir(mode=0o700)
    return {"COORDINATION": (folder / "store").as_uri()}


def _remove_store(scene: Scene) -> None:
    # Also for root, whom permissions do not stop: a file where the folder was.
    (scene.folder / "store").rename(scene.folder / "moved")
    (scene.folder / "store").write_text("not a folder")


def _bring_store_back(scene: Scene) -> None:
    (scene.folder / "store").unlink()
    (scene.folder / "moved").rename(scene.folder / "store")


def _certificate(folder: Path) -> Mapping[str, str]:
    if shutil.which("openssl") is None:
        message = "openssl makes the certificates"
        raise NotRun(message)
    certificate_pair(folder, "good", days_from_now(-1), days_from_now(90))
    certificate_pair(folder, "old", days_from_now(-90), days_from_now(-1))
    _use(folder, "good")
    return {"TLS_CERTIFICATE": str(folder / "used.crt"), "TLS_KEY": str(folder / "used.key")}


def _use(folder: Path, name: str) -> None:
    for end in ("crt", "key"):
        shutil.copy(folder / f"{name}.{end}", folder / f"used.{end}")


def _kill_worker(scene: Scene) -> None:
    # Over one connection, so one worker has the records and is the one that is asked. They wait there to be batched.
    scene.put(count=_LOST_RECORDS)
    wait_until(lambda: scene.traces.span(scene.sent[-1].trace_id), "the span of this request")
    os.kill(scene.readiness()[1]["process_id"], signal.SIGKILL)


def _flood(scene: Scene) -> None:
    for _ in range(300):
        scene.put("noisy")


def _break_certificate(scene: Scene) -> None:
    (scene.folder / "used.crt").write_text("-----BEGIN CERTIFICATE-----\nMII")


def _break_tenants(scene: Scene) -> None:
    scene.tenants.write_text("[[tenant]")


CASES = (
    Case(
        name="spool full",
        part="spool",
        state="degraded",
        alert="KinesisSpoolCannotStore",
        board={"suffers": "quiet", "numbers": "cannot store"},
        log="part changed: spool is degraded: cannot store",
        prepare=_mount,
        breaks=lambda scene: fill_disk(scene.folder / "disk"),
        repairs=lambda scene: free_disk(scene.folder / "disk", size_bytes=_DISK_BYTES),
        ack="spooled",
    ),
    Case(
        name="store away",
        part="coordination",
        state="degraded",
        alert="KinesisCoordinationFails",
        log="part changed: coordination is degraded",
        prepare=_store,
        breaks=_remove_store,
        repairs=_bring_store_back,
    ),
    Case(
        name="certificate expired",
        part="certificate",
        state="failed",
        alert="KinesisCertificateExpired",
        log="part changed: certificate is failed: expired at",
        doctor="certificate",
        prepare=_certificate,
        breaks=lambda scene: _use(scene.folder, "old"),
        repairs=lambda scene: _use(scene.folder, "good"),
    ),
    Case(
        name="certificate half written",
        part="certificate",
        state="degraded",
        alert="KinesisCertificateNotRenewed",
        log="part changed: certificate is degraded: the changed files cannot be used",
        doctor="certificate",
        prepare=_certificate,
        breaks=_break_certificate,
        repairs=lambda scene: _use(scene.folder, "good"),
    ),
    Case(
        name="tenants file broken",
        part="tenants_file",
        state="degraded",
        alert="KinesisTenantsFileNotRead",
        log="part changed: tenants_file is degraded",
        breaks=_break_tenants,
        repairs=Scene.write_tenants,
    ),
    Case(
        name="Kinesis denied",
        part="kinesis",
        state="failed",
        alert="KinesisGatewayCannotDeliver",
        board={"lost": r"Yes: \d+ record", "suffers": "Not known"},
        loses=True,
        log=r"part changed: kinesis is failed: requests to stream orders \(AccessDeniedException\) fail",
        doctor="stream",
        breaks=lambda scene: scene.break_kinesis(ErrorAnswer("AccessDeniedException")),
        repairs=Scene.repair_kinesis,
    ),
    Case(
        name="a shard throttled",
        part="kinesis",
        state="degraded",
        alert="KinesisBreakerOpen",
        log="part changed: kinesis is degraded: the circuit breaker of shard orders shardId-000000000000",
        board={"hot": "orders 0", "suffers": "Not known"},
        # No record expires before the repair.
        prepare=lambda _: {"RECORD_TTL_MS": "300000"},
        breaks=lambda scene: scene.break_kinesis(RecordError(), When(shard_id="shardId-000000000000")),
        repairs=Scene.repair_kinesis,
    ),
    Case(
        name="a worker killed",
        alert="KinesisGatewayLostRecords",
        board={"lost": r"Yes: \d+ record"},
        loses=True,
        log=r"worker \d (was ended by SIGKILL|died with \d+ acknowledged)",
        prepare=lambda _: {"RECORD_MAX_BUFFERED_TIME_MS": "8000"},
        breaks=_kill_worker,
        workers=2,
        alert_ends="15 minutes after the last loss, its range",
    ),
    Case(
        name="a noisy tenant",
        alert="KinesisGatewayRefuses",
        board={"cause": "noisy", "suffers": "^None$", "answers": "refused: quota"},
        breaks=_flood,
        alert_ends="5 minutes after the last refusal, its range",
    ),
)


def logged(case: Case, text: str) -> bool:
    """Return True if this line says what the case expects."""
    return bool(case.log) and re.search(case.log, text) is not None
