"""`kpl keys`: the gateway accepts the printed keys, and only the owner can read a secret file."""

import io
import json
import re
import stat
import sys

from kpl_integrations.cli import main
from kpl_integrations.ingest.tenants import FileTenants


def test_the_gateway_accepts_a_new_key(tmp_path, capsys):
    assert main(["keys", "new"]) == 0
    printed = capsys.readouterr()
    key, line = printed.out.splitlines()
    assert key not in printed.err
    path = tmp_path / "tenants.toml"
    path.write_text(f'[[tenant]]\nid = "a"\n{line}\n')
    tenant = FileTenants(path).authenticate(f"Bearer {key}")
    assert tenant is not None
    assert tenant.id == "a"
    assert main(["keys", "check", str(path)]) == 0
    assert re.search(r"tenants +1\n", capsys.readouterr().out)


def test_hash_prints_the_same_line_for_an_existing_key(capsys, monkeypatch):
    assert main(["keys", "new", "--json"]) == 0
    made = json.loads(capsys.readouterr().out)
    monkeypatch.setattr(sys, "stdin", io.StringIO(made["api_key"] + "\n"))
    assert main(["keys", "hash", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"stored": made["stored"]}


def test_hash_of_an_empty_input_is_bad_input(capsys, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.StringIO(""))
    assert main(["keys", "hash"]) == 4
    assert "has no key" in capsys.readouterr().err


def test_the_secret_of_a_key_pair_is_only_in_a_private_file(tmp_path, capsys):
    secret_file = tmp_path / "ada.secret"
    assert main(["keys", "sigv4", str(secret_file)]) == 0
    printed = capsys.readouterr()
    secret = secret_file.read_text().strip()
    assert stat.S_IMODE(secret_file.stat().st_mode) == 0o600
    assert secret not in printed.out + printed.err
    id_line, toml_line = printed.out.splitlines()
    path = tmp_path / "tenants.toml"
    path.write_text(f'[[tenant]]\nid = "ada"\n{toml_line}\n')
    key = FileTenants(path).access_key(id_line.rpartition(" ")[2])
    assert key is not None
    assert key.secret == secret


def test_an_existing_file_is_not_overwritten(tmp_path, capsys):
    secret_file = tmp_path / "ada.secret"
    secret_file.write_text("precious")
    assert main(["keys", "sigv4", str(secret_file)]) == 2
    assert "name a new file" in capsys.readouterr().err
    assert secret_file.read_text() == "precious"


def test_check_reports_a_problem_in_one_sentence(tmp_path, capsys):
    path = tmp_path / "tenants.toml"
    path.write_text('[[tenant]]\nid = "a"\nwieght = 2\n')
    assert main(["keys", "check", str(path)]) == 4
    error = " ".join(capsys.readouterr().err.split())
    assert error.endswith("Object contains unknown field `wieght` - at `$.tenant[0]`; did you mean weight?")
