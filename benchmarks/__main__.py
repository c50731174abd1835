"""python -m benchmarks: measure, print the tables, write docs/benchmarks/.

python -m benchmarks                    the short version, about ten minutes
python -m benchmarks --full             all alternatives at all workloads, all settings
python -m benchmarks --only kpl_core    rows whose name contains the words; writes no file
python -m benchmarks --json             every answer of every round as JSON instead of tables
"""

import argparse
import json
import sys
from dataclasses import asdict
from datetime import UTC, datetime

from benchmarks.compiled import COMPILED, why_not_built
from benchmarks.machine import cores, describe_machine
from benchmarks.native_rivals import build_all
from benchmarks.peers import PEERS, install_all
from benchmarks.plan import Row, full_plan, short_plan
from benchmarks.plot import draw
from benchmarks.rounds import NOT_RUN, Results, run_rounds
from benchmarks.sink_process import REPOSITORY
from benchmarks.table import as_markdown, as_text, shares_of_cores, tables_of

_DIRECTORY = REPOSITORY / "docs" / "benchmarks"
_INTRODUCTION = """\
Written by `make bench`. The unit is user records per CPU-second of the producing process: user and system
time of all its threads, every record's result checked.

The Amazon KPL is measured where Java and Maven are installed, the Go producer where Go is. The KPL speaks only TLS."""


def main() -> int:
    arguments = _arguments()
    rows = _chosen(full_plan() if arguments.full else short_plan(), arguments.only)
    if not rows:
        print(f"no row's name contains {arguments.only!r}; --list prints the names of all rows", file=sys.stderr)
        return 2
    if arguments.list:
        print("\n".join(row.key for row in rows))
        return 0
    environments = {row.environment for row in rows}
    not_installed = install_all(peer for peer in PEERS if peer.environment in environments) | build_all(environments)
    if COMPILED in environments and (failure := why_not_built()):
        not_installed[COMPILED] = failure
    placed_on, placement = cores()
    results = run_rounds(rows, arguments.rounds, placed_on, not_installed)
    remarks = _remarks(results, arguments.rounds, placement)
    if arguments.json:
        print(json.dumps(_as_json(results, remarks), indent=1))
    else:
        print("\n\n".join([*map(as_text, tables_of(results)), "\n".join(remarks)]))
    if not arguments.only:
        _write(results, remarks)
    failures = [results.failure_of(row) for row in rows if not row.environment]
    return 1 if any(failure and not failure.startswith(NOT_RUN) for failure in failures) else 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser("benchmarks", description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--full", action="store_true", help="everything, about half an hour")
    parser.add_argument("--only", default="", metavar="NAME", help="rows whose name contains NAME")
    parser.add_argument("--rounds", type=int, default=5, help="interleaved rounds, 5 by default")
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")
    parser.add_argument("--list", action="store_true", help="print the names of the rows, measure nothing")
    return parser.parse_args()


def _chosen(rows: list[Row], words: str) -> list[Row]:
    return [row for row in rows if words.lower() in row.key.lower()]


def _remarks(results: Results, round_count: int, placement: str) -> list[str]:
    calibrations = [
        answer.figures["calibration_ms"]
        for row in results.rows
        for answer in results.of(row)
        if "calibration_ms" in answer.figures
    ]
    remarks = [
        f"{datetime.now(UTC):%Y-%m-%d}, {describe_machine()}.",
        f"{placement} Loopback, plain HTTP unless the table says TLS; the sink answers at once and never throttles.",
        f"Median [smallest - largest] of {round_count} interleaved rounds, each trial a fresh process.",
        "A ratio is the median of the ratios within a round.",
        "The sink opens aggregated records with its own decoder and checks each user record's data, key and shard.",
        "Misrouted: in a shard that does not hold the record's own hash key; a KCL drops those.",
    ]
    shares = shares_of_cores(results)
    if calibrations and shares is not None:
        remarks.append(
            f"Background load: a fixed loop took {min(calibrations):.1f} - {max(calibrations):.1f} ms, producers had "
            f"{shares[0]:.0%} of their core (median), the sink needed {shares[1]:.0%} of its own (at most)."
        )
    return remarks


def _as_json(results: Results, remarks: list[str]) -> dict[str, object]:
    return {
        "remarks": remarks,
        "rows": [
            {
                "key": row.key,
                "subject": row.subject,
                "workload": row.workload.fields(),
                "answers": [asdict(answer) for answer in results.answers[row.key]],
            }
            for row in results.rows
        ],
    }


def _write(results: Results, remarks: list[str]) -> None:
    _DIRECTORY.mkdir(parents=True, exist_ok=True)
    page = [
        "# Measured speed",
        _INTRODUCTION,
        "![User records per CPU-second, by producer](throughput.svg)",
        *map(as_markdown, tables_of(results)),
        "## How it was measured",
        "\n".join(f"* {remark}" for remark in remarks),
    ]
    (_DIRECTORY / "results.md").write_text("\n\n".join(page) + "\n")
    (_DIRECTORY / "throughput.svg").write_text(draw(results))


if __name__ == "__main__":
    sys.exit(main())
