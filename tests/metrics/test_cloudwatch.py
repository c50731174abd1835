"""The KPL's metrics, row by row of its table, and their upload with PutMetricData and EMF."""

import json
import threading
from typing import Any

import pytest
from botocore.exceptions import EndpointConnectionError

from kpl_core import Config, ConfigError, Producer
from kpl_core.testing import FakeKinesis, FakeTransport
from kpl_integrations.metrics.cloudwatch import KPL_METRICS, CloudWatchMetrics, StatisticSet, emf_lines
from kpl_integrations.metrics.cloudwatch_uploader import CloudWatchUploader
from tests.support.metrics import EXPIRED, THROTTLED, finished, request
from tests.support.processes import refusing

# The table of the KPL's metrics.md: name, level, unit, finest granularity.
KPL_TABLE = """
UserRecordsReceived                Detailed Count        stream
UserRecordsPending                 Detailed Count        stream
UserRecordsPut                     Summary  Count        shard
UserRecordsDataPut                 Detailed Bytes        shard
UserRecordExpired                  Summary  Count        shard
KinesisRecordsPut                  Summary  Count        shard
KinesisRecordsDataPut              Detailed Bytes        shard
ErrorsByCode                       Summary  Count        shard
AllErrors                          Summary  Count        shard
RetriesPerRecord                   Detailed Count        shard
BufferingTime                      Summary  Milliseconds stream
RequestTime                        Detailed Milliseconds stream
UserRecordsPerKinesisRecord        Detailed Count        shard
KinesisRecordsPerPutRecordsRequest Detailed Count        stream
UserRecordsPerPutRecordsRequest    Detailed Count        stream
"""
ROWS = [tuple(line.split()) for line in KPL_TABLE.split("\n") if line]


def taken(metrics, *facts):
    for fact in facts:
        metrics(fact)
    return {(datum.name, *(value for _, value in datum.dimensions)): datum for datum in metrics.take()}


def numbers(datum):
    values = datum.values
    return values.total, values.count, values.minimum, values.maximum


@pytest.mark.parametrize(("name", "level", "unit", "finest"), ROWS)
def test_names_levels_and_units_match_the_kpl(name, level, unit, finest):
    metric = KPL_METRICS[name]
    assert (metric.level, metric.unit, metric.finest) == (level.lower(), unit, finest)


def test_the_table_has_no_other_rows():
    assert list(KPL_METRICS) == [row[0] for row in ROWS]


def test_values_match_the_kpl():
    found = taken(CloudWatchMetrics(), request(), finished(), finished(**EXPIRED))
    shard = ("orders", "shardId-0")
    assert numbers(found["UserRecordsPut", *shard]) == (20, 25, 0, 1)
    assert numbers(found["UserRecordsDataPut", *shard]) == (900, 20, 45, 45)
    assert numbers(found["UserRecordExpired", *shard]) == (5, 5, 1, 1)
    assert numbers(found["KinesisRecordsPut", *shard]) == (1, 3, 0, 1)
    assert numbers(found["KinesisRecordsDataPut", *shard]) == (1_000, 1, 1_000, 1_000)
    assert numbers(found["ErrorsByCode", THROTTLED, *shard]) == (2, 2, 1, 1)
    assert numbers(found["AllErrors", *shard]) == (2, 3, 0, 1)
    assert numbers(found["RetriesPerRecord", *shard]) == (50, 25, 2, 2)
    assert numbers(found["UserRecordsPerKinesisRecord", *shard]) == (20, 1, 20, 20)
    assert numbers(found["BufferingTime", "orders"]) == (100, 1, 100, 100)
    assert numbers(found["RequestTime", "orders"]) == (250, 1, 250, 250)
    assert numbers(found["KinesisRecordsPerPutRecordsRequest", "orders"]) == (4, 1, 4, 4)
    assert numbers(found["UserRecordsPerPutRecordsRequest", "orders"]) == (80, 1, 80, 80)


def test_a_metric_exists_once_for_each_prefix_of_its_dimensions():
    places = [(stream, shard) for stream in ("orders", "clicks") for shard in ("shardId-0", "shardId-1")]
    found = taken(CloudWatchMetrics(), *(finished(*place) for place in places))
    of_name = [key[1:] for key in found if key[0] == "UserRecordsPut"]
    assert len(of_name) == 7
    assert set(of_name) == {(), ("orders",), ("clicks",), *places}
    assert numbers(found["UserRecordsPut",])[0] == 80


def test_the_error_code_is_after_the_callers_dimensions_and_before_the_stream():
    metrics = CloudWatchMetrics(dimensions={"Service": "shop"})
    metrics(request())
    dimensions = {datum.dimensions for datum in metrics.take() if datum.name == "ErrorsByCode"}
    all_dimensions = (("Service", "shop"), ("ErrorCode", THROTTLED), ("StreamName", "orders"), ("ShardId", "shardId-0"))
    assert dimensions == {all_dimensions[:length] for length in range(1, 5)}


@pytest.mark.parametrize(("granularity", "deepest"), [("global", 0), ("stream", 1), ("shard", 2)])
def test_granularity_limits_the_dimensions(granularity, deepest):
    found = taken(CloudWatchMetrics(granularity=granularity), finished())
    assert max(len(key) - 1 for key in found) == deepest


@pytest.mark.parametrize(("level", "names"), [("none", 0), ("summary", 6), ("detailed", 13)])
def test_a_level_sends_its_own_metrics_and_those_of_lower_levels(level, names):
    found = taken(CloudWatchMetrics(level=level), request(), finished(), finished(**EXPIRED))
    assert len({key[0] for key in found}) == names


def test_ten_thousand_shards_make_a_thousand_and_one_series():
    found = taken(CloudWatchMetrics(), *(finished(shard=f"shardId-{number}") for number in range(10_000)))
    assert len([key for key in found if key[0] == "UserRecordsPut" and len(key) == 3]) == 1_001


@pytest.mark.parametrize("option", [{"level": "all"}, {"granularity": "key"}])
def test_an_unknown_level_or_granularity_is_rejected(option):
    with pytest.raises(ConfigError, match="must be one of"):
        CloudWatchMetrics(**option)


@pytest.mark.anyio
async def test_received_and_pending_records_of_a_watched_producer_are_counted():
    metrics = CloudWatchMetrics()
    async with Producer(Config(), transport=FakeTransport(FakeKinesis({"orders": 1})), hooks=[metrics]) as producer:
        metrics.watch(producer)
        for _ in range(30):
            _ = producer.put_nowait("orders", partition_key="k", data=b"data")
        found = {(datum.name, len(datum.dimensions)): datum for datum in metrics.take()}
        assert numbers(found["UserRecordsReceived", 1]) == (30, 30, 1, 1)
        assert numbers(found["UserRecordsPending", 1]) == (30, 1, 30, 30)
        await producer.flush()
        found = {(datum.name, len(datum.dimensions)): datum for datum in metrics.take()}
    assert ("UserRecordsReceived", 1) not in found
    assert found["UserRecordsPut", 1].values.total == 30


class Client:
    def __init__(self):
        self.calls = []
        self.is_down = False

    def put_metric_data(self, **parameters):
        if self.is_down:
            raise EndpointConnectionError(endpoint_url="https://monitoring")
        self.calls.append(parameters)


def test_a_call_has_at_most_a_thousand_data():
    metrics, client = CloudWatchMetrics(), Client()
    for number in range(500):
        metrics(finished(shard=f"shardId-{number}"))
    uploader = CloudWatchUploader(metrics, client=client, clock=lambda: 60.0)
    assert uploader.upload()
    sizes = [len(call["MetricData"]) for call in client.calls]
    assert max(sizes) == 1_000
    assert len(sizes) == -(-sum(sizes) // 1_000)
    assert {call["Namespace"] for call in client.calls} == {"KinesisProducerLibrary"}


def test_data_of_a_failed_upload_is_in_the_next_and_the_failure_is_logged_once(caplog):
    metrics, client = CloudWatchMetrics(), Client()
    uploader = CloudWatchUploader(metrics, client=client)
    client.is_down = True
    for _ in range(3):
        metrics(finished())
        assert not uploader.upload()
    client.is_down = False
    assert uploader.upload()
    (datum,) = [
        each
        for each in client.calls[0]["MetricData"]
        if each["MetricName"] == "UserRecordsPut" and not each["Dimensions"]
    ]
    assert datum["StatisticValues"] == {"SampleCount": 60.0, "Sum": 60.0, "Minimum": 1.0, "Maximum": 1.0}
    assert len(caplog.records) == 1


@pytest.mark.parametrize("error", [RuntimeError, KeyError, OSError])
def test_any_exception_of_the_client_loses_no_data_and_uploads_continue(error, monkeypatch):
    metrics, client = CloudWatchMetrics(granularity="global"), Client()
    failed, sent = threading.Event(), threading.Event()
    take = client.put_metric_data

    def put_metric_data(**parameters):
        if not failed.is_set():
            failed.set()
            raise error
        take(**parameters)
        sent.set()

    monkeypatch.setattr(client, "put_metric_data", put_metric_data)
    metrics(finished())
    with CloudWatchUploader(metrics, client=client, interval=0.01):
        assert sent.wait(30)
    named = {datum["MetricName"] for call in client.calls for datum in call["MetricData"]}
    assert "UserRecordsPut" in named


def test_leaving_the_block_uploads_the_rest_and_ends_the_thread():
    metrics, client = CloudWatchMetrics(), Client()
    with CloudWatchUploader(metrics, client=client):
        metrics(finished())
    assert len(client.calls) == 1
    assert not [thread for thread in threading.enumerate() if thread.name == "kpl-cloudwatch"]


def test_an_uploader_that_was_never_entered_uploads_at_close():
    metrics, client = CloudWatchMetrics(), Client()
    metrics(finished())
    CloudWatchUploader(metrics, client=client).close()
    assert len(client.calls) == 1


def test_an_endpoint_that_never_answers_delays_close_by_at_most_twenty_seconds(monkeypatch):
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "local")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "local")
    metrics = CloudWatchMetrics()
    metrics(finished())
    with refusing() as url:
        uploader = CloudWatchUploader(metrics, region="us-east-1", endpoint_url=url)
        assert uploader.upload() is False
    made: Any = uploader.client
    config = made.meta.config
    assert (config.connect_timeout + config.read_timeout) * config.retries["total_max_attempts"] <= 20


def test_emf_lines_have_the_same_metrics():
    metrics = CloudWatchMetrics(granularity="stream")
    metrics(finished())
    lines = [json.loads(line) for line in emf_lines(metrics.take(), namespace="KPL", now=1.5)]
    assert len(lines) == 2
    line = lines[1]
    (directive,) = line["_aws"]["CloudWatchMetrics"]
    assert (line["_aws"]["Timestamp"], directive["Namespace"], directive["Dimensions"]) == (
        1_500,
        "KPL",
        [["StreamName"]],
    )
    assert line["StreamName"] == "orders"
    assert {"Name": "UserRecordsPut", "Unit": "Count"} in directive["Metrics"]
    assert line["UserRecordsPut"] == {"Max": 1.0, "Min": 1.0, "Count": 20, "Sum": 20.0}
    assert all(each["Name"] in line for each in directive["Metrics"])


def test_merging_keeps_sum_count_and_extremes():
    first, second = StatisticSet(), StatisticSet()
    first.add(10, 5)
    second.add(3, 1)
    assert first.merged(second) == StatisticSet(total=13, count=6, minimum=2, maximum=3)
