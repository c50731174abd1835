"""The sender's event loop: it works until the very end, and what its threads log comes back to no handler of ours."""

from kpl_integrations.exit_safe_loop import ExitSafeLoop
from kpl_integrations.logging_handler.own_threads import enter_own_thread, leave_own_thread

__all__ = ["SenderLoop"]


class SenderLoop(ExitSafeLoop):
    """The loop of a handler's own thread."""

    def entering_thread(self) -> None:
        """Make the thread that resolves one of ours."""
        enter_own_thread()

    def leaving_thread(self) -> None:
        """Make it anybody's again."""
        leave_own_thread()
