"""What stops a command, said in one sentence with the fix."""

from kpl_integrations.cli.exit_code import ExitCode

__all__ = ["CommandFailure"]


class CommandFailure(Exception):  # noqa: N818 - reads as a sentence where it is raised
    """The command cannot go on. The message is one sentence: the value, and what to do."""

    def __init__(self, message: str, *, exit_code: ExitCode = ExitCode.UNUSABLE) -> None:
        super().__init__(message)
        self.exit_code = exit_code
