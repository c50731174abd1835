"""The results as tables: aligned plain text for the terminal, Markdown for docs/benchmarks/results.md."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import median

from benchmarks.figures import figure_of, ratio_of
from benchmarks.native_rivals import EXPERT, GO, KPL
from benchmarks.plan import OURS, Kind, Row
from benchmarks.rounds import Results
from benchmarks.workload import Workload

__all__ = ["Table", "as_markdown", "as_text", "tables_of"]

_ABSENT = "-"
_NOT_MEASURED = "NOT MEASURED"


@dataclass(slots=True)
class Table:
    """A title, a header, rows of cells, and remarks below."""

    title: str
    header: tuple[str, ...]
    rows: list[tuple[str, ...]] = field(default_factory=list)
    remarks: list[str] = field(default_factory=list)


def tables_of(results: Results) -> list[Table]:
    """Return a table for each workload with peers, then one for each other kind of row."""
    beside: dict[Kind, Callable[[Results, list[Row]], Table]] = {"peers": _peers_table, "over_tls": _tls_table}
    tables = [
        make(results, [row for row in _rows(results, kind) if _size_and_keys(row) == workload])
        for kind, make in beside.items()
        for workload in dict.fromkeys(map(_size_and_keys, _rows(results, kind)))
    ]
    makers: dict[Kind, Callable[[Results, list[Row]], Table]] = {
        "workloads": _workloads_table,
        "hot_path": _hot_path_table,
        "latency": _latency_table,
        "memory": _memory_table,
    }
    tables += [make(results, rows) for kind, make in makers.items() if (rows := _rows(results, kind))]
    failures = [(row, failure) for row in results.rows if (failure := results.failure_of(row))]
    if failures:
        tables.append(Table("NOT MEASURED, in some round or in all", ("row", "reason")))
        tables[-1].rows = [(row.key, failure) for row, failure in failures]
    return tables


def as_text(table: Table) -> str:
    """Return the table in columns: the first one left-aligned, the others right-aligned."""
    widths = [max(map(len, column)) for column in zip(table.header, *table.rows, strict=True)]

    def line(cells: Sequence[str]) -> str:
        first, *others = (
            cell.rjust(width) if position else cell.ljust(width)
            for position, (cell, width) in enumerate(zip(cells, widths, strict=True))
        )
        return "  ".join((first, *others)).rstrip()

    rule = "-" * (sum(widths) + 2 * (len(widths) - 1))
    remarks = [f"  {remark}" for remark in table.remarks]
    return "\n".join([table.title, rule, line(table.header), rule, *map(line, table.rows), *remarks])


def as_markdown(table: Table) -> str:
    """Return the table for a documentation page."""
    lines = [f"## {table.title}", ""]
    lines.append(f"| {' | '.join(table.header)} |")
    lines.append(f"| --- |{' ---: |' * (len(table.header) - 1)}")
    lines += [f"| {' | '.join(row)} |" for row in table.rows]
    lines += ["", *(f"* {remark}" for remark in table.remarks)] if table.remarks else []
    return "\n".join(lines)


def _rows(results: Results, kind: Kind) -> list[Row]:
    return [row for row in results.rows if row.kind == kind]


def _size_and_keys(row: Row) -> tuple[int, str]:
    return row.workload.data_bytes, row.workload.keys


def _peers_table(results: Results, rows: list[Row]) -> Table:
    ours = next((row for row in rows if row.subject == OURS), None)
    most = max((row.workload for row in rows), key=lambda workload: workload.record_count)
    table = Table(
        f"Beside the alternatives: {most.title()}",
        (
            "producer",
            "records per CPU-second",
            f"{OURS} is",
            "wire B/record",
            "user records/request",
            "checked by the sink",
        ),
    )
    for row in rows:
        ratio = ratio_of(results, ours, row) if ours is not None and row is not ours else None
        table.rows.append(
            (
                row.subject,
                _rate_cell(results, row),
                ratio.text("{:.2f}") + " x" if ratio else _ABSENT,
                _per_record(results, row, "bytes_in"),
                _records_per_request(results, row),
                checked_by_the_sink(results, row),
            )
        )
    table.remarks = _notes(results, rows, most)
    return table


def _tls_table(results: Results, rows: list[Row]) -> Table:
    most = max((row.workload for row in rows), key=lambda workload: workload.record_count)
    others = {rival.name: next((row for row in rows if row.subject == rival.name), None) for rival in (KPL, GO, EXPERT)}
    table = Table(
        f"Over TLS, beside {'the KPL' if others[KPL.name] else 'Go producers'}: {most.title()}",
        (
            "producer",
            "records per CPU-second",
            *(f"times the {name}" for name in others),
            "wire B/record",
            "user records/request",
            "peak RSS, MB",
            "checked by the sink",
        ),
    )
    for row in rows:
        ratios = [
            ratio_of(results, row, other) if other is not None and other is not row else None
            for other in others.values()
        ]
        rss = figure_of(results, row, "rss_bytes_peak")
        table.rows.append(
            (
                _producer(row),
                _rate_cell(results, row),
                *(ratio.text("{:.2f}") + " x" if ratio else _ABSENT for ratio in ratios),
                _per_record(results, row, "bytes_in"),
                _records_per_request(results, row),
                f"{rss.median / 1e6:,.0f}" if rss else _ABSENT,
                checked_by_the_sink(results, row),
            )
        )
    table.remarks = [*_notes(results, rows, most), "Peak RSS contains the records, all made before the measurement."]
    return table


def _notes(results: Results, rows: list[Row], most: Workload) -> list[str]:
    notes = [
        f"{row.subject}{_versions(results, row)}: "
        f"{'; '.join(filter(None, (row.note, _fewer(row.workload, most)))) or 'its defaults'}."
        for row in rows
    ]
    return list(dict.fromkeys(notes))


def _producer(row: Row) -> str:
    return ", ".join(filter(None, (row.subject, row.setting)))


def _workloads_table(results: Results, rows: list[Row]) -> Table:
    table = Table(
        f"{OURS} with other workloads and settings",
        (
            "work",
            "records per CPU-second",
            "raw boto3 of that size",
            "wire B/record",
            "user records/request",
            "checked by the sink",
        ),
    )
    for row in rows:
        boto3 = next(
            (
                other
                for other in results.rows
                if (other.kind, other.subject) == ("peers", "raw boto3")
                and _size_and_keys(other) == (row.workload.data_bytes, "10k")
            ),
            None,
        )
        ratio = ratio_of(results, row, boto3) if boto3 is not None else None
        table.rows.append(
            (
                ", ".join(filter(None, (row.workload.title(), row.setting))),
                _rate_cell(results, row),
                ratio.text("{:.2f}") + " x" if ratio else _ABSENT,
                _per_record(results, row, "bytes_in"),
                _records_per_request(results, row),
                checked_by_the_sink(results, row),
            )
        )
    return table


def _hot_path_table(results: Results, rows: list[Row]) -> Table:
    table = Table(
        f"{OURS} without a network: a transport that answers success at once",
        ("work", "records per CPU-second", "us/record"),
    )
    for row in rows:
        figure = figure_of(results, row)
        cost = f"{1e6 / figure.median:.2f}" if figure else _ABSENT
        table.rows.append((row.workload.title(), _rate_cell(results, row), cost))
    return table


def _latency_table(results: Results, rows: list[Row]) -> Table:
    columns = {"p50": "p50_ms", "p99": "p99_ms", "max": "max_ms", "longest step": "longest_step_ms"}
    columns["longest collection"] = "longest_collection_ms"
    header = ("steady 2,000 records/s", *(f"{name}, ms" for name in columns), "CPU", "checked by the sink")
    table = Table("From put to acknowledgement", header)
    for row in rows:
        share = figure_of(results, row, "cpu_share")
        table.rows.append(
            (
                row.name,
                *(_cell(results, row, name, "{:.1f}") for name in columns.values()),
                f"{share.median:.0%}" if share else _ABSENT,
                checked_by_the_sink(results, row),
            )
        )
    table.remarks = [
        "Counted from the instant a record was due. Records wait up to 100 ms to be batched (both defaults).",
        "Longest step: CPU time of the longest callback on the event loop, without garbage collections.",
    ]
    return table


def _memory_table(results: Results, rows: list[Row]) -> Table:
    columns = {
        "RSS over the data, B": ("overhead_bytes", "{:,.0f}"),
        "objects the collector visits": ("tracked_objects", "{:.3f}"),
        "left in cycles": ("cycles", "{:.3f}"),
        "longest collection, ms": ("longest_collection_ms", "{:.1f}"),
    }
    table = Table("Memory of an outstanding record", ("work", *columns))
    for row in rows:
        cells = (_cell(results, row, name, pattern) for name, pattern in columns.values())
        table.rows.append((row.workload.title(), *cells))
    table.remarks = [
        "Per record, all outstanding at once, deliveries kept. A collection visits all objects of the process.",
        "Left in cycles: objects per record that only the collector can free, after everything is done.",
    ]
    return table


def _cell(results: Results, row: Row, name: str, pattern: str) -> str:
    figure = figure_of(results, row, name)
    if figure is not None:
        return figure.text(pattern)
    return _NOT_MEASURED if results.failure_of(row) else _ABSENT


def _rate_cell(results: Results, row: Row) -> str:
    figure = figure_of(results, row)
    return _NOT_MEASURED if figure is None else figure.text()


def _per_record(results: Results, row: Row, name: str) -> str:
    figure = figure_of(results, row, name)
    return f"{figure.median / row.workload.record_count:,.0f}" if figure else _ABSENT


def _records_per_request(results: Results, row: Row) -> str:
    figure = figure_of(results, row, "requests")
    return f"{row.workload.record_count / figure.median:,.0f}" if figure and figure.median else _ABSENT


def checked_by_the_sink(results: Results, row: Row) -> str:
    """Return "all right", or the largest share of faulty records for each fault."""
    answers = [answer for answer in results.of(row) if answer.verdict is not None]
    if not answers:
        return _ABSENT
    count = row.workload.record_count
    faults = {
        "lost": [answer.verdict.lost for answer in answers if answer.verdict],
        "duplicated": [answer.verdict.duplicated for answer in answers if answer.verdict],
        "malformed": [answer.verdict.malformed for answer in answers if answer.verdict],
        "misrouted": [answer.verdict.misrouted for answer in answers if answer.verdict],
        "keys replaced": [answer.verdict.wrong_keys for answer in answers if answer.verdict],
        "not acknowledged": [count - answer.figures["acknowledged"] for answer in answers],
    }
    shares = {fault: max(values) / count for fault, values in faults.items()}
    return ", ".join(f"{_percent(share)} {fault}" for fault, share in shares.items() if share) or "all right"


def _percent(share: float) -> str:
    return "<1 %" if share < 0.01 else f"{share:.0%}".replace("%", " %")


def _versions(results: Results, row: Row) -> str:
    answers = results.of(row)
    if not answers:
        return ""
    versions: dict[str, str] = answers[0].figures.get("versions", {})
    return f" ({', '.join(f'{name} {version}' for name, version in versions.items())})"


def _fewer(workload: Workload, most: Workload) -> str:
    if workload.record_count == most.record_count:
        return ""
    return f"{workload.record_count:,} records instead of {most.record_count:,}"


def shares_of_cores(results: Results) -> tuple[float, float] | None:
    """Return the median share of its core a producer had, and the largest share that the sink used of its own."""
    answers = [
        answer.figures
        for row in results.rows
        if row.kind in {"peers", "over_tls", "workloads"}
        for answer in results.of(row)
        if "sink_cpu_seconds" in answer.figures
    ]
    if not answers:
        return None
    return (
        median(figures["cpu_seconds"] / figures["wall_seconds"] for figures in answers),
        max(figures["sink_cpu_seconds"] / figures["wall_seconds"] for figures in answers),
    )
