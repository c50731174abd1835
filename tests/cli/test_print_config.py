"""`kpl serve --print-config` prints a file that means the same; errors of settings end with status 2."""

import tomllib
from pathlib import Path

import pytest

from kpl_integrations.cli.serve.print_config import printed_settings
from kpl_integrations.ingest.settings_sources import find_settings, gateway_options

FILE = """
port = 9000
spool = "/var/lib/kpl/spool.db"
spool_max_bytes = 50_000_000_000
non_retryable_error_codes = ["A*", "B"]
coordination = "redis://h:6379/0?group=a"
breaker = false
[streams."a.b"]
record_ttl_ms = 5_000
ordering = "none"
"""


def test_the_output_is_a_file_with_the_same_settings(tmp_path):
    file, printed = tmp_path / "gateway.toml", tmp_path / "printed.toml"
    file.write_text(FILE)
    loaded = find_settings(
        {"workers": 2},
        file=file,
        environment={"KPL_INGEST_TLS_KEY": "k", "KPL_INGEST_TLS_CERTIFICATE": "c"},
        assigned={},
    )
    printed.write_text(printed_settings(loaded))
    assert find_settings({}, file=printed, environment={}).settings == loaded.settings


def test_the_output_names_the_place_of_a_secret(tmp_path):
    key, file, printed = tmp_path / "key", tmp_path / "gate\nway.toml", tmp_path / "printed.toml"
    key.write_text("open sesame, please")
    key.chmod(0o600)
    file.write_text(f'admin_key_file = "{key}"\ncoordination_env = "STORE"\ncoordination_max_workers = 5')
    environment = {"STORE": "redis://:hunter2@h/0"}
    loaded = find_settings({}, file=file, environment=environment)
    printed.write_text(printed_settings(loaded))
    assert find_settings({}, file=printed, environment=environment).settings == loaded.settings
    assert f'admin_key_file = "{key}"  # ' in printed.read_text()
    assert 'coordination_env = "STORE"  # ' in printed.read_text()
    assert "sesame" not in printed.read_text()
    assert "hunter2" not in printed.read_text()


def test_without_its_masked_store_an_option_of_the_coordination_is_a_comment(tmp_path):
    printed = tmp_path / "printed.toml"
    environment = {
        "KPL_INGEST_COORDINATION": "redis://:hunter2@h/0",
        "KPL_INGEST_COORDINATION_MAX_WORKERS": "5",
        "KPL_INGEST_PORT": "7",
    }
    text = printed_settings(find_settings({}, environment=environment))
    assert "# coordination_max_workers = 5  # KPL_INGEST_COORDINATION_MAX_WORKERS, belongs to coordination" in text
    printed.write_text(text)
    settings = find_settings({}, file=printed, environment={}).settings
    assert (settings.port, settings.producer.coordination) == (7, None)


@pytest.mark.parametrize("name", ["\N{GRINNING FACE}é", 'a\x7f\t"\\', "line\nline"])
def test_every_character_of_a_text_is_in_the_output(tmp_path, name):
    printed = tmp_path / "printed.toml"
    loaded = find_settings({"spool": f"/var/{name}", "non_retryable_error_codes": frozenset({name})}, environment={})
    printed.write_text(printed_settings(loaded))
    assert find_settings({}, file=printed, environment={}).settings == loaded.settings


def test_the_output_has_every_setting_and_where_it_comes_from(tmp_path, monkeypatch, kpl):
    file = tmp_path / "gateway.toml"
    file.write_text(FILE)
    monkeypatch.setenv("KPL_INGEST_WORKERS", "3")
    outcome = kpl("serve", "--config", str(file), "--set", "max_depth=5", "--host", "::1", "--print-config")
    lines = outcome.out.splitlines()
    assert outcome.status == 0
    assert f"port = 9000  # {file}:2" in lines
    assert "workers = 3  # KPL_INGEST_WORKERS" in lines
    assert 'host = "::1"  # --host' in lines
    assert "max_depth = 5  # --set max_depth" in lines
    assert "max_records = 10000  # default" in lines
    assert "# breaker_open_seconds = 1.0  # default, without effect" in lines
    names = {line.removeprefix("# ").partition(" ")[0] for line in lines if " = " in line}
    options = gateway_options()
    assert names >= {name for name in options if name.removesuffix("_file").removesuffix("_env") == name} - {"streams"}


def test_no_secret_is_printed(monkeypatch, kpl):
    monkeypatch.setenv("KPL_INGEST_ADMIN_KEY", "open sesame, please")
    monkeypatch.setenv("KPL_INGEST_COORDINATION", "redis://:hunter2@h:6379/0")
    outcome = kpl("serve", "--print-config")
    assert '# admin_key = "***"  # KPL_INGEST_ADMIN_KEY' in outcome.out
    assert '# coordination = "***"  # KPL_INGEST_COORDINATION' in outcome.out
    assert "sesame" not in outcome.out
    assert "hunter2" not in outcome.out
    tomllib.loads(outcome.out)


FAULTS = [
    (("--set", "prot=1"), "", "--set prot is not a setting of the gateway; did you mean port?"),
    (("--set", "port=x"), "", "--set port is 'x'; it must be a whole number"),
    (("--set", "port=1", "--port", "2"), "", "--set port and --port are both set; give one of them"),
    (
        ("--set", "admin_key=open sesame, please"),
        "",
        "--set admin_key is a secret, and other users can read a command line",
    ),
    (("--port", "70000"), "", "--port is 70000; it must be between 0 and 65,535"),
    (
        ("--config", "FILE"),
        "spool = 'a'\nspool_max_byte = 5",
        "FILE:2: spool_max_byte is not a setting of the gateway; did you",
    ),
    (
        ("--config", "FILE"),
        "spool = 'a'\ndead_letters = 'b'",
        (
            "dead_letters is 'b', and spool is set; remove dead_letters, because the spool's own file holds them "
            "(dead_letters: FILE:2; spool: FILE:1)"
        ),
    ),
    (
        ("--config", "FILE", "--set", "breaker_open_seconds=1"),
        "\nbreaker = false",
        (
            "breaker is false, and breaker_open_seconds is set; remove one of them "
            "(breaker: FILE:2; breaker_open_seconds: --set breaker_open_seconds)"
        ),
    ),
    (
        ("--config", "FILE"),
        "breaker_open_seconds = 7",
        (
            "breaker_max_open_seconds is 5, below breaker_open_seconds, 7; raise breaker_max_open_seconds or lower "
            "breaker_open_seconds (breaker_open_seconds: FILE:1)"
        ),
    ),
    (
        ("--config", "FILE", "--spool", "a"),
        "coordination = 'memory://a'\ncoordination_env = 'A'",
        (
            "coordination and coordination_env are both set; give one of them "
            "(coordination: FILE:1; coordination_env: FILE:2)"
        ),
    ),
    (
        ("--set", "max_reading_bytes=4096"),
        "",
        (
            "max_reading_bytes is 4,096, below max_body_bytes, 5,000; raise max_reading_bytes or lower max_body_bytes "
            "(max_reading_bytes: --set max_reading_bytes; max_body_bytes: KPL_INGEST_MAX_BODY_BYTES)"
        ),
    ),
    (
        ("--tls-key", "k.pem"),
        "",
        "tls_certificate and tls_key belong together; give both or none (tls_key: --tls-key)",
    ),
    (("--config", "FILE"), "port = ", "FILE is not TOML: "),
]


@pytest.mark.parametrize(("arguments", "text", "words"), FAULTS)
def test_a_wrong_setting_ends_with_status_2_and_one_sentence(kpl, monkeypatch, tmp_path: Path, arguments, text, words):
    monkeypatch.setenv("KPL_INGEST_MAX_BODY_BYTES", "5000")
    file = tmp_path / "gateway.toml"
    file.write_text(text)
    outcome = kpl("serve", *(str(file) if each == "FILE" else each for each in arguments))
    assert outcome.status == 2
    assert outcome.err.startswith(f"kpl: {words.replace('FILE', str(file))}")
    assert outcome.err.count("\n") == 1
    assert "sesame" not in outcome.err
