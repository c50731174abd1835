"""`kpl keys`: make, hash and check tenants' credentials. The work is imported when a command runs."""

from pathlib import Path
from typing import Annotated

import typer

from kpl_integrations.cli.exit_code import ExitCode
from kpl_integrations.cli.help_texts import Commands
from kpl_integrations.cli.running import EXIT_CODES, Json, needing_extra, run

__all__ = ["keys"]

keys = Commands(
    help="Make and check the credentials of the ingest gateway's tenants.",
    no_args_is_help=True,
    rich_markup_mode="markdown",
)


@keys.command(epilog=EXIT_CODES)
def new(
    as_json: Json = False,
) -> None:
    """Make an API key: 256 random bits. It is printed once and kept nowhere.

    The second line is what belongs into the tenants file: the key's SHA-256, from which nobody can get it back.
    """
    run(_carried_out, "new_key", as_json)


@keys.command("hash", epilog=EXIT_CODES)
def hash_(
    as_json: Json = False,
) -> None:
    """Read an API key from standard input and print what belongs into the tenants file."""
    run(_carried_out, "hash_key", as_json)


@keys.command(epilog=EXIT_CODES)
def sigv4(
    secret_file: Annotated[
        Path, typer.Argument(help="File to write the secret to; it must not be there yet.", show_default=False)
    ],
    as_json: Json = False,
) -> None:
    """Make a key pair for clients that speak AWS' own protocol: an access key id and a secret.

    The secret goes to a new file of mode 0600, because the gateway needs it whole to check signatures; the tenants
    file names that file.
    """
    run(_carried_out, "new_key_pair", secret_file, as_json)


@keys.command(epilog=EXIT_CODES)
def check(
    file: Annotated[Path, typer.Argument(help="The tenants file.", show_default=False)],
    as_json: Json = False,
) -> None:
    """Read a tenants file as the gateway would, secrets included, and say in one sentence what is wrong with it."""
    run(_carried_out, "check_tenants", file, as_json)


async def _carried_out(name: str, *arguments: object) -> ExitCode:
    """Run a command of `tenant_keys`, which needs what the gateway needs."""
    with needing_extra("ingest"):
        from kpl_integrations.cli.keys import tenant_keys  # noqa: PLC0415 - its extra may be missing
    status: ExitCode = await getattr(tenant_keys, name)(*arguments)
    return status
