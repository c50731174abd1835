"""The `kpl` command, from extra `cli`: try, put, read, without writing a program."""

# Nothing is imported here, so that Ctrl-C finds a handler as soon as there is anything to interrupt.

__all__ = ["main"]

# `ExitCode.INTERRUPTED`, which is not imported yet.
_INTERRUPTED = 130


def main(arguments: list[str] | None = None) -> int:
    """Run `kpl` with `arguments` (the process' own by default); return the exit status."""
    try:
        from kpl_integrations.cli.entry import main as enter  # noqa: PLC0415 - a third of a second may pass in it

        return enter(arguments)
    except KeyboardInterrupt:
        # No command has begun that would have more to say.
        return _INTERRUPTED
