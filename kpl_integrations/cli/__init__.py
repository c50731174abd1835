"""The `kpl` command, from extra `cli`: try the producer, put and read records, without writing a program.

Nothing is imported here: Ctrl-C during an import would print a traceback.
"""

__all__ = ["main"]

# The member of `ExitCode`.
_INTERRUPTED = 130


def main(arguments: list[str] | None = None) -> int:
    """Run `kpl` with `arguments`, by default those of the process; return the exit status."""
    try:
        from kpl_integrations.cli.entry import start  # noqa: PLC0415 - see above

        return start(arguments)
    except KeyboardInterrupt:
        # No command has started that could report more.
        return _INTERRUPTED
