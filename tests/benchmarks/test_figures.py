"""Medians, ranges and ratios: a ratio never compares two moments of the machine."""

from xml.etree import ElementTree as ET

from benchmarks.figures import figure_of, ratio_of
from benchmarks.ledger import Verdict
from benchmarks.native_rivals import EXPERT, GO, KPL
from benchmarks.plan import Row, full_plan, short_plan
from benchmarks.plot import draw
from benchmarks.rounds import Answer, Results
from benchmarks.table import as_markdown, as_text, tables_of
from benchmarks.workload import Workload

WORK = Workload(record_count=100)
OURS = Row("peers", "kpl_core", WORK, "program")
PEER = Row("peers", "peer", WORK, "program", environment="peer")
BROKEN = Row("peers", "broken", WORK, "program", environment="broken")


def answer(cpu_seconds: float, *, misrouted: int = 0) -> Answer:
    figures = {"cpu_seconds": cpu_seconds, "wall_seconds": cpu_seconds, "acknowledged": 100, "bytes_in": 15_000}
    return Answer(figures | {"requests": 4}, Verdict(user_records=100, misrouted=misrouted))


def results() -> Results:
    return Results(
        [OURS, PEER, BROKEN],
        {
            # The machine halves its speed in the second round: both halve, the ratio stays.
            OURS.key: [answer(1.0), answer(2.0), answer(1.0)],
            PEER.key: [answer(4.0, misrouted=95), answer(8.0, misrouted=95), answer(4.0, misrouted=90)],
            BROKEN.key: [Answer(failure="could not be installed: no wheel")] * 3,
        },
    )


def test_a_rate_is_the_median_of_its_rounds_with_its_range() -> None:
    figure = figure_of(results(), OURS)
    assert figure is not None
    assert (figure.smallest, figure.median, figure.largest) == (50, 100, 100)
    assert figure.text() == "100 [50 - 100]"


def test_a_ratio_is_computed_within_each_round() -> None:
    ratio = ratio_of(results(), OURS, PEER)
    assert ratio is not None
    assert (ratio.smallest, ratio.median, ratio.largest) == (4, 4, 4)


def test_a_producer_that_could_not_be_measured_is_in_the_table_with_the_reason() -> None:
    peers, failures = tables_of(results())
    assert ("broken", "NOT MEASURED") in [row[:2] for row in peers.rows]
    assert failures.rows == [(BROKEN.key, "could not be installed: no wheel")]
    assert ratio_of(results(), OURS, BROKEN) is None


def test_the_faults_found_by_the_sink_are_in_the_table() -> None:
    table, _ = tables_of(results())
    assert "95 % misrouted" in as_text(table)
    assert "95 % misrouted" in as_markdown(table)


def test_the_table_over_tls_compares_with_the_kpl_and_go_and_has_one_note_a_producer() -> None:
    ways = [Row("over_tls", "kpl_core", WORK, "program", setting=setting, note="ours") for setting in ("put", "slow")]
    kpl, go, expert = (Row("over_tls", rival.name, WORK, "program", note=rival.name) for rival in (KPL, GO, EXPERT))
    seconds = {ways[0].key: 1.0, ways[1].key: 2.0, kpl.key: 8.0, go.key: 0.5, expert.key: 0.25}
    rows = [*ways, kpl, go, expert]
    (table,) = tables_of(Results(rows, {key: [answer(cpu_seconds)] for key, cpu_seconds in seconds.items()}))
    assert [row[0] for row in table.rows] == ["kpl_core, put", "kpl_core, slow", KPL.name, GO.name, EXPERT.name]
    assert [[cell.partition(" ")[0] for cell in row[2:5]] for row in table.rows] == [
        ["8.00", "0.50", "0.25"],
        ["4.00", "0.25", "0.12"],
        ["-", "0.06", "0.03"],
        ["16.00", "-", "0.50"],
        ["32.00", "2.00", "-"],
    ]
    assert len(table.remarks) == 5


def test_the_columns_of_the_text_table_are_aligned() -> None:
    table, _ = tables_of(results())
    rule, header, _, *rows = as_text(table).splitlines()[1:7]
    assert {len(line) for line in (header, *rows)} == {len(rule)}


def test_the_plot_is_well_formed_and_has_every_producer() -> None:
    texts = [node.text or "" for node in ET.fromstring(draw(results())).iter() if node.tag.endswith("text")]  # noqa: S314
    assert all(any(row.subject in text for text in texts) for row in (OURS, PEER, BROKEN))


def test_no_two_rows_of_a_plan_share_a_name() -> None:
    for plan in (short_plan(), full_plan()):
        assert len({row.key for row in plan}) == len(plan)
