"""The settings come from arguments, the environment or a file. They are checked, and errors repeat no secret."""

import math
import re
from pathlib import Path

import pytest

from docs import generated
from kpl_core import Config, ConfigError
from kpl_core.options.flat_options import flat_options
from kpl_core.options.kinesis_limits import MIB
from kpl_core.options.option import described
from kpl_integrations.ingest import IngestSettings, load_settings
from kpl_integrations.ingest.settings_sources import (
    NOT_IN_GATEWAY,
    find_settings,
    gateway_options,
    producer_name,
)
from kpl_integrations.ingest.workers.link import WorkerIdentity
from kpl_integrations.ingest.workers.shared_quotas import sharing_of


def test_arguments_have_precedence_over_the_environment(monkeypatch):
    monkeypatch.setenv("KPL_INGEST_PORT", "9000")
    monkeypatch.setenv("KPL_INGEST_MAX_BODY_BYTES", "2048")
    assert (load_settings().port, load_settings().max_body_bytes) == (9000, 2048)
    assert load_settings(port=1234).port == 1234
    assert load_settings(port=None).port == 9000


def test_a_flag_precedes_the_environment_which_precedes_the_file(tmp_path):
    file = tmp_path / "gateway.toml"
    file.write_text("port = 1\nworkers = 1\nmax_depth = 1\n")
    environment = {"KPL_INGEST_PORT": "2", "KPL_INGEST_WORKERS": "2"}
    settings, made = find_settings({"port": 3}, file=file, environment=environment, assigned={"max_records": "4"})
    assert (settings.port, settings.workers, settings.max_depth, settings.max_records) == (3, 2, 1, 4)
    assert {name: setting.origin for name, setting in made.items()} == {
        "port": "--port",
        "workers": "KPL_INGEST_WORKERS",
        "max_depth": f"{file}:3",
        "max_records": "--set max_records",
    }


def test_every_option_of_the_producer_can_be_set_or_has_a_reason():
    options, own = gateway_options(), described(IngestSettings)
    settable = {producer_name(name) for name in options if name not in own}
    for name in flat_options(Config):
        assert (name in settable) is not (name in NOT_IN_GATEWAY), name


def test_the_page_of_the_settings_offers_what_a_gateway_may_do_while_its_spool_cannot_store():
    rows = {line.split(" ")[1]: line for line in generated.settings().splitlines()}
    assert '`"bypass" or "refuse"` | `\'bypass\'`' in rows["`spool_failure`"]


def test_the_options_of_a_group_reach_the_producer():
    environment = {
        "KPL_INGEST_SPOOL": "/var/spool.db",
        "KPL_INGEST_SPOOL_MAX_BYTES": "50000000000",
        "KPL_INGEST_SPOOL_REPLAY_RECORDS_PER_SECOND": "20000",
        "KPL_INGEST_DEAD_LETTERS_ALARM_DEPTH": "7",
        "KPL_INGEST_BREAKER_OPEN_SECONDS": "2",
        "KPL_INGEST_TIERS": "false",
        "KPL_INGEST_RATE_LIMIT_RECORDS_PER_SEC_PER_SHARD": "500",
        "KPL_INGEST_KINESIS_MAX_CONNECTIONS": "50",
        "KPL_INGEST_MAX_CONNECTIONS": "60",
    }
    settings = find_settings({}, environment=environment).settings
    producer = settings.producer
    assert producer.spool is not None
    assert (producer.spool.max_bytes, producer.spool.replay_records_per_second) == (50_000_000_000, 20_000)
    assert (producer.spool.mode, producer.spool.failure) == ("write_ahead", "bypass")
    assert producer.dead_letters is not None
    assert producer.dead_letters.alarm_depth == 7
    assert producer.breaker is not None
    assert producer.breaker.open_seconds == 2
    assert producer.tiers is None
    assert producer.rate_limit_records_per_sec_per_shard == 500
    assert (producer.max_connections, settings.max_connections) == (50, 60)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"port": 70_000}, "port is 70000; it must be between 0 and 65,535"),
        ({"tls_key": Path("key.pem")}, "belong together"),
        ({"default_ack": "spooled"}, "there is no spool"),
        ({"spol": 1}, "spol is not a setting of the gateway; did you mean spool?"),
        ({"coordination": "redis://:secret-thing@h", "coordination_file": "url"}, "both set; give one of them"),
        ({"coordination": "http://:secret-thing@h"}, "coordination is not a URL of a known kind"),
        ({"admin_key": "secret-thing"}, "admin_key has 12 characters"),
        ({"max_depth": "deep"}, "max_depth is 'deep'; it must be a whole number"),
        ({"spool": Path("/")}, "spool is '/', a folder; name a file in it, such as '/spool.db'"),
        ({"dead_letters": Path("/")}, "dead_letters is '/', a folder"),
        ({"spool": "s.db", "dead_letters": "d.db"}, "dead_letters is 'd.db', and spool is set; remove dead"),
        ({"dead_letters": "d.db", "dead_letters_s3": "bucket"}, "dead_letters and dead_letters_s3 are set"),
        (
            {"dead_letters_sqs": "https://q", "dead_letters_s3": "bucket"},
            "dead_letters_sqs and dead_letters_s3 are set",
        ),
        (
            {"dead_letters": False, "dead_letters_sqs": "https://q"},
            "dead_letters is false, and dead_letters_sqs is set; remove one of them",
        ),
        (
            {"dead_letters": True},
            "dead_letters is true, and there is no place; give a path, spool, dead_letters_sqs or dead_letters_s3",
        ),
        ({"dead_letters_alarm_depth": 7}, "dead_letters_alarm_depth is set, and there is no place; give a path, spool"),
        ({"dead_letters_sqs": "letters"}, "dead_letters_sqs is 'letters'; it must be the URL of an SQS queue"),
        # `queued` would get 202 for records that then fail.
        ({"spool": "s.db", "spool_failure": "fail"}, "spool_failure is 'fail'; it must be one of 'bypass', 'refuse'"),
        ({"spool_max_bytes": 1 << 30}, "spool_max_bytes is set, and spool is not"),
        ({"breaker": False, "breaker_open_seconds": 1}, "breaker is false, and breaker_open_seconds is set"),
        ({"cors_origins": "shop.example"}, "cors_origins has 'shop.example', which is not an origin"),
        ({"admin_key_env": "NOWHERE"}, "admin_key is empty: environment variable NOWHERE has no value"),
    ],
)
def test_an_invalid_setting_is_named_without_a_value_that_may_be_secret(given, words):
    with pytest.raises(ConfigError) as error:
        load_settings(**given)
    assert words in str(error.value)
    assert "secret-thing" not in str(error.value)


# A file, the line of its error, and the error.
FILES = [
    ("port = 1\nprot = 2", 2, "prot is not a setting of the gateway; did you mean port?"),
    ("\nport = '80'", 2, "port is '80'; it must be a whole number"),
    ("[spool]\npath = 'x'", 1, "spool is {'path': 'x'}; it must be a path"),
    ("admin_key = 'secret-thing-secret-thing'", 1, "admin_key is a secret, which a configuration file must not hold"),
    ("coordination = 'redis://:secret-thing@h'", 1, "coordination is a secret"),
    ("breaker = 1", 1, "breaker is 1; it must be True or False"),
    ("[streams.a]\nrecord_ttl_ms = 5\n", 2, "streams['a']: record_ttl_ms is 5; it must be between 100"),
    (
        "port = 1\n[streams.'a.b']\n\nrecord_ttl = 5\n",
        4,
        "streams['a.b']: StreamConfig has no option 'record_ttl'; did",
    ),
    ("streams = 5", 1, "[streams.] is not a table of options; write [streams.NAME] before the options"),
]


@pytest.mark.parametrize(("text", "line", "words"), FILES)
def test_an_error_of_a_file_names_the_line_and_the_nearest_name(tmp_path, text, line, words):
    file = tmp_path / "gateway.toml"
    file.write_text(text)
    with pytest.raises(ConfigError) as error:
        find_settings({}, file=file, environment={})
    assert str(error.value).startswith(f"{file}:{line}: {words}")
    assert "secret-thing" not in str(error.value)


@pytest.mark.parametrize(
    ("text", "words"),
    [("port = ", "is not TOML: "), (None, "cannot be read from"), ("x = " + "[" * 100_000, "it is nested too deep")],
)
def test_a_file_that_cannot_be_read_is_an_error(tmp_path, text, words):
    file = tmp_path / "gateway.toml"
    if text is not None:
        file.write_text(text)
    with pytest.raises(ConfigError, match=words):
        find_settings({}, file=file, environment={})


def test_a_file_that_others_may_change_is_refused(tmp_path):
    file = tmp_path / "gateway.toml"
    file.write_text("port = 1")
    file.chmod(0o666)
    with pytest.raises(ConfigError, match="lets other users change it"):
        find_settings({}, file=file, environment={})


def test_a_secret_is_named_by_a_variable_or_a_private_file(tmp_path):
    secret = tmp_path / "key"
    secret.write_text("open sesame, please\n")
    secret.chmod(0o600)
    file = tmp_path / "gateway.toml"
    file.write_text(f'admin_key_file = "{secret}"\ncoordination_env = "STORE"\n')
    environment = {"STORE": "redis://:hunter2@h/0"}
    settings, made = find_settings({}, file=file, environment=environment)
    assert settings.admin_key is not None
    assert settings.admin_key.reveal() == "open sesame, please"
    assert settings.producer.coordination is not None
    assert settings.producer.coordination.store == "redis://:hunter2@h/0"
    assert (made["admin_key"].origin, made["coordination"].origin) == (f"{file}:1 ({secret})", f"{file}:2 (STORE)")
    assert "sesame" not in repr(settings)
    assert "hunter2" not in repr(settings)
    # A variable precedes what the file refers to.
    settings, _ = find_settings({}, file=file, environment={**environment, "KPL_INGEST_COORDINATION": "memory://x"})
    assert settings.producer.coordination is not None
    assert settings.producer.coordination.store == "memory://x"


@pytest.mark.parametrize(
    ("given", "is_on"),
    [
        ({"dead_letters": False, "spool": "s.db"}, False),
        ({"dead_letters": False}, False),
        ({"dead_letters": True, "spool": "s.db"}, True),
        ({"dead_letters": True, "dead_letters_s3": "bucket"}, True),
        ({"dead_letters": "d.db"}, True),
        ({"dead_letters_alarm_depth": 7, "dead_letters": "d.db"}, True),
        ({"dead_letters_alarm_depth": 7, "dead_letters_sqs": "https://q"}, True),
    ],
)
def test_dead_letters_are_on_where_they_have_a_place(given, is_on):
    assert (load_settings(**given).producer.dead_letters is not None) is is_on


def test_an_empty_variable_counts_as_not_set_and_space_around_a_value_is_ignored(tmp_path):
    file = tmp_path / "gateway.toml"
    file.write_text("port = 5\ncoordination = 'memory://file'\n")
    empty = {f"KPL_INGEST_{name.upper()}": " \n" for name in gateway_options() if name != "admin_key"}
    assert find_settings({}, environment=empty).settings == IngestSettings()
    settings = find_settings({}, file=file, environment=empty).settings
    assert settings == find_settings({}, file=file, environment={}).settings
    spaced = {"KPL_INGEST_COORDINATION": " memory://x\n", "KPL_INGEST_ADMIN_KEY": "open sesame, please\n"}
    settings = find_settings({}, environment=spaced).settings
    assert settings.producer.coordination is not None
    assert settings.producer.coordination.store == "memory://x"
    assert settings.admin_key is not None
    assert settings.admin_key.reveal() == "open sesame, please"


def test_a_table_in_the_environment_is_an_error_that_names_the_file():
    with pytest.raises(ConfigError, match="KPL_INGEST_STREAMS is set, and streams is a table; write it into a file"):
        find_settings({}, environment={"KPL_INGEST_STREAMS": "x"})


BOUNDS = {name: option.bound for name, option in described(IngestSettings).items() if option.bound is not None}


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


def test_an_out_of_bounds_variable_is_named_by_its_variable(monkeypatch):
    monkeypatch.setenv("KPL_INGEST_WORKERS", "65")
    with pytest.raises(ConfigError, match=r"KPL_INGEST_WORKERS is 65; it must be between 1 and 64 \(processes\)"):
        load_settings()


@pytest.mark.parametrize(
    ("environment", "words"),
    [
        (
            {"KPL_INGEST_SPOOOL": "a"},
            "KPL_INGEST_SPOOOL is not a setting of the gateway; did you mean KPL_INGEST_SPOOL?",
        ),
        ({"kpl_ingest_zzz": "1", "KPL_INGEST_YYY": "2"}, "KPL_INGEST_YYY is not a setting of the gateway (nor is kpl_"),
        ({"KPL_INGEST_SPOOOL": ""}, "did you mean KPL_INGEST_SPOOL?"),
    ],
)
def test_a_variable_that_is_no_setting_is_an_error_that_names_the_nearest(environment, words):
    with pytest.raises(ConfigError, match=re.escape(words)):
        find_settings({}, environment={"KPL_GATEWAY_KEY": "k", "PATH": "p", **environment})


def test_what_kubernetes_sets_for_a_service_of_our_name_is_ignored():
    links = {
        "KPL_INGEST_SERVICE_HOST": "10.0.0.1",
        "KPL_INGEST_SERVICE_PORT": "8080",
        "KPL_INGEST_SERVICE_PORT_HTTP": "8080",
        "KPL_INGEST_PORT": "tcp://10.0.0.1:8080",
        "KPL_INGEST_PORT_8080_TCP": "tcp://10.0.0.1:8080",
        "KPL_INGEST_PORT_8080_TCP_PROTO": "tcp",
        "KPL_INGEST_PORT_8080_TCP_PORT": "8080",
        "KPL_INGEST_PORT_8080_TCP_ADDR": "10.0.0.1",
        "KPL_INGEST_EU_SERVICE_HOST": "10.0.0.2",
        "KPL_INGEST_EU_PORT": "tcp://10.0.0.2:80",
    }
    found = find_settings({}, environment={**links, "KPL_INGEST_WORKERS": "2"})
    assert (found.settings.port, found.settings.workers, list(found.made)) == (8080, 2, ["workers"])


def test_the_producer_of_a_gateway_has_its_own_defaults():
    producer = load_settings().producer_config()
    assert (producer.max_outstanding_bytes, producer.spool, producer.dead_letters) == (128 * MIB, None, None)
    assert None not in {producer.breaker, producer.tiers, producer.fairness}
    assert IngestSettings() == load_settings()


def test_no_repr_contains_the_admin_key(monkeypatch):
    monkeypatch.setenv("KPL_INGEST_ADMIN_KEY", "open sesame, please")
    assert "sesame" not in repr(load_settings())


@pytest.mark.parametrize("key", ["", " ", "sesame"])
def test_an_empty_or_short_admin_key_is_rejected(monkeypatch, key):
    monkeypatch.setenv("KPL_INGEST_ADMIN_KEY", key)
    with pytest.raises(
        ConfigError, match=f"KPL_INGEST_ADMIN_KEY has {len(key.strip())} characters; give at least 16"
    ) as error:
        load_settings()
    assert "sesame" not in str(error.value)


def test_a_spool_stores_dead_letters_too_and_writes_ahead(tmp_path: Path):
    config = load_settings(spool=tmp_path / "s.db").producer_config()
    assert config.spool is not None
    assert config.spool.mode == "write_ahead"
    assert config.dead_letters is not None
    assert config.dead_letters.path is None
    assert load_settings().producer_config().dead_letters is None


def test_the_url_of_the_coordination_store_comes_from_a_private_file_and_is_never_shown(tmp_path):
    file = tmp_path / "url"
    file.write_text("redis://:secret-thing@host/0?group=a\n")
    file.chmod(0o600)
    settings = load_settings(coordination_file=file, coordination_max_workers=6)
    sharing = sharing_of(settings, None)
    assert sharing is not None
    assert sharing.quotas.store == "redis://:secret-thing@host/0?group=a-quotas"
    assert (sharing.shards.max_workers, sharing.shards.interval_seconds) == (6, 1.0)
    direct = load_settings(coordination="redis://:secret-thing@host/0?group=a")
    assert sharing_of(direct, None) == sharing_of(load_settings(coordination_file=file), None)
    slow = sharing_of(load_settings(coordination="memory://x", coordination_interval_seconds=4), None)
    assert slow is not None
    assert (slow.shards.interval_seconds, slow.quotas.interval_seconds) == (4.0, 2.0)
    assert "secret-thing" not in f"{settings!r}{direct!r}{sharing!r}"
    file.chmod(0o644)
    with pytest.raises(ConfigError, match="lets other users read it"):
        load_settings(coordination_file=file)


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
