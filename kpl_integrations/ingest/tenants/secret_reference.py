"""Where a secret is that cannot be hashed: an environment variable, or a file only its owner can read."""

import os
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import msgspec

from kpl_core import ConfigError

__all__ = ["SecretReference"]

_OTHERS: Final = 0o077
_LONGEST: Final = 4096


class SecretReference(msgspec.Struct, frozen=True):
    """One secret's place. `what` names it in errors, which never hold the secret itself."""

    what: str
    variable: str | None
    file: Path | None

    def read(self, environment: Mapping[str, str]) -> str:
        """Return the secret.

        Raises:
            ConfigError: there is no one place, nothing in it, or others may read the file.
        """
        if (self.variable is None) == (self.file is None):
            message = f"{self.what} is named by an environment variable and a file, or by neither; name one of them"
            raise ConfigError(message)
        secret = environment.get(self.variable, "") if self.variable is not None else self._file_text()
        if not secret:
            place = f"environment variable {self.variable}" if self.variable is not None else f"file {self.file}"
            message = f"{self.what} is empty: {place} holds nothing; set it before the gateway starts"
            raise ConfigError(message)
        return secret

    def _file_text(self) -> str:
        assert self.file is not None  # noqa: S101 - the caller looked
        try:
            descriptor = os.open(self.file, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
            with open(descriptor, "rb") as opened:  # noqa: PTH123 - a descriptor, so that what is checked is what is read
                status = os.fstat(descriptor)
                self._require_private(status)
                return opened.read(_LONGEST).decode().strip()
        except ConfigError:
            raise
        except (OSError, ValueError) as error:
            is_text = isinstance(error, UnicodeDecodeError)
            # A name with a NUL in it is no path at all.
            reason = error.strerror if isinstance(error, OSError) else "it is no UTF-8" if is_text else str(error)
            message = f"{self.what} cannot be read from {self.file}: {reason}"
            raise ConfigError(message) from None

    def _require_private(self, status: os.stat_result) -> None:
        if not stat.S_ISREG(status.st_mode):
            message = f"{self.what} is said to be in {self.file}, which is no file"
            raise ConfigError(message)
        mode = stat.S_IMODE(status.st_mode)
        if mode & _OTHERS:
            message = f"{self.what} is in {self.file} of mode {mode:04o}, which others may read; chmod 600 it"
            raise ConfigError(message)
