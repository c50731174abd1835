"""Measure imports, each in its own interpreter: `python -m benchmarks.import_time`.

The table includes aiobotocore and botocore. kpl_core imports botocore when a producer is opened, and aiobotocore only
for what needs its client.
"""

import statistics
import subprocess
import sys

_STATEMENTS = {
    "nothing": "pass",
    "kpl_core": "import kpl_core",
    "aiobotocore": "import aiobotocore.session",
    "kpl_core and its transport": "import kpl_core, kpl_core.transport.direct_transport",
    "kpl_integrations.logging_handler": "import kpl_integrations.logging_handler",
    "kpl_integrations.fastapi": "import kpl_integrations.fastapi",
    "fastapi": "import fastapi",
}
_ROUNDS = 7
# User and system time of the ended process, in milliseconds.
_MEASURED = """{}
import resource
used = resource.getrusage(resource.RUSAGE_SELF)
print(1000 * (used.ru_utime + used.ru_stime))
"""


def _cpu_milliseconds(statement: str) -> float:
    command = [sys.executable, "-c", _MEASURED.format(statement)]
    return float(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


def main() -> None:
    """Print a row for each: the median over interleaved rounds, without the time of the interpreter itself."""
    samples: dict[str, list[float]] = {name: [] for name in _STATEMENTS}
    for _ in range(_ROUNDS + 1):
        for name, statement in _STATEMENTS.items():
            samples[name].append(_cpu_milliseconds(statement))
    # The first round writes the byte code.
    medians = {name: statistics.median(each[1:]) for name, each in samples.items()}
    for name, median in medians.items():
        if name != "nothing":
            print(f"{name:34} {median - medians['nothing']:6.0f} ms of CPU")


if __name__ == "__main__":
    main()
