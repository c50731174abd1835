"""`kpl doctor` reads the configuration of a gateway or a producer and checks each of its parts."""

import json
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from botocore.exceptions import ClientError, EndpointConnectionError

from kpl_core import Config, CoordinationOptions
from kpl_core.coordination import MemoryStore
from kpl_core.coordination.lease_sync import SUMMARY_NAME
from kpl_core.coordination.store_objects import ResourcePlan, Summary, encode
from kpl_core.options.reliability import DeadLetterOptions, SpoolOptions
from kpl_core.testing import ErrorAnswer, When
from kpl_integrations.cli.doctor_parts import (
    Check,
    check_certificate,
    check_coordination,
    check_files,
    check_settings,
    check_sink,
    check_tenants,
    check_transport,
    find_configuration,
)
from kpl_integrations.cli.exit_code import CommandFailure
from kpl_integrations.ingest import load_settings
from tests.support.certificates import certificate_pair, days_from_now, needs_openssl

MIB = 1024 * 1024


def of_files(config: Config) -> dict[str, Check]:
    return {check.name: check for check in check_files(config)}


def test_the_disk_of_a_spool_is_checked(tmp_path: Path) -> None:
    path = tmp_path / "spool.db"
    small = SpoolOptions(path=path, max_bytes=MIB, max_dead_letter_bytes=MIB)
    found = of_files(Config(spool=small, dead_letters=DeadLetterOptions()))
    assert (found["spool"].status, found["dead letters"].found) == ("ok", "in the spool's file")
    assert not path.exists()
    large = of_files(Config(spool=SpoolOptions(path=path, max_bytes=1 << 44)))["spool"]
    assert (large.status, large.fix) == ("warning", "give it a larger disk, or lower its max_bytes")
    missing = of_files(Config(dead_letters=DeadLetterOptions(path=tmp_path / "none" / "letters.db")))
    assert (missing["spool"].found, missing["dead letters"].status) == ("none is configured", "failed")
    assert "is not a folder" in missing["dead letters"].found


def test_the_files_of_all_workers_are_added_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=2_000_000_000))
    sizes = {"spool_max_bytes": 100_000_000, "spool_max_dead_letter_bytes": 100_000_000}
    one = load_settings(spool=tmp_path / "s.db", **sizes)
    [spool, _] = check_files(one.producer, one)
    assert (spool.status, spool.found) == ("ok", f"{tmp_path}/s.db may grow by 0.3 GB, and 2.0 GB are free")
    eight = load_settings(spool=tmp_path / "s.db", workers=8, **sizes)
    [spool, _] = check_files(eight.producer, eight)
    grows = "may grow by 2.6 GB, and 2.0 GB are free"
    assert (spool.status, spool.found) == ("warning", f"8 files, {tmp_path}/s-0.db to s-7.db, {grows}")
    with (tmp_path / "s-3.db").open("wb") as file:
        file.truncate(1_000_000_000)
    [spool, _] = check_files(eight.producer, eight)
    # A file that is larger than it may be gives the others no room.
    assert "may grow by 2.3 GB" in spool.found


class AwsSession:
    """A session whose clients answer with this error, None: as if all were well."""

    def __init__(self, code: str | None) -> None:
        self._code = code
        self.sent: list[Any] = []

    @asynccontextmanager
    async def create_client(self, *_: object, **__: object) -> AsyncIterator["AwsSession"]:
        yield self

    async def _answer(self, **parameters: Any) -> dict[str, Any]:
        if self._code == "no network":
            raise EndpointConnectionError(endpoint_url="https://sqs")
        if self._code is not None:
            raise ClientError({"Error": {"Code": self._code, "Message": "no"}}, "Call")
        self.sent.append(parameters.get("Entries") or parameters.get("Body"))
        return {"Successful": [{"Id": "0"}]}

    get_queue_attributes = head_bucket = send_message_batch = put_object = _answer


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("setting", "code", "puts", "status", "words"),
    [
        ("sqs", None, False, "ok", "exists"),
        ("s3", None, False, "ok", "exists"),
        ("sqs", "AWS.SimpleQueueService.NonExistentQueue", False, "failed", "NonExistentQueue"),
        ("s3", "404", False, "failed", "404"),
        ("sqs", "AccessDenied", False, "warning", "may not be asked"),
        ("s3", "403", False, "warning", "may not be asked"),
        ("sqs", "no network", False, "failed", "https://sqs"),
        ("sqs", None, True, "ok", "took one dead letter"),
        ("s3", None, True, "ok", "took one dead letter"),
        ("sqs", "AccessDenied", True, "failed", "AccessDenied"),
        ("s3", "AccessDenied", True, "failed", "AccessDenied"),
    ],
)
@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_the_queue_or_the_bucket_of_dead_letters_is_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, setting: str, code: str | None, puts: bool, status: str, words: str
) -> None:
    place = "https://sqs.eu-west-1.amazonaws.com/1/lost" if setting == "sqs" else "bucket/lost/"
    session = AwsSession(code)
    monkeypatch.setattr("aiobotocore.session.AioSession", lambda: session)
    settings = load_settings(spool=tmp_path / "s.db", **{f"dead_letters_{setting}": place})
    assert [each.name for each in check_files(settings.producer, settings)] == ["spool"]
    check = await check_sink(settings, puts=puts)
    assert (check.name, check.status, bool(check.fix)) == ("dead letters", status, status != "ok")
    assert place in check.found
    assert words in check.found
    assert ("kpl-doctor" in str(session.sent)) == (puts and code is None)


def test_the_sink_of_an_application_is_not_checked() -> None:
    found = of_files(Config(dead_letters=DeadLetterOptions()))["dead letters"]
    assert (found.status, found.found) == ("skipped", "sent to the producer's dead_letter_sink; not checked")


def test_a_spool_that_this_user_may_not_write_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Root may write everything.
    monkeypatch.setattr("os.access", lambda *_: False)
    found = of_files(Config(spool=SpoolOptions(path=tmp_path / "spool.db")))["spool"]
    assert (found.status, "may not write" in found.found) == ("failed", True)


@pytest.mark.anyio
@pytest.mark.parametrize("anyio_backend", ["asyncio"])
@pytest.mark.parametrize(
    ("store", "status", "words"),
    [
        ("memory://doctor", "ok", "memory://doctor answers; no plan yet"),
        ("redis://:hunter2@127.0.0.1:9/0", "failed", "redis://***@127.0.0.1:9/0"),
    ],
)
async def test_the_coordination_store_is_asked(store: str, status: str, words: str) -> None:
    pytest.importorskip("redis")
    found = await check_coordination(CoordinationOptions(store=store, max_workers=50))
    assert (found.status, words in found.found) == (status, True)
    assert "hunter2" not in f"{found}"
    assert ("one that starts uses 0.33% of each limit" in found.fix) is (status == "failed")


@pytest.mark.anyio
@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_a_store_url_that_cannot_be_opened_is_to_be_corrected() -> None:
    found = await check_coordination(CoordinationOptions(store="dynamodb://table/group?copies=many"))
    assert (found.status, "copies" in found.found) == ("failed", True)
    assert found.fix == "correct the URL, or install what it needs"


@pytest.mark.anyio
@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_the_plan_of_the_store_is_shown_or_said_to_be_another_programs() -> None:
    store = MemoryStore.named("doctor-plan")
    plans = {"orders/shard-0": ResourcePlan((1_000.0, 1e6), (0.0, 0.0), 1.0, {}, unassigned=(400.0, 2.5e5))}
    plan = Summary(generation=1, computed_at=time.time() - 7.0, began_at=0.0, member_count=1_200, resources=plans)
    options = CoordinationOptions(store="memory://doctor-plan")
    for body, status, words in (
        (encode(plan), "ok", "its plan is 7 s old; workers: 1,200; unassigned: at least 25% of each limit"),
        (b"<html>", "failed", "leases.json: it cannot be decoded"),
    ):
        _ = await store.write(SUMMARY_NAME, body)
        found = await check_coordination(options)
        assert (found.status, words in found.found) == (status, True), found


TRANSPORTS: list[tuple[dict[str, Any], str]] = [
    ({"wire_path": "cbor"}, "the producer's own connections, CBOR"),
    ({}, "the producer's own connections, JSON by the producer's encoder"),
    ({"wire_path": "stock"}, "botocore's client, because wire_path is 'stock'; JSON by botocore"),
    ({"botocore": {"user_agent_extra": "x"}}, "botocore's client, because botocore has options; JSON"),
    ({"region": "fips-us-east-1"}, "botocore's client, because fips-us-east-1 is a pseudo-region; JSON"),
]


@pytest.mark.parametrize(("options", "words"), TRANSPORTS)
def test_the_transport_is_named_with_the_reason(options: dict[str, Any], words: str) -> None:
    found = check_transport(
        Config(**{"region": "us-east-1", "endpoint_url": "http://127.0.0.1:1", **options}), has_cbor=True
    )
    assert (found.status, found.found.startswith(words)) == ("ok", True), found


def test_cbor_without_its_package_fails() -> None:
    found = check_transport(Config(wire_path="cbor"), has_cbor=False)
    assert (found.status, found.fix) == ("failed", "CBOR needs cbor2: pip install 'kpl-integrations[cbor]'")


def test_the_tenants_file_is_read(tmp_path: Path) -> None:
    file = tmp_path / "tenants.toml"
    file.write_text('[[tenant]]\nid = "a"\nwieght = 1')
    broken = check_tenants(file)
    assert (broken.status, broken.fix) == ("failed", "did you mean weight?")
    file.write_text("[unknown]\n")
    assert check_tenants(file).status == "ok"
    assert check_tenants(None).status == "warning"


@needs_openssl
@pytest.mark.parametrize(
    ("days", "status", "words"),
    [((-9, -1), "failed", "expired at"), ((-90, 1), "warning", "expires at"), ((-1, 90), "ok", "valid until")],
)
def test_a_certificate_that_has_expired_fails(tmp_path: Path, days: tuple[int, int], status: str, words: str) -> None:
    certificate, key = certificate_pair(tmp_path, "c", *map(days_from_now, days))
    found = check_certificate(certificate, key, time.time())
    assert (found.status, words in found.found) == (status, True)
    key.write_text("hello")
    assert check_certificate(certificate, key, time.time()).status == "failed"
    assert check_certificate(None, None, time.time()).status == "ok"


def test_the_configuration_is_a_gateways_if_something_of_one_is_set(tmp_path: Path) -> None:
    producer = find_configuration(None, {"KPL_RECORD_TTL_MS": "5000"})
    assert (producer.config.record_ttl_ms, producer.settings) == (5_000, None)
    gateway = find_configuration(None, {"KPL_INGEST_RECORD_TTL_MS": "6000", "KPL_RECORD_TTL_MS": "5000"})
    assert (gateway.config.record_ttl_ms, gateway.settings is not None) == (6_000, True)
    file = tmp_path / "gateway.toml"
    file.write_text("prot = 1\n")
    with pytest.raises(
        CommandFailure, match=r"gateway\.toml:1: prot is not a setting of the gateway; did you mean port"
    ):
        find_configuration(file, {})


# The environment, whether it is a gateway's, and what is said of variables that set nothing.
UNKNOWN: list[tuple[dict[str, str], bool, str]] = [
    ({"KPL_INGEST_SERVICE_HOST": "10.0.0.1", "KPL_INGEST_PORT": "tcp://10.0.0.1:80"}, False, ""),
    ({"KPL_INGEST_SERVICE_PORT_HTTP": "80", "KPL_INGEST_PORT_80_TCP_ADDR": "10.0.0.1"}, False, ""),
    ({"KPL_INGEST_SERVICE_HOST": "10.0.0.1", "KPL_INGEST_PORT": "8080"}, True, ""),
    ({"KPL_RECORD_TTL": "5"}, False, "are ignored: KPL_RECORD_TTL (did you mean KPL_RECORD_TTL_MS?)"),
]


@pytest.mark.parametrize(("environment", "is_gateway", "words"), UNKNOWN)
def test_variables_that_set_nothing_are_named_and_make_no_gateway(
    environment: dict[str, str],
    is_gateway: bool,
    words: str,
) -> None:
    found = find_configuration(None, environment)
    assert (found.settings is not None) is is_gateway
    check = check_settings(found)
    assert (check.status, words in check.found, bool(check.fix)) == ("warning" if words else "ok", True, bool(words))


def test_a_variable_that_is_no_setting_of_a_gateway_fails() -> None:
    with pytest.raises(CommandFailure, match=r"KPL_INGEST_HSOT is not a setting .*; did you mean KPL_INGEST_HOST\?"):
        find_configuration(None, {"KPL_INGEST_HSOT": "a"})


def test_the_command_checks_a_gateway_by_its_file(kpl, stream, tmp_path):
    file = tmp_path / "gateway.toml"
    file.write_text(
        f'spool = "{tmp_path}/spool.db"\nspool_max_bytes = 2_000_000\nspool_max_dead_letter_bytes = 2_000_000\n'
    )
    status, out, _ = kpl("doctor", *stream.address, "--config", str(file), "--json")
    found = {check["name"]: check for check in json.loads(out)["checks"]}
    assert (status, found["settings"]["found"]) == (0, f"a gateway's, from {file} and KPL_INGEST_ variables")
    assert [found[name]["status"] for name in ("spool", "certificate", "tenants file")] == ["ok", "ok", "warning"]
    file.write_text("prot = 1")
    status, out, _ = kpl("doctor", *stream.address, "--config", str(file), "--json")
    found = {check["name"]: check for check in json.loads(out)["checks"]}
    assert (status, found["settings"]["status"], found["stream"]["status"]) == (3, "failed", "ok")
    assert found["settings"]["fix"] == "did you mean port?"


def test_the_permission_to_put_is_checked_on_request(kpl, stream):
    status, out, _ = kpl("doctor", *stream.address, "--put", "--json")
    assert (status, "one record of 10 bytes written" in out) == (0, True)
    with stream.fault(ErrorAnswer("AccessDeniedException"), When(operation="PutRecord")):
        status, out, _ = kpl("doctor", *stream.address, "--put", "--json")
    found = {check["name"]: check for check in json.loads(out)["checks"]}
    assert (status, found["put"]["status"], found["list shards"]["status"]) == (3, "failed", "ok")
    assert found["put"]["fix"] == "allow it in the IAM policy of these credentials"
