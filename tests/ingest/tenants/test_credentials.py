"""Bearer keys of tenants and of the administrator follow one rule."""

from hashlib import sha256
from hmac import compare_digest

import pytest

from kpl_integrations.ingest.tenants import FileTenants, Tenant, credentials, stored_key
from kpl_integrations.ingest.tenants.credentials import AdminKey, ApiKeys, Secret, bearer_key

KEY = "an-admin-key-of-32-characters-xyz"

# The value of an Authorization header, and the key in it.
AUTHORIZATIONS: list[tuple[str | None, str | None]] = [
    (f"Bearer {KEY}", KEY),
    (f"bearer {KEY}", KEY),
    (f"BEARER   {KEY} ", KEY),
    (f" Bearer {KEY}", KEY),
    (KEY, None),
    (f"Basic {KEY}", None),
    (f"Bearer{KEY}", None),
    ("Bearer", None),
    ("Bearer ", None),
    ("", None),
    (None, None),
]


@pytest.mark.parametrize(("authorization", "key"), AUTHORIZATIONS)
def test_the_scheme_is_required_in_any_letter_case(authorization, key):
    assert bearer_key(authorization) == key


@pytest.mark.parametrize(("authorization", "key"), AUTHORIZATIONS)
def test_tenants_and_the_administrator_follow_the_same_rule(tmp_path, authorization, key):
    path = tmp_path / "tenants.toml"
    path.write_text(f'[[tenant]]\nid = "a"\napi_keys = ["{stored_key(KEY)}"]\n')
    headers = {} if authorization is None else {b"authorization": authorization.encode()}
    assert AdminKey(Secret(KEY)).is_shown(headers) is (key is not None)
    assert (FileTenants(path).authenticate(authorization) is not None) is (key is not None)


@pytest.mark.parametrize("shown", [KEY + "x", KEY[:-1], "ключ", "\udcff"])
def test_another_key_is_not_the_admin_key(shown):
    value = b"Bearer " + shown.encode("utf-8", "surrogateescape")
    assert not AdminKey(Secret(KEY)).is_shown({b"authorization": value})


def test_an_admin_key_outside_ascii_matches_its_utf_8():
    value = "Bearer ключ-администратора".encode()
    assert AdminKey(Secret("ключ-администратора")).is_shown({b"authorization": value})


def test_without_an_admin_key_there_is_no_administrator():
    assert not AdminKey(None).is_shown({})
    assert not AdminKey(None).is_shown({b"authorization": b"Bearer "})


def test_the_repr_does_not_show_the_admin_key():
    assert KEY not in repr(AdminKey(Secret(KEY)))


def test_keys_are_compared_in_constant_time(monkeypatch):
    """A comparison that ends at the first difference tells an attacker how much of a guess is right."""
    compared = []

    def spy(one: bytes, other: bytes) -> bool:
        compared.append((one, other))
        return compare_digest(one, other)

    monkeypatch.setattr(credentials, "compare_digest", spy)
    tenant, digest = Tenant(id="a"), sha256(KEY.encode()).digest()
    assert ApiKeys([(digest, tenant)]).tenant_of(KEY) is tenant
    assert AdminKey(Secret(KEY)).is_shown({b"authorization": b"Bearer " + KEY.encode()})
    assert compared == [(digest, digest), (KEY.encode(), KEY.encode())]
