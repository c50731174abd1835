"""Who empties a file of an earlier run stays as long as something leaves it by itself."""

import asyncio
import logging

import pytest

from kpl_core.durability.dead_letters import DeadLetterQueue, RedrivePolicy
from kpl_core.durability.spool import Spool, SpoolOptions
from kpl_integrations.ingest.workers.leftovers import holds_more
from tests.durability.spool.records import EXPIRED, THROTTLED, failed, spooled

SECONDS = 30.0


@pytest.mark.parametrize(
    ("kept", "max_redrives", "holds", "warns"),
    [
        pytest.param("nothing", None, False, False, id="an empty file"),
        pytest.param("record", None, True, False, id="a record"),
        pytest.param("letter", None, True, False, id="a letter that is tried again, though not yet"),
        pytest.param("letter", 0, False, True, id="a letter that waits for a person"),
    ],
)
def test_it_stays_for_what_leaves_by_itself_and_warns_of_the_rest(tmp_path, caplog, kept, max_redrives, holds, warns):
    with Spool(SpoolOptions(path=tmp_path / "old.db", commit_interval_ms=0.0)) as spool:
        policy = RedrivePolicy(base_seconds=1_000, max_redrives=max_redrives)
        letters = DeadLetterQueue(spool, policy=policy, chance=lambda: 1.0)
        if kept == "record":
            spool.append_nowait([spooled(1)], claim=False).result(SECONDS)
        if kept == "letter":
            letter = letters.letter(spooled(1), "throttled", result=failed(THROTTLED, EXPIRED))
            letters.bury_nowait([letter]).result(SECONDS)
        with caplog.at_level(logging.WARNING):
            assert asyncio.run(holds_more(letters)) is holds
    assert ("kpl dlq list" in caplog.text) is warns
