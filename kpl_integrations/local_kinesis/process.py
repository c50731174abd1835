"""The embedded Kinesis in a process of its own, so that it takes no time from the loop under test."""

import subprocess
import sys
from collections.abc import Mapping
from typing import Self

__all__ = ["LocalKinesisProcess"]

_ENDS_WITHIN_SECONDS = 5.0


class LocalKinesisProcess:
    """Runs `python -m kpl_integrations.local_kinesis` from `with` to the end of its block.

    `streams` is name -> shards; `options` are further arguments of the command, such as
    `"--no-limits"`.
    """

    def __init__(self, streams: Mapping[str, int], *options: str) -> None:
        named = [argument for name, shards in streams.items() for argument in ("--stream", f"{name}:{shards}")]
        self._command = [sys.executable, "-m", "kpl_integrations.local_kinesis", *named, *options]
        self._process: subprocess.Popen[str] | None = None
        self.endpoint_url = ""

    @property
    def pid(self) -> int:
        """Return the process id; 0 while it does not run."""
        return 0 if self._process is None else self._process.pid

    def __enter__(self) -> Self:
        """Start it and wait until it listens.

        Raises:
            RuntimeError: it ended instead; its words are on stderr.
        """
        self._process = subprocess.Popen(self._command, stdout=subprocess.PIPE, text=True)  # noqa: S603 - our own module
        line = "" if self._process.stdout is None else self._process.stdout.readline()
        self.endpoint_url = line.rpartition(" ")[2].strip()
        if not self.endpoint_url:
            self.__exit__()
            message = f"{' '.join(self._command)} did not start to listen; see its stderr"
            raise RuntimeError(message)
        return self

    def __exit__(self, *_exc_info: object) -> None:
        """Ask it to end, and end it if it does not within 5 seconds."""
        process, self._process = self._process, None
        if process is None:
            return
        process.terminate()
        try:
            process.wait(_ENDS_WITHIN_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        if process.stdout is not None:
            process.stdout.close()
