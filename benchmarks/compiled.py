"""Build kpl_core with its kernels in C, to measure it in the same run as the sources.

python -m benchmarks.compiled        builds it in some seconds, only if the sources have changed

The same interpreter runs both. The compiled packages are in a separate folder. The programs of this
package are started from that folder, so the compiled packages are imported first.
"""

import hashlib
import os
import subprocess
import sys
from pathlib import Path

from benchmarks.reason import reason_in
from benchmarks.sink_process import REPOSITORY

__all__ = ["COMPILED", "DIRECTORY", "why_not_built"]

#: The environment of the rows that need it.
COMPILED = "compiled"
DIRECTORY = REPOSITORY / ".venv-bench" / COMPILED

_STAMP = DIRECTORY / "built-from"


def why_not_built() -> str:
    """Return an empty string if the packages in `DIRECTORY` were built from these sources, else what to do."""
    if _STAMP.exists() and _STAMP.read_text() == _fingerprint():
        return ""
    return "not built from these sources; python -m benchmarks.compiled builds it"


def _fingerprint() -> str:
    sources = sorted((REPOSITORY / "kpl_core").rglob("*.[chp]*"))
    texts = b"".join(source.read_bytes() for source in [*sources, REPOSITORY / "pyproject.toml"])
    return f"{sys.version_info[:3]} {hashlib.sha256(texts).hexdigest()}"


def build() -> str:
    """Build it; return an empty string, or the reason of the failure."""
    fingerprint = _fingerprint()
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps", "--upgrade"]
    try:
        subprocess.run(
            [*pip, "--target", str(DIRECTORY), str(REPOSITORY)],
            env={**os.environ, "KPL_KERNELS": "require"},
            capture_output=True,
            text=True,
            check=True,
        )
    except subprocess.CalledProcessError as error:
        return reason_in(error.stderr) or f"pip ended with exit code {error.returncode}"
    programs = DIRECTORY / Path(__file__).parent.name
    if not programs.exists():
        programs.symlink_to(REPOSITORY / "benchmarks", target_is_directory=True)
    _STAMP.write_text(fingerprint)
    return ""


if __name__ == "__main__":
    failure = why_not_built() and build()
    print(failure or "built", file=sys.stderr)
    sys.exit(bool(failure))
