"""A cookie is valid for one admin key and until it expires."""

import pytest
from hypothesis import given, strategies as st

from kpl_integrations.ingest.dashboard.sign_in import COOKIE, SECONDS, DashboardSession

KEY = "the-admin-key"
NOW = 1_800_000_000.0
session = DashboardSession(KEY)


def _cookie(set_cookie: str | None) -> bytes:
    assert set_cookie is not None
    return set_cookie.partition(";")[0].encode()


def test_the_right_key_opens_a_session_that_expires() -> None:
    cookie = _cookie(session.begin(KEY, NOW, is_secure=True))
    assert session.is_open(cookie, NOW)
    assert session.is_open(cookie, NOW + SECONDS - 1)
    assert not session.is_open(cookie, NOW + SECONDS)


def test_scripts_cannot_read_the_cookie_and_other_sites_cannot_send_it() -> None:
    set_cookie = session.begin(KEY, NOW, is_secure=True)
    assert set_cookie is not None
    assert {"HttpOnly", "SameSite=Strict", "Secure"} <= {each.strip() for each in set_cookie.split(";")}
    assert KEY not in set_cookie


@pytest.mark.parametrize("wrong", ["", "the-admin-kez", "THE-ADMIN-KEY", "ключ"])
def test_a_wrong_key_opens_no_session(wrong: str) -> None:
    assert session.begin(wrong, NOW, is_secure=True) is None


def test_a_new_key_ends_all_sessions() -> None:
    assert not DashboardSession("another").is_open(_cookie(session.begin(KEY, NOW, is_secure=True)), NOW)


def test_the_expiration_of_a_cookie_cannot_be_changed() -> None:
    name, _, value = _cookie(session.begin(KEY, NOW, is_secure=True)).decode().partition("=")
    expires_at, _, mac = value.partition(".")
    forged = f"{name}={int(expires_at) + 1}.{mac}".encode()
    assert not session.is_open(forged, NOW)


@given(st.one_of(st.binary(max_size=200), st.binary(max_size=80).map(lambda rest: COOKIE.encode() + b"=" + rest)))
def test_any_other_cookie_is_no_session_and_no_error(header: bytes) -> None:
    assert not session.is_open(header, NOW)


@pytest.mark.parametrize("others", [b"a=b; %b", b'%b; c="x', b"kpl_dashboar=1;%b", b"=;;%b", b"\xff=\xff; %b;"])
def test_the_cookie_is_found_among_others(others: bytes) -> None:
    cookie = _cookie(session.begin(KEY, NOW, is_secure=True))
    assert session.is_open(others % cookie, NOW)
    name, _, value = cookie.partition(b"=")
    assert session.is_open(others % (name + b'="' + value + b'"'), NOW)
