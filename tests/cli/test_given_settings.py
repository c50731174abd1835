"""What a command line says about settings means the same in the gateway, in each worker and in its replacement."""

from typing import Any

import msgspec
import pytest

from kpl_core import ConfigError
from kpl_integrations.cli.serve.worker import Given


def given(**arguments: Any) -> Given:
    return Given(**{"options": {}, "assigned": {}, "file": None, "local": False, **arguments})


def as_a_worker_has(command_line: Given) -> Given:
    return msgspec.json.decode(msgspec.json.encode(command_line), type=Given)


@pytest.mark.parametrize("later", ["spool = '/elsewhere/spool.db'", "spool = ", None])
def test_a_replaced_worker_has_the_settings_of_its_gateway_although_the_file_changed(tmp_path, later):
    file = tmp_path / "gateway.toml"
    file.write_text(f"\nspool = '{tmp_path / 'spool.db'}'")
    started = given(file=str(file)).with_file_text()
    before = started.settings()
    if later is None:
        file.unlink()
    else:
        file.write_text(later)
    replacement = as_a_worker_has(started).settings()
    assert replacement == before
    assert replacement.made["spool"].origin == f"{file}:2"


def test_a_file_that_cannot_be_read_is_an_error_at_the_start(tmp_path):
    assert given().with_file_text() == given()
    with pytest.raises(ConfigError, match=r"gateway\.toml: No such file"):
        given(file=str(tmp_path / "gateway.toml")).with_file_text()
