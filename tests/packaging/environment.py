"""A virtual environment outside the checkout."""

import os
import subprocess
import sys
import venv
from pathlib import Path

__all__ = ["Environment"]


class Environment:
    """A clean environment in a folder, which sees nothing of this checkout or its environment."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        venv.create(
            folder / "venv", with_pip=False
        )  # the pip of the test environment installs into it, in a third of the time
        self.python = folder / "venv" / "bin" / "python"

    def run(self, *arguments: str, timeout: float = 300.0) -> str:
        """Run Python with these arguments in the folder; return its output, raise if it fails."""
        hidden = {"PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "KPL_KERNELS"}
        ended = subprocess.run(
            [self.python, *arguments],
            cwd=self.folder,
            env={name: value for name, value in os.environ.items() if name not in hidden},
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
        )
        assert ended.returncode == 0, f"{arguments}\n{ended.stdout}\n{ended.stderr}"
        return ended.stdout

    def pip(self, *arguments: str) -> None:
        """Run the tests' pip on this environment; raise if it fails."""
        command = [sys.executable, "-m", "pip", "--python", str(self.python), "--disable-pip-version-check", *arguments]
        ended = subprocess.run(command, cwd=self.folder, capture_output=True, text=True, timeout=300, check=False)
        assert ended.returncode == 0, f"{arguments}\n{ended.stdout}\n{ended.stderr}"

    def install(self, *requirements: str) -> None:
        """Install these, without byte-compiling modules that may never be imported."""
        self.pip("install", "--quiet", "--no-compile", *requirements)

    def modules_after(self, statement: str) -> set[str]:
        """Return the names of the top-level modules that a statement imports."""
        printed = self.run(
            "-W", "error", "-c", f"{statement}\nimport sys\nprint(*{{n.partition('.')[0] for n in sys.modules}})"
        )
        return set(printed.split())
