"""Several processes with one folder as the store."""

from pathlib import Path

import pytest

from tests.support.store_contract import assert_never_two_winners


@pytest.mark.long
def test_two_processes_never_both_replace_one_version(tmp_path: Path) -> None:
    assert_never_two_winners(f"file://{tmp_path}/store", attempts=1_000)
