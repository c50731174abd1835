"""A plain program that ends without closing anything: python ending_program.py <how>; see `ending_app` for the rest."""

import os
import signal
import sys
import threading
import time

from ending_app import put  # type: ignore[import-not-found] # beside it, in the folder of the programs

REQUESTS = 10


def put_all(*, pause: float = 0.0) -> None:
    """Put as much as a test asks for."""
    for number in range(REQUESTS):
        put(str(number))
        time.sleep(pause)


def put_after_the_main_thread() -> None:
    """Put once the main thread has ended."""
    threading.main_thread().join()
    time.sleep(0.2)
    put_all(pause=0.02)


def main(how: str) -> None:
    """End in the way that the test names."""
    if how == "a thread goes on after the main thread":
        threading.Thread(target=put_after_the_main_thread).start()
        return
    put_all()
    if how == "sys.exit":
        sys.exit(3)
    if how == "an exception":
        message = "the program failed"
        raise ArithmeticError(message)
    if how in {"SIGTERM", "SIGTERM with a handler"}:
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(60)
    if how == "SIGINT":
        # A shell without job control starts background programs with SIGINT ignored.
        signal.signal(signal.SIGINT, signal.default_int_handler)
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(60)


if "handler" in sys.argv[1]:
    # Set after the senders have chained to the default: the program's own handler comes first and exits.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(4))
main(sys.argv[1])
