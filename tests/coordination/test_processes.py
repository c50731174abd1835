"""Several processes, one folder."""

from pathlib import Path

import pytest

from tests.coordination.fights import assert_never_two_winners


@pytest.mark.long
def test_of_two_processes_that_fight_for_one_summary_a_thousand_times_never_two_win(tmp_path: Path) -> None:
    assert_never_two_winners(f"file://{tmp_path}/store", attempts=1_000)
