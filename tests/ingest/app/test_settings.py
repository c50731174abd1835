"""The gateway's settings come from arguments, else the environment. They are checked, and errors repeat no secret."""

import math
from pathlib import Path

import pytest

from kpl_core import ConfigError
from kpl_core.options.validation import Bound
from kpl_integrations.ingest import load_settings
from kpl_integrations.ingest.settings import IngestSettings, unknown_variables
from kpl_integrations.ingest.workers.link import WorkerIdentity
from kpl_integrations.ingest.workers.shared_quotas import sharing_of


def test_arguments_have_precedence_over_the_environment(monkeypatch):
    monkeypatch.setenv("KPL_INGEST_PORT", "9000")
    monkeypatch.setenv("KPL_INGEST_MAX_BODY_BYTES", "2048")
    assert (load_settings().port, load_settings().max_body_bytes) == (9000, 2048)
    assert load_settings(port=1234).port == 1234
    assert load_settings(port=None).port == 9000


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"port": 70_000}, "port"),
        ({"tls_key": Path("key.pem")}, "belong together"),
        ({"default_ack": "spooled"}, "there is no spool"),
        ({"unknown": 1}, "unknown"),
        ({"coordination": "redis://:secret-thing@h", "coordination_file": "url"}, "both set; give one of them"),
        ({"max_depth": "secret-thing"}, "max_depth"),
        ({"endpoint_url": "http://h/?token=secret-thing"}, "endpoint_url is 'http://h/.*'; it must not have a query"),
        ({"endpoint_url": "http://me:secret-thing@h/"}, "endpoint_url is .*; it must not have a user or a password"),
        ({"region": "eu\r\nx: y"}, "region is 'eu.*'; it must be letters, digits and hyphens"),
        ({"spool": Path("/")}, "spool: '/' is a folder; name a file in it, such as '/spool.db'"),
        ({"dead_letters": Path("/")}, "dead_letters: '/' is a folder"),
    ],
)
def test_an_invalid_setting_is_named_without_a_value_that_may_be_secret(given, words):
    with pytest.raises(ConfigError, match=words) as error:
        load_settings(**given)
    assert "secret-thing" not in str(error.value)


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({"port": 70_000}, "port is 70000; it must be between 0 and 65,535"),
        ({}, "KPL_INGEST_MAX_DEPTH: Input should be a valid integer, unable to parse string as an integer"),
        ({"max_depth": 5, "tls_key": "k"}, "tls_certificate and tls_key belong together; give both or none"),
    ],
)
def test_a_setting_is_named_as_the_caller_gave_it(monkeypatch, given, reason):
    monkeypatch.setenv("KPL_INGEST_MAX_DEPTH", "deep" if "max_depth" not in given and "port" not in given else "5")
    with pytest.raises(ConfigError) as error:
        load_settings(**given)
    assert str(error.value) == f"invalid settings of the gateway: {reason}"


BOUNDS = {
    name: bound
    for name, field in IngestSettings.model_fields.items()
    for bound in field.metadata
    if isinstance(bound, Bound)
}


@pytest.mark.parametrize(("name", "bound"), BOUNDS.items())
def test_each_bound_of_the_table_holds(name, bound):
    """The smallest and the largest allowed value pass, and the next one outside does not."""
    step = 1 if bound.whole else 1e-3
    outside = [bound.smallest if bound.above else bound.smallest - step, math.nan]
    inside = [bound.smallest + step if bound.above else bound.smallest]
    if bound.largest < math.inf:
        inside.append(bound.largest)
        outside.append(bound.largest * 2)
    for value in inside:
        given = {"max_body_bytes": min(value, 1_024), name: value} if name == "max_reading_bytes" else {name: value}
        given = {"max_reading_bytes": 1 << 40, **given} if name == "max_body_bytes" else given
        assert getattr(load_settings(**given), name) == value
    for value in outside:
        with pytest.raises(ConfigError, match=name):
            load_settings(**{name: value})


def test_each_number_has_a_bound():
    defaults = {name: field.default for name, field in IngestSettings.model_fields.items()}
    numbers = {
        name for name, value in defaults.items() if isinstance(value, int | float) and not isinstance(value, bool)
    }
    assert numbers == set(BOUNDS)


def test_an_out_of_bounds_variable_is_named_by_its_variable(monkeypatch):
    monkeypatch.setenv("KPL_INGEST_WORKERS", "65")
    with pytest.raises(ConfigError, match=r"KPL_INGEST_WORKERS is 65; it must be between 1 and 64 \(processes\)"):
        load_settings()


def test_variables_that_are_not_settings_are_found():
    environment = ["KPL_INGEST_SPOOOL", "KPL_INGEST_SPOOL", "kpl_ingest_port", "KPL_GATEWAY_KEY", "PATH"]
    assert unknown_variables(environment) == ["KPL_INGEST_SPOOOL"]


def test_no_repr_contains_the_admin_key(monkeypatch):
    monkeypatch.setenv("KPL_INGEST_ADMIN_KEY", "open sesame, please")
    assert "sesame" not in repr(load_settings())


@pytest.mark.parametrize("key", ["", "sesame"])
def test_an_empty_or_short_admin_key_is_rejected(monkeypatch, key):
    monkeypatch.setenv("KPL_INGEST_ADMIN_KEY", key)
    with pytest.raises(ConfigError, match=f"admin_key has {len(key)} characters; give at least 16") as error:
        load_settings()
    assert "sesame" not in str(error.value)


def test_a_spool_stores_dead_letters_too_and_writes_ahead(tmp_path: Path):
    config = load_settings(spool=tmp_path / "s.db", dead_letters=tmp_path / "d.db").producer_config()
    assert config.spool is not None
    assert config.spool.mode == "write_ahead"
    assert config.dead_letters is not None
    assert config.dead_letters.path is None
    assert load_settings().producer_config().dead_letters is None


def test_the_url_of_the_coordination_store_comes_from_a_private_file_and_is_never_shown(tmp_path):
    file = tmp_path / "url"
    file.write_text("redis://:secret-thing@host/0?group=a\n")
    file.chmod(0o600)
    settings = load_settings(coordination_file=file, coordination_workers=6)
    sharing = sharing_of(settings, None)
    assert sharing is not None
    assert sharing.quotas.store == "redis://:secret-thing@host/0?group=a-quotas"
    assert (sharing.shards.max_workers, sharing.shards.interval_seconds) == (6, 1.0)
    direct = load_settings(coordination="redis://:secret-thing@host/0?group=a")
    assert sharing_of(direct, None) == sharing_of(load_settings(coordination_file=file), None)
    assert "secret-thing" not in f"{settings!r}{direct!r}{sharing!r}"
    file.chmod(0o644)
    with pytest.raises(ConfigError, match="lets other users read it"):
        sharing_of(settings, None)
    with pytest.raises(ConfigError, match="not a URL of a known kind") as refused:
        sharing_of(load_settings(coordination="http://secret-thing"), None)
    assert "secret-thing" not in str(refused.value)


def test_workers_share_the_store_of_their_gateways_and_have_names_that_no_other_run_uses():
    identities = [WorkerIdentity(worker=1, count=2, folder=f"/run/kpl-serve-{run}") for run in ("a", "b")]
    alone = list(filter(None, [sharing_of(load_settings(), each) for each in identities]))
    s3 = load_settings(coordination="s3://bucket/kpl/")
    together = list(filter(None, [sharing_of(s3, each) for each in identities]))
    assert [each.shards.store for each in alone] == [f"file:///run/kpl-serve-{run}/shards" for run in ("a", "b")]
    assert [each.quotas.max_workers for each in alone] == [2, 2]
    assert {each.quotas.store for each in together} == {"s3://bucket/kpl/quotas"}
    assert [each.quotas.worker_id for each in together] == ["kpl-serve-a-1", "kpl-serve-b-1"]
    # Each call to S3 costs money.
    assert {(each.quotas.max_workers, each.quotas.interval_seconds) for each in together} == {(64, 5.0)}
    assert sharing_of(load_settings(), None) is None
