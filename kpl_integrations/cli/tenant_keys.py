"""The commands of `kpl keys`: create, hash and check the credentials of the gateway's tenants."""

import os
import secrets
import sys
from pathlib import Path
from typing import Final

import msgspec

from kpl_core import ConfigError
from kpl_integrations.cli.exit_code import CommandFailure, ExitCode
from kpl_integrations.cli.terminal import Figure, note, print_figures, print_json
from kpl_integrations.ingest.tenants import FileTenants, new_api_key, stored_key

# As long as AWS' ids, so that every SDK accepts the length; AWS does not use the prefix.
_ID_PREFIX: Final = "KPLI"
_ID_CHARACTERS: Final = "ABCDEFGHIJKLMNOPQRSTUVWXYZ234567"
_ID_LENGTH: Final = 20
_SECRET_BYTES: Final = 32
_MAX_KEY_CHARACTERS: Final = 512


async def new_key(as_json: bool) -> ExitCode:
    """Print a new API key and its line for the tenants file."""
    key = new_api_key()
    if as_json:
        print_json({"api_key": key, "stored": stored_key(key)})
    else:
        sys.stdout.write(f'{key}\napi_keys = ["{stored_key(key)}"]\n')
        note("Give the first line to the tenant only; it cannot be shown again. The second is for the tenants file.")
    return ExitCode.DONE


async def hash_key(as_json: bool) -> ExitCode:
    """Print the line for the tenants file for the key on standard input."""
    key = sys.stdin.readline(_MAX_KEY_CHARACTERS + 2).strip()
    if not 1 <= len(key) <= _MAX_KEY_CHARACTERS:
        message = f"standard input has no key of 1 to {_MAX_KEY_CHARACTERS} characters; pipe one in"
        raise CommandFailure(message, exit_code=ExitCode.BAD_INPUT)
    if as_json:
        print_json({"stored": stored_key(key)})
    else:
        sys.stdout.write(f'api_keys = ["{stored_key(key)}"]\n')
    return ExitCode.DONE


async def new_key_pair(secret_file: Path, as_json: bool) -> ExitCode:
    """Write a new secret to a file that only its owner can read; print its access key id."""
    random_part = "".join(secrets.choice(_ID_CHARACTERS) for _ in range(_ID_LENGTH - len(_ID_PREFIX)))
    access_key_id = _ID_PREFIX + random_part
    secret = secrets.token_urlsafe(_SECRET_BYTES)
    _write_private(secret_file, secret + "\n")
    if as_json:
        print_json({"access_key_id": access_key_id, "secret_file": str(secret_file)})
    else:
        line = f"{{ access_key_id = {_toml(access_key_id)}, secret_file = {_toml(_absolute(secret_file))} }}"
        sys.stdout.write(f"aws_access_key_id = {access_key_id}\nsigv4 = [{line}]\n")
        note(f"The secret is in {secret_file}: give it to the tenant, and keep the file for the gateway.")
    return ExitCode.DONE


async def check_tenants(file: Path, as_json: bool) -> ExitCode:
    """Read a tenants file and its secret files, and print a summary."""
    try:
        directory = FileTenants(file)
    except ConfigError as error:
        raise CommandFailure(str(error), exit_code=ExitCode.BAD_INPUT) from error
    tenants = list(directory.tenants())
    tiers = [tenant.tier for tenant in tenants]
    figures = [
        Figure("tenants", len(tenants)),
        *(Figure(tier, tiers.count(tier), "of them") for tier in ("critical", "bulk")),
        Figure(
            "without_credentials",
            directory.unknown is not None,
            "all of them share one flow" if directory.unknown is not None else "there is no [unknown]",
            "accepted" if directory.unknown is not None else "rejected",
        ),
    ]
    print_figures(figures, as_json=as_json)
    return ExitCode.DONE


def _write_private(path: Path, text: str) -> None:
    try:
        # Never overwrite a file, and never let others read it, not even for a moment.
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        with open(descriptor, "w", encoding="ascii") as opened:  # noqa: PTH123 - a descriptor
            opened.write(text)
    except OSError as error:
        message = f"{path} cannot be written: {error.strerror}; name a new file in an existing folder"
        raise CommandFailure(message, exit_code=ExitCode.WRONG_USAGE) from error


def _absolute(path: Path) -> str:
    return str(path.absolute())


def _toml(text: str) -> str:
    # A JSON string is a TOML basic string.
    return msgspec.json.encode(text).decode()
