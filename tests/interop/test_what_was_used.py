"""Runs last: a green run in which an emulator or a consumer was not used would prove too little."""

from itertools import product

from tests.interop.consumers import kcl, npm, order_storage, pypi
from tests.interop.emulators import ABILITIES
from tests.interop.ledger import Ledger

# At least this many records each, put and read back; a handful could be an accident of selection.
ENOUGH_RECORDS = 1000


def test_every_emulator_and_every_consumer_was_used(ledger: Ledger) -> None:
    wanted = [*product(ABILITIES.keys() - ledger.skipped.keys(), [pypi.NAME, npm.NAME])]
    if kcl.NAME not in ledger.skipped:
        wanted += [("kinesis-local", kcl.NAME), ("kinesis-local", order_storage.NAME)]

    too_little = {pair: ledger.rows.get(pair) for pair in wanted if _read(ledger, pair) < ENOUGH_RECORDS}

    assert not too_little, f"hardly or never used: {too_little}"


def _read(ledger: Ledger, pair: tuple[str, str]) -> int:
    return ledger.rows[pair].read if pair in ledger.rows else 0
