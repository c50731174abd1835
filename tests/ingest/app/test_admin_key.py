"""Who sees all tenants: only the bearer of the admin key, and the key is seen by nobody."""

import pytest
from pydantic import SecretStr

from kpl_integrations.ingest.tenants.admin_key import AdminKey

KEY = "an-admin-key-of-32-characters-xyz"


@pytest.mark.parametrize(
    ("authorization", "is_shown"),
    [
        (b"Bearer " + KEY.encode(), True),
        (b"Bearer " + KEY.encode() + b"x", False),
        (b"Bearer ", False),
        (b"", False),
        ("Bearer ключ".encode(), False),
    ],
)
def test_only_the_whole_key_shows_it(authorization, is_shown):
    assert AdminKey(SecretStr(KEY)).is_shown({b"authorization": authorization}) is is_shown


def test_without_a_key_nobody_is_admin():
    nobody = AdminKey(None)
    assert not nobody.is_shown({})
    assert not nobody.is_shown({b"authorization": b"Bearer "})


def test_it_does_not_show_itself():
    assert KEY not in repr(AdminKey(SecretStr(KEY)))
