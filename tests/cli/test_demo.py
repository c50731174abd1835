import json
import re
import sys
from datetime import UTC, datetime

import pytest

from kpl_integrations.cli import tail
from kpl_integrations.cli.demo import DemoRecords, Inventory
from kpl_integrations.cli.tail import ReadRecord, user_records
from tests.support.kpl_process import in_a_terminal, run, without_escape_codes


@pytest.mark.long
def test_no_record_is_lost():
    outcome = run("demo", "--records", "5000", "--quiet")
    assert (outcome.status, outcome.err) == (0, "")
    rows = dict(re.findall(r"^([a-z0-9 -]+?)  +([\d,.]+)", outcome.out, re.MULTILINE))
    assert (rows["records"], rows["lost"], rows["altered"], rows["shards"]) == ("5,000", "0", "0", "5")
    assert outcome.out.splitlines()[-1].startswith("lost 0")
    # Above 10 on an idle machine; on a busy one deadlines close the aggregated records earlier.
    assert float(rows["aggregation ratio"]) > 2
    assert "\x1b" not in outcome.out


def test_json_output_is_one_object(kpl):
    outcome = kpl("demo", "--records", "500", "--shards", "1", "--no-split", "--json")
    figures = json.loads(outcome.out)
    assert (outcome.status, figures["records"], figures["lost"], figures["shards"]) == (0, 500, 0, 1)
    assert 0 < figures["put_to_ack_p50_ms"] <= figures["put_to_ack_p99_ms"] < 10_000


def test_direct_uses_a_producer_without_the_gateway(kpl):
    outcome = kpl("demo", "--records", "500", "--direct", "--json")
    figures = json.loads(outcome.out)
    assert (outcome.status, figures["records"], figures["lost"], figures["shards"]) == (0, 500, 0, 5)
    assert figures["put_records_calls"] > 0


def test_a_missing_extra_is_reported(kpl, monkeypatch):
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    for name in [
        name for name in sys.modules if name.startswith(("kpl_integrations.ingest", "kpl_integrations.cli.demo"))
    ]:
        monkeypatch.delitem(sys.modules, name)
    outcome = kpl("demo", "--records", "1")
    assert outcome.status == 3
    assert outcome.err == "kpl: prometheus_client is not installed; pip install 'kpl-integrations[cli,ingest]'\n"


@pytest.mark.parametrize("settings", [{"KPL_INGEST_TENANTS": "/nothing.toml", "KPL_INGEST_PORT": "1"}])
def test_environment_settings_of_another_gateway_are_ignored(kpl, monkeypatch, settings):
    for name, value in settings.items():
        monkeypatch.setenv(name, value)
    assert kpl("demo", "--records", "100").status == 0


@pytest.mark.parametrize("as_json", [False, True])
def test_a_lost_record_is_status_1(kpl, monkeypatch, as_json):
    monkeypatch.setattr(tail, "user_records", lambda record, shard: (user_records(record, shard) or [])[1:])
    outcome = kpl("demo", "--records", "100", *["--json"] * as_json)
    assert outcome.status == 1
    if as_json:
        assert json.loads(outcome.out)["lost"] > 0
    else:
        assert re.search(r"^lost [1-9]\d*: not every record was read back", outcome.out, re.MULTILINE)


@pytest.mark.long
def test_a_terminal_shows_progress_and_ctrl_c_stops_it():
    outcome = in_a_terminal("demo", "--records", "1000000", after="put and acknowledged", typed="\x03")
    assert outcome.status == 130
    assert " of 1,000,000 records" in without_escape_codes(outcome.out)
    assert "interrupted; all temporary data is gone" in outcome.out
    assert "Traceback" not in outcome.out
    assert "closed" not in outcome.out


def test_the_same_seed_makes_the_same_records():
    first, again, other = (DemoRecords(1_000, seed=seed) for seed in (1, 1, 2))
    assert [first.record(number) for number in range(1_000)] == [again.record(number) for number in range(1_000)]
    assert first.record(7) != other.record(7)
    sizes = [len(first.record(number)[1]) for number in range(1_000)]
    assert (min(sizes) >= 20, max(sizes) <= 2_048, len({first.record(number)[0] for number in range(1_000)})) == (
        True,
        True,
        1_000,
    )


def read(partition_key, data):
    return ReadRecord("shardId-000000000000", "1", None, partition_key, None, datetime.now(UTC), data)


def test_the_inventory_counts_lost_duplicated_and_altered_records():
    records = DemoRecords(4, seed=1)
    inventory = Inventory(records)
    key, data = records.record(2)
    inventory.add([read(*records.record(0)), read(*records.record(1)), read(*records.record(0))])
    inventory.add([read(key, data[:-1]), read("another key", data), read(key, b"")])
    inventory.add([read(*DemoRecords(9, seed=1).record(8))])
    assert (inventory.found, inventory.lost, inventory.duplicated, inventory.altered) == (2, 2, 1, 4)
