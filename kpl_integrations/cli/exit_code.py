"""What the exit status of `kpl` means; docs/howto/cli.md shows the same table."""

from enum import IntEnum

__all__ = ["ExitCode"]


class ExitCode(IntEnum):
    """The statuses of all commands. 2, wrong usage, is typer's own."""

    DONE = 0
    NOT_ALL_ARRIVED = 1
    WRONG_USAGE = 2
    # Kinesis, or what the command needs on this machine: unreachable, no credentials, no stream, no permission.
    UNUSABLE = 3
    # A line or a file of the input.
    BAD_INPUT = 4
    INTERRUPTED = 130
    # As a shell reports SIGPIPE.
    NOBODY_READS = 141
    TERMINATED = 143
