"""Run a program that ends when its parent process ends, in any way.

`python end_with_parent.py COMMAND...` is started in its own session with a pipe as stdin to which no process
writes. When the pipe closes (the parent closed it, exited or was killed), the whole process group is ended,
first by SIGTERM, then by SIGKILL. When the program ends by itself, so does its group.
"""

import os
import signal
import subprocess
import sys
import threading

TERMINATION_SECONDS = 3.0


def main() -> None:
    # SIGTERM goes to the whole group below, and this process has to stay. Not SIG_IGN: the program would inherit it.
    signal.signal(signal.SIGTERM, lambda *_: None)
    program = subprocess.Popen(sys.argv[1:], stdin=subprocess.DEVNULL)
    threading.Thread(target=_end_when_stdin_closes, args=(program,), daemon=True).start()
    code = program.wait()
    sys.stderr.write(f"{sys.argv[1]} ended with code {code}\n")
    sys.stderr.flush()
    os.killpg(0, signal.SIGKILL)  # what it started, and this process


def _end_when_stdin_closes(program: "subprocess.Popen[bytes]") -> None:
    sys.stdin.buffer.read()
    os.killpg(0, signal.SIGTERM)
    try:
        program.wait(TERMINATION_SECONDS)
    except subprocess.TimeoutExpired:
        os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    main()
