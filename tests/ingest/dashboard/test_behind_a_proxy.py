"""Behind a proxy that terminates TLS: its headers are trusted only if the settings name it."""

import httpx
import pytest

from tests.support.running_gateway import key_directory, running_gateway

KEY = "an-admin-key-of-32-characters-xyz"
FORWARDED = {"X-Forwarded-Proto": "https", "X-Forwarded-For": "192.0.2.1"}


@pytest.mark.parametrize(
    ("believed", "is_secure"), [(None, False), ("203.0.113.0/24", False), ("127.0.0.1", True), ("*", True)]
)
def test_the_headers_of_a_proxy_are_trusted_if_the_settings_name_it(believed, is_secure):
    with (
        running_gateway(key_directory(), {"orders": 1}, admin_key=KEY, forwarded_allow_ips=believed) as running,
        httpx.Client(trust_env=False, timeout=30) as client,
    ):
        entered = client.post(f"{running.url}/dashboard", data={"key": KEY}, headers=FORWARDED)
        assert entered.status_code == 303
        assert ("; Secure" in entered.headers["set-cookie"]) == is_secure
        # An untrusted client cannot choose the address that its wrong keys count for.
        for _ in range(5):
            client.post(f"{running.url}/dashboard", data={"key": "wrong"}, headers=FORWARDED)
        elsewhere = FORWARDED | {"X-Forwarded-For": "192.0.2.2"}
        again = client.post(f"{running.url}/dashboard", data={"key": KEY}, headers=elsewhere)
        assert again.status_code == (303 if is_secure else 429)
