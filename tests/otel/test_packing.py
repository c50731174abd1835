"""How few bytes an export takes: traces of a shard together, compressed, without white space."""

import gzip
from collections import defaultdict
from typing import Any

import pytest
import zstandard

from kpl_core import ConfigError, decode
from kpl_core.testing import FakeKinesis
from kpl_integrations.otel.telemetry_records import encoder
from tests.otel.conftest import emit
from tests.otel.test_splitting import large_spans
from tests.support.telemetry import PROTOS, exported, user_records

DECOMPRESS: dict[str, Any] = {"gzip": gzip.decompress, "zstd": zstandard.decompress}


def warm(exporter: Any) -> None:
    """Export once, so that the shards are known."""
    exporter.export(large_spans(1, 10))
    assert exporter.force_flush(10_000)


def stored_bytes(kinesis: FakeKinesis) -> int:
    return sum(len(record.data) for record in kinesis.records("telemetry"))


@pytest.mark.parametrize("encoding", ["otlp_proto", "otlp_json"])
def test_traces_of_one_span_cost_at_most_half_more_than_with_random_keys(make_exporter, encoding):
    """Each was a user record with the resource in it: 4.0 times the bytes."""
    sizes = {}
    for choice in ("random", "trace_id"):
        kinesis = FakeKinesis({"telemetry": 4}, enforce_limits=False)
        exporter = make_exporter("traces", kinesis=kinesis, partition_key=choice, encoding=encoding)
        warm(exporter)
        before = stored_bytes(kinesis)
        emit("traces", exporter, 512)()
        sizes[choice] = stored_bytes(kinesis) - before
    assert sizes["trace_id"] < 1.5 * sizes["random"]


def test_the_spans_of_a_trace_are_in_one_shard_whichever_traces_share_its_record(make_exporter, kinesis: FakeKinesis):
    for _ in range(3):
        exporter = make_exporter("traces")
        warm(exporter)
        emit("traces", exporter, 200)()
    shards = defaultdict(set)
    for shard, span in exported(kinesis, "telemetry", "traces"):
        shards[span.trace_id].add(shard)
    assert len(shards) == 3 * 201
    assert all(len(where) == 1 for where in shards.values())


def test_traces_that_share_a_record_and_are_too_large_for_it_are_divided(make_exporter, kinesis: FakeKinesis):
    exporter = make_exporter("traces")
    warm(exporter)
    exporter.export([span for _ in range(30) for span in large_spans(1, 100_000)])
    assert exporter.force_flush(10_000)
    assert len(list(exported(kinesis, "telemetry", "traces"))) == 31


@pytest.mark.parametrize("compression", DECOMPRESS)
@pytest.mark.parametrize("signal", PROTOS)
def test_a_consumer_knows_a_compressed_export_by_its_magic_bytes(make_exporter, kinesis, signal, compression):
    exporter = make_exporter(signal, compression=compression)
    emit(signal, exporter, 100)()
    magic = {"gzip": b"\x1f\x8b", "zstd": b"\x28\xb5\x2f\xfd"}[compression]
    records = [record.data for _, record in user_records(kinesis, "telemetry")]
    assert all(data.startswith(magic) for data in records)
    assert sum(len(PROTOS[signal].FromString(DECOMPRESS[compression](data)).SerializeToString()) for data in records)
    assert exporter.counts().delivered == exporter.counts().exported > 0


def test_zstd_without_its_package_is_an_error_that_says_what_to_do(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "zstandard", None)
    with pytest.raises(ConfigError, match=r"pip install 'kpl-integrations\[zstd\]'"):
        encoder("logs", "otlp_proto", "zstd")


@pytest.mark.parametrize("signal", PROTOS)
def test_json_has_no_white_space_between_its_parts(make_exporter, kinesis, signal):
    exporter = make_exporter(signal, encoding="otlp_json")
    emit(signal, exporter, 20)()
    for _, record in user_records(kinesis, "telemetry"):
        assert b'": ' not in record.data
        assert b", " not in record.data


def test_without_aggregation_every_kinesis_record_is_an_export(make_exporter, kinesis, monkeypatch):
    monkeypatch.setenv("KPL_OTEL_AGGREGATION", "false")
    exporter = make_exporter("logs")
    for _ in range(5):
        emit("logs", exporter, 10)
    exporter.force_flush(10_000)
    stored = kinesis.records("telemetry")
    assert all(decode(record.data) is None for record in stored)
    assert len(list(exported(kinesis, "telemetry", "logs"))) == exporter.counts().delivered
