"""Both transports, over aiobotocore and without it, against a Kinesis on loopback: asyncio and real time."""

import os
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import botocore
import pytest
from aiobotocore.credentials import AioDeferredRefreshableCredentials
from aiobotocore.session import AioSession

from kpl_core import Config, ConfigError, Producer
from kpl_core.pipeline.shard_map import Shard
from kpl_core.records.put_records import PutRecordsRequest, RequestFailure
from kpl_core.records.user_record import UserRecord
from kpl_core.testing import (
    BadBody,
    ErrorAnswer,
    Latency,
    RecordError,
    ResetAfterCommit,
    ResetBeforeCommit,
    When,
    WrongCount,
)
from kpl_core.transport.aiobotocore_transport import AiobotocoreTransport
from kpl_core.transport.direct_transport import DirectTransport, resolved
from kpl_core.transport.transport import KinesisTransport
from kpl_integrations.local_kinesis import LocalKinesis
from tests.support.material import kinesis_record, shard_id

# The wire format, and whether botocore's client sends it.
WIRES = ["fast", "stock", "cbor", "direct fast", "direct cbor"]
both_transports = pytest.mark.parametrize("wire", ["fast", "direct fast"])


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


def config(endpoint_url: str, **options: Any) -> Config:
    return Config(region="us-east-1", endpoint_url=endpoint_url, **options)


def request_of(*records: UserRecord, stream: str = "s") -> PutRecordsRequest:
    return PutRecordsRequest(stream, [kinesis_record(record) for record in records], started_at=0.0)


THREE = (UserRecord("k", b"\x00\xff" * 50), UserRecord("ü\U0001f600", b"", "7"), UserRecord('"\\\n', b"x"))


@asynccontextmanager
async def opened(kinesis: LocalKinesis, wire: str = "fast", **options: Any) -> AsyncIterator[KinesisTransport]:
    transport = transport_of(wire, config(kinesis.endpoint_url, wire_path=wire.removeprefix("direct "), **options))
    async with transport.open():
        yield transport


def transport_of(wire: str, settings: Config) -> KinesisTransport:
    if not wire.startswith("direct"):
        return AiobotocoreTransport(settings)
    found = resolved(settings)
    assert not isinstance(found, str)
    return DirectTransport(settings, found)


# The three calls


@pytest.mark.anyio
@pytest.mark.parametrize("wire", WIRES)
async def test_every_wire_format_stores_the_same_records_and_reads_the_same_answer(wire):
    async with LocalKinesis({"s": 2}) as kinesis, opened(kinesis, wire) as transport:
        kinesis.faults.add(RecordError(), When(record=lambda key, _: key == "k"))
        answer = await transport.put_records(request_of(*THREE))
        assert not isinstance(answer, RequestFailure)
        assert [entry.error_code for entry in answer] == ["ProvisionedThroughputExceededException", None, None]
        assert answer[0].sequence_number is None
        stored = {(record.sequence_number, record.partition_key, record.data) for record in kinesis.fake.records("s")}
        assert stored == {
            (entry.sequence_number, record.partition_key, record.data)
            for entry, record in zip(answer[1:], THREE[1:], strict=True)
        }
        assert answer[1].shard_id == shard_id(0)


@pytest.mark.anyio
@pytest.mark.parametrize("wire", WIRES)
async def test_a_stream_may_be_named_by_its_arn(wire):
    async with LocalKinesis({"s": 1}) as kinesis, opened(kinesis, wire) as transport:
        answer = await transport.put_records(request_of(*THREE, stream=kinesis.fake.arn("s")))
        assert not isinstance(answer, RequestFailure)
        assert all(entry.sequence_number for entry in answer)


def open_shards(kinesis: LocalKinesis) -> list[Shard]:
    return [
        Shard(shard.shard_id, shard.starting_hash_key, shard.ending_hash_key) for shard in kinesis.fake.open_shards("s")
    ]


@pytest.mark.anyio
@both_transports
async def test_all_open_shards_are_listed_from_any_number_of_pages(wire):
    async with LocalKinesis({"s": 1_001}) as kinesis, opened(kinesis, wire) as transport:
        assert await transport.list_shards("s") == open_shards(kinesis)
        kinesis.fake.split_shard("s", shard_id=shard_id(0), new_starting_hash_key=5, now=kinesis.now)
        shards = await transport.list_shards("s")
        assert not isinstance(shards, RequestFailure)
        assert shard_id(0) not in [shard.shard_id for shard in shards]
        assert len(shards) == 1_002
        assert kinesis.fake.calls["ListShards"] == 4


@pytest.mark.anyio
@both_transports
async def test_a_failed_page_fails_the_listing_and_the_next_call_starts_again(wire):
    async with LocalKinesis({"s": 1_001}) as kinesis, opened(kinesis, wire) as transport:
        kinesis.faults.add(ErrorAnswer("LimitExceededException"), When(operation="ListShards", page=2, times=1))
        failure = await transport.list_shards("s")
        assert isinstance(failure, RequestFailure)
        assert failure.code == "LimitExceededException"
        assert await transport.list_shards("s") == open_shards(kinesis)


@pytest.mark.anyio
@both_transports
async def test_the_record_limit_is_read_from_the_stream(wire):
    async with LocalKinesis({"s": 1}) as kinesis, opened(kinesis, wire) as transport:
        assert await transport.max_record_bytes("s") == 1024 * 1024
        kinesis.fake.update_max_record_size("s", max_record_size_kib=2_048, now=kinesis.now)
        assert await transport.max_record_bytes("s") == 2048 * 1024
        unknown = await transport.max_record_bytes("unknown")
        assert isinstance(unknown, RequestFailure)
        assert unknown.code == "ResourceNotFoundException"


# Failures


@pytest.mark.anyio
@pytest.mark.parametrize("wire", WIRES)
async def test_a_service_error_keeps_its_code_and_message(wire):
    async with LocalKinesis({"s": 1}) as kinesis, opened(kinesis, wire) as transport:
        kinesis.faults.add(ErrorAnswer("AccessDeniedException", "User: alice is not authorized"))
        assert await transport.put_records(request_of(*THREE)) == RequestFailure(
            "AccessDeniedException", "User: alice is not authorized"
        )
        assert kinesis.fake.calls["PutRecords"] == 0


@pytest.mark.anyio
@pytest.mark.parametrize("wire", WIRES)
@pytest.mark.parametrize(
    "effect", [ResetBeforeCommit(), ResetAfterCommit(), BadBody(), BadBody(b"<html>"), ErrorAnswer("Odd", status=500)]
)
async def test_a_broken_request_is_one_attempt_and_returns_a_failure(wire, effect):
    async with LocalKinesis({"s": 1}) as kinesis, opened(kinesis, wire) as transport:
        fault = kinesis.faults.add(effect, When(operation="PutRecords"))
        answer = await transport.put_records(request_of(*THREE))
        assert isinstance(answer, RequestFailure)
        assert answer.code in {"Internal", "Odd"}
        assert answer.message
        # The SDK's retries are off, because the retrier owns them.
        assert fault.fired == 1


@pytest.mark.anyio
@both_transports
async def test_an_answer_with_another_count_is_returned_unchanged(wire):
    async with LocalKinesis({"s": 1}) as kinesis, opened(kinesis, wire) as transport:
        kinesis.faults.add(WrongCount(-1), When(operation="PutRecords"))
        answer = await transport.put_records(request_of(*THREE))
        assert not isinstance(answer, RequestFailure)
        assert len(answer) == 2


@pytest.mark.anyio
@both_transports
@pytest.mark.parametrize("effect", [Latency(5.0), Latency(5.0, after_commit=True)])
async def test_an_answer_after_the_timeout_is_a_failure(wire, effect):
    async with (
        LocalKinesis({"s": 1}) as kinesis,
        opened(kinesis, wire, request_timeout_ms=50, connect_timeout_ms=50) as transport,
    ):
        kinesis.faults.add(effect, When(operation="PutRecords"))
        answer = await transport.put_records(request_of(*THREE))
        assert isinstance(answer, RequestFailure)
        assert answer.code == "Internal"


@pytest.fixture
def unused_port():
    """Return a port that refuses connections. It stays bound, so that nothing else can listen on it."""
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        yield bound.getsockname()[1]


@pytest.mark.anyio
@both_transports
async def test_a_refused_connection_returns_a_failure(wire, unused_port):
    transport = transport_of(wire, config(f"http://127.0.0.1:{unused_port}"))
    async with transport.open():
        for answer in (await transport.put_records(request_of(*THREE)), await transport.list_shards("s")):
            assert isinstance(answer, RequestFailure)
            assert answer.code == "Internal"


@pytest.mark.anyio
async def test_missing_credentials_return_a_failure_that_names_them(monkeypatch):
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    async with LocalKinesis({"s": 1}) as kinesis, opened(kinesis) as transport:
        answer = await transport.put_records(request_of(*THREE))
    assert isinstance(answer, RequestFailure)
    assert answer.code == "NoCredentials"
    assert "configure credentials" in answer.message
    assert not Config().is_retryable(answer.code)


class _Vault:
    """A credential provider that fails the first time."""

    def __init__(self, error: type[Exception]) -> None:
        self.asked = 0
        self._error = error

    async def fetch(self) -> dict[str, str]:
        self.asked += 1
        if self.asked <= 4:
            message = "the vault is sealed"
            raise self._error(message)
        return {"access_key": "a", "secret_key": "s", "token": "t", "expiry_time": "2999-01-01T00:00:00Z"}


@pytest.mark.anyio
@pytest.mark.parametrize("error", [RuntimeError, OSError, EOFError, LookupError, AssertionError])
async def test_a_credential_provider_that_raises_is_called_again_for_the_next_request(error, monkeypatch):
    session, vault = AioSession(), _Vault(error)
    monkeypatch.setattr(session, "_credentials", AioDeferredRefreshableCredentials(vault.fetch, "vault"))
    async with LocalKinesis({"s": 1}) as kinesis:
        transport = AiobotocoreTransport(config(kinesis.endpoint_url), session=session)
        async with transport.open():
            failure = await transport.put_records(request_of(*THREE))
            assert isinstance(failure, RequestFailure)
            assert (failure.code, "the vault is sealed" in failure.message) == ("Internal", True)
        async with Producer(config(kinesis.endpoint_url, retry_backoff_base_ms=5), session=session) as producer:
            delivery = producer.put_nowait("s", partition_key="k", data=b"x")
            assert (await delivery).successful
    assert vault.asked > 4


@pytest.mark.anyio
async def test_no_region_is_a_config_error(monkeypatch):
    monkeypatch.delenv("AWS_DEFAULT_REGION")
    producer = Producer(Config())
    with pytest.raises(ConfigError, match=r"no region is configured; set .* AWS_DEFAULT_REGION"):
        await producer.__aenter__()


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("absent", r"profile \(absent\) could not be found; correct AWS_PROFILE"),
        ("helper", r"'/nowhere/helper'; check region, endpoint_url, credentials"),
    ],
)
async def test_a_profile_that_cannot_be_used_is_a_config_error(name, words, monkeypatch, tmp_path):
    for variable in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(variable, raising=False)
    file = tmp_path / "config"
    file.write_text("[profile helper]\ncredential_process = /nowhere/helper\n")
    monkeypatch.setenv("AWS_CONFIG_FILE", str(file))
    monkeypatch.setenv("AWS_PROFILE", name)
    producer = Producer(Config(region="us-east-1"))
    with pytest.raises(ConfigError, match=words):
        await producer.__aenter__()


@pytest.mark.anyio
async def test_a_client_that_cannot_be_created_is_a_config_error():
    producer = Producer(Config(region="us-east-1", botocore={"no_such_option": 1}))
    with pytest.raises(ConfigError, match=r"check region, endpoint_url, credentials and Config\.botocore"):
        await producer.__aenter__()


@pytest.mark.anyio
@pytest.mark.parametrize("named_by", ["option", "environment"])
@pytest.mark.parametrize("content", [None, "no certificate"])
async def test_a_missing_ca_bundle_is_a_config_error_and_not_a_failed_connection(
    monkeypatch, tmp_path, named_by, content
):
    bundle = tmp_path / "bundle.pem"
    if content is not None:
        bundle.write_text(content)
    if named_by == "environment":
        monkeypatch.setenv("AWS_CA_BUNDLE", str(bundle))
    producer = Producer(config("https://127.0.0.1:1", verify_ssl=True if named_by == "environment" else str(bundle)))
    with pytest.raises(ConfigError, match=r"the CA bundle '.*bundle\.pem' cannot be used .*name a PEM file"):
        await producer.__aenter__()


@pytest.mark.anyio
async def test_the_ca_bundle_of_the_environment_is_used(monkeypatch, tmp_path):
    bundle = tmp_path / "bundle.pem"
    bundle.write_bytes((Path(botocore.__file__).parent / "cacert.pem").read_bytes())
    monkeypatch.setenv("AWS_CA_BUNDLE", str(bundle))
    seen: list[object] = []

    class Session(AioSession):  # type: ignore[misc] # botocore has no types
        def create_client(self, *arguments, **options):
            seen.append(options["verify"])
            return super().create_client(*arguments, **options)

    for verify in (True, False, str(bundle)):
        async with AiobotocoreTransport(config("https://127.0.0.1:1", verify_ssl=verify), session=Session()).open():
            pass
    # With None botocore looks for a CA bundle itself, and verifies.
    assert seen == [None, False, str(bundle)]


@pytest.mark.anyio
async def test_the_password_of_a_proxy_url_is_in_no_result(unused_port):
    proxy = f"http://someone:hunter2@127.0.0.1:{unused_port}"
    transport = AiobotocoreTransport(config("http://kinesis.invalid", botocore={"proxies": {"http": proxy}}))
    async with transport.open():
        answer = await transport.put_records(request_of(*THREE))
    assert isinstance(answer, RequestFailure)
    assert "127.0.0.1" in answer.message
    assert "hunter2" not in answer.message


@pytest.mark.parametrize("make", [Producer, AiobotocoreTransport])
def test_a_missing_package_is_an_error_at_once_that_names_what_to_install(make, monkeypatch):
    monkeypatch.setitem(sys.modules, "cbor2", None)
    with pytest.raises(ConfigError, match=r"pip install 'kpl-integrations\[cbor\]'"):
        make(Config(wire_path="cbor"))
    monkeypatch.setitem(sys.modules, "aiobotocore", None)
    with pytest.raises(ConfigError, match=r"which needs aiobotocore; pip install 'kpl-integrations'"):
        make(Config())


# From producer to stream


@pytest.mark.anyio
@pytest.mark.parametrize("wire", WIRES)
async def test_a_producer_reaches_a_kinesis_over_http(wire):
    async with LocalKinesis({"s": 2}) as kinesis:
        settings = config(kinesis.endpoint_url, wire_path=wire.removeprefix("direct "), record_max_buffered_time_ms=5)
        async with Producer(settings, transport=transport_of(wire, settings)) as producer:
            await producer.put_many("s", [("first", b"")])
            await producer.flush(timeout=20.0)
            deliveries = await producer.put_many("s", [(str(number), bytes(number)) for number in range(300)])
            report = await producer.flush(timeout=20.0)
        assert report.delivered == 301
        assert [(await delivery).successful for delivery in deliveries] == [True] * 300
        assert len(kinesis.fake.records("s")) < 300


@pytest.mark.anyio
async def test_a_request_of_several_mebibytes_is_delivered():
    async with LocalKinesis({"s": 8}, enforce_limits=False) as kinesis:
        settings = config(
            kinesis.endpoint_url, collection_max_size=8 * 1024 * 1024, rate_limit_bytes_per_sec_per_shard=1e9
        )
        async with Producer(settings) as producer:
            await producer.put_many("s", [(str(number), bytes(500_000)) for number in range(20)])
            report = await producer.flush(timeout=20.0)
        assert report.delivered == 20


@pytest.mark.anyio
async def test_opening_searches_no_folders_of_other_services_for_the_model(monkeypatch, tmp_path):
    """That took 7,000 system calls: in a thread beside one that computed, 4 seconds."""
    listed: list[object] = []
    listdir = os.listdir

    def noting(path: str) -> list[str]:
        listed.append(path)
        return listdir(path)

    monkeypatch.setattr("os.listdir", noting)
    monkeypatch.setenv("AWS_DATA_PATH", str(tmp_path))
    async with AiobotocoreTransport(config("http://127.0.0.1:1")).open():
        assert len(listed) <= 3
