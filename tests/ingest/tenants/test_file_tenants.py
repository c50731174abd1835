"""Tenants from a file: authentication, invalid files, reloads, and no secret in any message."""

import logging
import os
import time
from pathlib import Path

import pytest

from kpl_core import ConfigError
from kpl_integrations.ingest.tenants import (
    AccessKey,
    CallableTenants,
    FileTenants,
    OpenTenants,
    Tenant,
    TenantDirectory,
    new_api_key,
    stored_key,
)
from kpl_integrations.ingest.tenants.tenants_file import require_not_writable_by_others

KEY = new_api_key()
OTHER_KEY = new_api_key()
SECRET = "the-secret-itself"
# A secret in the place of its name.
PASTED = "wJalrXUtnFEMI/K7MDENG/bPxRfiCYEXAMPLEKEY"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "tenants.toml"


def written(path: Path, text: str) -> Path:
    before = path.stat().st_mtime_ns if path.exists() else 0
    path.write_text(text)
    # Two writes within one tick of the file system's clock would have the same modification time.
    os.utime(path, ns=(before + 10**9, before + 10**9))
    return path


def one(key: str = KEY, more: str = "") -> str:
    return f'[[tenant]]\nid = "a"\napi_keys = ["{stored_key(key)}"]\n{more}\n'


def test_a_tenant_is_found_by_its_key_and_by_its_id(path):
    tenants = FileTenants(written(path, one(more='weight = 3\ntier = "critical"\nstreams = ["o*"]\nack = "delivered"')))
    wanted = Tenant(id="a", weight=3, tier="critical", streams=("o*",), default_ack="delivered")
    assert tenants.authenticate(f"Bearer {KEY}") == wanted
    assert tenants.authenticate(f"bearer  {KEY} ") == wanted
    assert tenants.by_id("a") == wanted
    assert list(tenants.tenants()) == [wanted]


@pytest.mark.parametrize(
    "authorization",
    [None, "", "Bearer", "Bearer ", f"Bearer {OTHER_KEY}", KEY, f"Basic {KEY}", f"Bearer {KEY[:-1]}", "Bearer \udcff",
     "Bearer " + "x" * 100_000, f"Bearer {stored_key(KEY)}"],
    # The keys are random. Ids have to be the same in each process of a parallel run.
    ids=["no-header", "empty", "no-key", "blank-key", "another-key", "no-scheme", "basic", "cut-key", "not-ascii",
         "100000-characters", "stored-key"],
)  # fmt: skip
def test_other_credentials_are_rejected(path, authorization):
    assert FileTenants(written(path, one())).authenticate(authorization) is None


def test_requests_without_credentials_belong_to_the_unknown_tenant_of_the_file(path):
    tenants = FileTenants(written(path, one(more="[unknown]\nrecords_per_second = 5")))
    assert tenants.authenticate(None) == Tenant(id="unknown", records_per_second=5)
    assert tenants.authenticate(f"Bearer {OTHER_KEY}") is None


def test_the_gateways_otlp_streams_are_the_default_of_a_tenants(path):
    tenants = FileTenants(written(path, one(more='[tenant.otlp]\nlogs = "mine"\n[otlp]\nlogs = "all"\ntraces = "t"')))
    tenant = tenants.by_id("a")
    assert tenant is not None
    assert dict(tenant.otlp_streams) == {"logs": "mine", "traces": "t"}


@pytest.mark.parametrize(("more", "is_set"), [("", False), ("trace_records = true", True)])
def test_the_records_of_a_tenant_carry_traces_only_if_the_file_says_so(path, more, is_set):
    tenant = FileTenants(written(path, one(more=more))).authenticate(f"Bearer {KEY}")
    assert tenant is not None
    assert tenant.trace_records is is_set


def test_secrets_come_from_the_environment_or_a_private_file(path, tmp_path):
    (tmp_path / "secret").write_text(f"{SECRET}\n")
    (tmp_path / "secret").chmod(0o600)
    text = one(
        more='[[tenant.sigv4]]\naccess_key_id = "K1"\nsecret_env = "S"\nsession_token_env = "T"\n'
        "expires_at = 2026-01-02T03:04:05Z\n"
        '[[tenant.sigv4]]\naccess_key_id = "K2"\nsecret_file = "secret"\n'
    )
    tenants = FileTenants(written(path, text), environment={"S": SECRET, "T": "token"})
    tenant = tenants.by_id("a")
    assert tenant is not None
    assert tenants.access_key("K1") == AccessKey("K1", SECRET, tenant, "token", 1767323045.0)
    assert tenants.access_key("K2") == AccessKey("K2", SECRET, tenant)
    assert tenants.access_key("K3") is None


# An invalid file, and part of its error message.
FAULTS: list[tuple[str, str]] = [
    ("", "no client could authenticate"),
    ("[[tenant]]\nid = 'a'", "no client could authenticate"),
    ("tenant = 3", r"Expected `array`"),
    ("[[tenant]", "not TOML"),
    ("x = " + "9" * 5_000, "not TOML"),
    ("x = " + "[" * 100_000, "too deep"),
    ("x = 1", "unknown field `x`"),
    (one(more="wieght = 3"), r"unknown field `wieght` - at `..tenant.0.`; did you mean weight\?"),
    ("[[tennant]]\nid = 'a'", r"; did you mean tenant\?"),
    ("[unknown]\nbyte_per_second = 5", r"; did you mean bytes_per_second\?"),
    (one(more="[[tenant.sigv4]]\nacces_key_id = 'K'"), r"; did you mean access_key_id\?"),
    (one(more="records_per_second = 1e308"), "records_per_second of tenant a is 1e.308; it must be between 0.001 and"),
    (one(more="weight = 0"), "weight of tenant a"),
    (one(more="tier = 'gold'"), "tier"),
    (one() + one(OTHER_KEY), "repeated"),
    (one() + one().replace('"a"', '"b"'), "same API key"),
    (one().replace('"a"', '"unknown"'), "reserved"),
    (f"[[tenant]]\nid = 'a'\napi_keys = ['{KEY}']", "never store the key itself"),
    (one(more=f"[[tenant.sigv4]]\naccess_key_id = 'K'\nsecret = '{SECRET}'"), "unknown field `secret`"),
    (one(more="[[tenant.sigv4]]\naccess_key_id = 'K'"), "name one of them"),
    (one(more="[[tenant.sigv4]]\naccess_key_id = 'K'\nsecret_env = 'NONE'"), "NONE has no value"),
    (one(more="[[tenant.sigv4]]\naccess_key_id = 'K'\nsecret_file = 'none'"), "No such file"),
    (one(more="[[tenant.sigv4]]\naccess_key_id = 'K'\nsecret_file = '.'"), "not a regular file|Is a directory"),
    (one(more='[[tenant.sigv4]]\naccess_key_id = "K"\nsecret_file = "\\u0000"'), "null (byte|character)"),
    (one(more="[[tenant.sigv4]]\naccess_key_id = 'K'\nsecret_file = 'open'"), "mode 0644 lets other users read it"),
    (one().replace('"a"', f"'{KEY}'"), "tenant id is a value of 47 characters"),
    (f"{KEY} = 1", "a value of 47 characters, which may be a key"),
    (f"{KEY} = 1\n" * 2, "not TOML"),
    (one(more=f"{KEY} = 1"), "a value of 47 characters, which may be a key"),
    (one(more=f"tier = '{KEY}'"), "a value of 47 characters|Invalid enum"),
    (one(more=f"[tenant.otlp]\n{KEY} = 's'"), "a value of 47 characters|Invalid enum"),
    (one(more="tier = 'gold'"), "'gold' .*tier`; it must be one of critical, normal, bulk"),
    (one(more="ack = 'Delivered'"), "'Delivered' .*ack`; it must be one of queued, spooled, delivered"),
    (one(more="[tenant.otlp]\nlog = 's'"), "'log' .*otlp`; it must be one of logs, traces, metrics"),
    (one(more=f"streams = ['{KEY}'"), "not TOML"),
    (
        one(more="[[tenant.sigv4]]\naccess_key_id = 'K'\nsecret_env = 'S'\n" * 2),
        "access_key_id K of tenant a is repeated",
    ),
    (one(more=f"[[tenant.sigv4]]\naccess_key_id = 'K'\nsecret_env = '{PASTED}'"), "a name of 40 characters, not shown"),
    (one(more=f"[[tenant.sigv4]]\naccess_key_id = 'K'\nsecret_file = '{PASTED}'"), "its name is not shown because"),
    (
        one(more=f"[[tenant.sigv4]]\naccess_key_id = 'K'\nsecret_file = '{PASTED.replace('/', '')}'"),
        "its name is not shown because",
    ),
    (
        one(more=f"[[tenant.sigv4]]\naccess_key_id = 'K'\nsecret_env = 'S'\nsession_token_env = '{PASTED}'"),
        "session token .*a name of 40 characters, not shown",
    ),
    (
        one(more=f"[[tenant.sigv4]]\naccess_key_id = '{PASTED}'\nsecret_env = 'S'\n" * 2),
        "access_key_id .a name of 40 characters, not shown: it may be a secret. of tenant a is repeated",
    ),
    (one(more=f"[[tenant.sigv4]]\naccess_key_id = '{PASTED}'"), "access_key_id .a name of 40 characters, not shown"),
    (one(more="[[tenant.sigv4]]\naccess_key_id = 'K'\nsecret_env = 'THE_SECRET_OF_A_LONG_NAME'"), "LONG_NAME has no"),
]


@pytest.mark.parametrize(("text", "words"), FAULTS, ids=[f"{row}-{words}" for row, (_, words) in enumerate(FAULTS)])
def test_an_invalid_file_raises_an_error_with_the_reason_and_without_secrets(path, tmp_path, text, words):
    (tmp_path / "open").write_text(SECRET)
    (tmp_path / "open").chmod(0o644)
    with pytest.raises(ConfigError, match=words) as raised:
        FileTenants(written(path, text), environment={"S": SECRET})
    assert KEY not in str(raised.value)
    assert SECRET not in str(raised.value)
    assert PASTED[-10:] not in str(raised.value)
    assert raised.value.__cause__ is None


# The mode of a secret file, its group (None: one that this process is not in), and whether it is accepted.
SECRET_MODES = [(0o600, 0, True), (0o400, 0, True), (0o640, 0, True), (0o440, 0, True), (0o440, None, False),
                (0o660, 0, False), (0o604, 0, False), (0o644, 0, False)]  # fmt: skip


@pytest.mark.parametrize(("mode", "group", "is_accepted"), SECRET_MODES)
def test_the_group_of_this_process_may_read_a_secret_file(path, tmp_path, mode, group, is_accepted):
    """A Kubernetes secret with an fsGroup and a credential of systemd have mode 0440 or 0640."""
    secret = tmp_path / "secret"
    secret.write_text(SECRET)
    if group is not None:
        os.chown(secret, -1, os.getegid())
    elif os.geteuid() == 0:
        os.chown(secret, -1, 54_321)
    else:
        pytest.skip("only root can give a file to a group that it is not in")
    secret.chmod(mode)
    text = written(path, one(more="[[tenant.sigv4]]\naccess_key_id = 'K'\nsecret_file = 'secret'"))
    if is_accepted:
        assert FileTenants(text).access_key("K") is not None
    else:
        with pytest.raises(ConfigError, match=f"mode {mode:04o} lets other users read it"):
            FileTenants(text)


# The mode of a tenants file, its owner (None: this user), its group (None: this process's), and whether it is accepted.
OTHER_ID = 54_321
FILE_MODES = [(0o600, None, None, True), (0o644, None, OTHER_ID, True), (0o664, None, None, True),
              (0o664, None, 0, True), (0o664, None, OTHER_ID, False), (0o646, None, None, False),
              (0o666, None, OTHER_ID, False), (0o644, OTHER_ID, None, False),
              (0o444, OTHER_ID, None, False)]  # fmt: skip


@pytest.mark.parametrize(("mode", "owner", "group", "is_accepted"), FILE_MODES)
def test_a_tenants_file_that_others_may_change_is_refused(path, mode, owner, group, is_accepted):
    if (owner, group) != (None, None) and os.geteuid() != 0:
        pytest.skip("only root can give a file to another user or group")
    written(path, one())
    os.chown(path, -1 if owner is None else owner, os.getegid() if group is None else group)
    path.chmod(mode)
    if is_accepted:
        assert FileTenants(path).by_id("a") is not None
    else:
        with pytest.raises(ConfigError, match=f"mode {mode:04o} lets .*change it"):
            FileTenants(path)


def test_a_tenants_file_that_a_supplementary_group_may_change_is_refused(path, monkeypatch):
    monkeypatch.setattr(os, "getgroups", lambda: [OTHER_ID])
    monkeypatch.setattr(os, "getegid", lambda: OTHER_ID + 1)
    status = os.stat_result((0o100664, 0, 0, 1, os.geteuid(), OTHER_ID, 0, 0, 0, 0))
    with pytest.raises(ConfigError, match="the file lets other users change it"):
        require_not_writable_by_others(status, "the file")
    monkeypatch.setattr(os, "getegid", lambda: OTHER_ID)
    require_not_writable_by_others(status, "the file")


def test_a_missing_file_is_named(path):
    with pytest.raises(ConfigError, match="No such file"):
        FileTenants(path)


@pytest.mark.parametrize(("more", "tenant"), [('ack = "spooled"', "a"), ('[unknown]\nack = "spooled"', "unknown")])
def test_a_tenant_that_needs_a_spool_makes_the_file_of_a_gateway_without_one_invalid(path, more, tenant):
    written(path, one(more=more))
    assert FileTenants(path).by_id("a") is not None
    with pytest.raises(ConfigError, match=f"tenant {tenant} has ack = 'spooled', .* start it with --spool FILE"):
        FileTenants(path, has_spool=False)


def test_a_changed_file_takes_effect_at_the_next_reload(path):
    tenants = FileTenants(written(path, one()))
    assert not tenants.reload_if_changed()
    written(path, one(OTHER_KEY))
    assert tenants.authenticate(f"Bearer {KEY}") is not None
    assert tenants.reload_if_changed()
    assert not tenants.reload_if_changed()
    assert tenants.authenticate(f"Bearer {KEY}") is None
    assert tenants.authenticate(f"Bearer {OTHER_KEY}") is not None


def test_a_changed_secret_file_takes_effect_at_the_next_reload(path, tmp_path):
    secret = tmp_path / "secret"
    secret.write_text("one")
    secret.chmod(0o600)
    tenants = FileTenants(written(path, one(more="[[tenant.sigv4]]\naccess_key_id = 'K'\nsecret_file = 'secret'")))
    secret.write_text("another")
    assert tenants.reload_if_changed()
    key = tenants.access_key("K")
    assert key is not None
    assert key.secret == "another"


def test_an_invalid_file_keeps_the_tenants_and_is_logged_once_until_it_is_corrected(path, caplog):
    tenants = FileTenants(written(path, one()))
    with caplog.at_level(logging.WARNING):
        written(path, one(more="weight = 0"))
        assert not tenants.reload_if_changed()
        assert not tenants.reload_if_changed()
        path.unlink()
        assert not tenants.reload_if_changed()
        assert not tenants.reload_if_changed()
    assert [record.getMessage().count("the gateway keeps the current tenants") for record in caplog.records] == [1, 1]
    assert tenants.problem is not None
    assert tenants.authenticate(f"Bearer {KEY}") is not None
    written(path, one(OTHER_KEY))
    assert tenants.reload_if_changed()
    assert tenants.problem is None


def test_a_file_that_could_not_be_used_is_read_again_when_its_cause_is_gone(path, tmp_path):
    tenants = FileTenants(written(path, one()))
    secret = tmp_path / "secret"
    more = "[[tenant.sigv4]]\naccess_key_id = 'K'\nsecret_file = 'secret'"
    written(path, one(more=more))
    assert not tenants.reload_if_changed()
    assert tenants.problem is not None
    assert "No such file" in tenants.problem
    secret.write_text("one")
    secret.chmod(0o644)
    assert not tenants.reload_if_changed()
    assert "lets other users read it" in tenants.problem
    secret.chmod(0o600)
    assert tenants.reload_if_changed()
    assert tenants.problem is None
    assert tenants.access_key("K") is not None


@pytest.mark.parametrize(("size", "is_accepted"), [(4_096, True), (4_097, False)])
def test_a_secret_that_is_too_long_is_refused_and_not_cut(path, tmp_path, size, is_accepted):
    secret = tmp_path / "secret"
    secret.write_text("s" * size)
    secret.chmod(0o600)
    written(path, one(more="[[tenant.sigv4]]\naccess_key_id = 'K'\nsecret_file = 'secret'"))
    if is_accepted:
        key = FileTenants(path).access_key("K")
        assert key is not None
        assert len(key.secret) == size
    else:
        with pytest.raises(ConfigError, match="it has more than 4,096 bytes; give the file of one secret"):
            FileTenants(path)


def test_no_repr_contains_a_secret(path):
    text = one(more="[[tenant.sigv4]]\naccess_key_id = 'K'\nsecret_env = 'S'\nsession_token_env = 'T'")
    tenants = FileTenants(written(path, text), environment={"S": SECRET, "T": "the-token"})
    shown = f"{tenants!r} {tenants.access_key('K')!r} {tenants.access_key('K')} {tenants.by_id('a')!r}"
    for secret in (KEY, stored_key(KEY), SECRET, "the-token"):
        assert secret not in shown


def test_ten_thousand_tenants_are_loaded_and_each_is_found(path):
    count = 10_000
    keys = [f"key-{index}" for index in range(count)]
    text = "".join(f'[[tenant]]\nid = "t{i}"\napi_keys = ["{stored_key(key)}"]\n' for i, key in enumerate(keys))
    tenants = FileTenants(written(path, text))
    for index in range(0, count, 7):
        tenant = tenants.authenticate(f"Bearer {keys[index]}")
        assert tenant is not None
        assert tenant.id == f"t{index}"
    # Each takes one hash and one lookup, independent of the number of tenants.
    started = time.thread_time()
    for key in keys:
        tenants.authenticate(f"Bearer {key}")
    assert time.thread_time() - started < 2.0
    with pytest.raises(ConfigError, match="10,001 tenants"):
        FileTenants(written(path, text + '[[tenant]]\nid = "more"\n'))


def test_a_key_is_256_random_bits():
    keys = {new_api_key() for _ in range(100)}
    assert len(keys) == 100
    assert all(len(key) == len("kpl_") + 43 for key in keys)


def test_a_function_of_the_application_identifies_the_tenant():
    ada = Tenant(id="ada")
    made = Tenant(id="made")
    answers: dict[str, Tenant | str | None] = {"known": "ada", "made": made, "stranger": "nobody", "wrong": None}
    directory: TenantDirectory = CallableTenants(
        lambda header: answers[header or "wrong"], tenants=[ada], unknown=Tenant(id="unknown", tier="bulk")
    )
    assert directory.authenticate("known") is ada
    assert directory.authenticate("made") is made
    assert directory.authenticate("stranger") == Tenant(id="unknown", tier="bulk")
    assert directory.authenticate("wrong") is None
    assert CallableTenants(lambda _: "nobody").authenticate("x") is None


def test_without_credentials_all_requests_belong_to_one_tenant():
    tenant = Tenant(id="local")
    directory: TenantDirectory = OpenTenants(tenant)
    assert directory.authenticate(None) is directory.authenticate("Bearer x") is tenant
    assert not directory.verifies
    assert directory.access_key("x") is None
