"""`kpl keys`: what it prints is what the gateway lets in, and a secret is written where only its owner reads."""

import io
import json
import re
import stat
import sys

from kpl_integrations.cli import main
from kpl_integrations.ingest.tenants import FileTenants


def test_what_it_prints_for_the_tenants_file_lets_the_key_in(tmp_path, capsys):
    assert main(["keys", "new"]) == 0
    said = capsys.readouterr()
    key, line = said.out.splitlines()
    assert key not in said.err
    path = tmp_path / "tenants.toml"
    path.write_text(f'[[tenant]]\nid = "a"\n{line}\n')
    tenant = FileTenants(path).authenticate(f"Bearer {key}")
    assert tenant is not None
    assert tenant.id == "a"
    assert main(["keys", "check", str(path)]) == 0
    assert re.search(r"tenants +1\n", capsys.readouterr().out)


def test_hash_prints_the_same_line_for_a_key_that_exists(capsys, monkeypatch):
    assert main(["keys", "new", "--json"]) == 0
    made = json.loads(capsys.readouterr().out)
    monkeypatch.setattr(sys, "stdin", io.StringIO(made["api_key"] + "\n"))
    assert main(["keys", "hash", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"stored": made["stored"]}


def test_hash_of_nothing_is_bad_input(capsys, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.StringIO(""))
    assert main(["keys", "hash"]) == 4
    assert "holds no key" in capsys.readouterr().err


def test_a_key_pair_s_secret_is_in_a_private_file_and_nowhere_else(tmp_path, capsys):
    secret_file = tmp_path / "ada.secret"
    assert main(["keys", "sigv4", str(secret_file)]) == 0
    said = capsys.readouterr()
    secret = secret_file.read_text().strip()
    assert stat.S_IMODE(secret_file.stat().st_mode) == 0o600
    assert secret not in said.out + said.err
    id_line, toml_line = said.out.splitlines()
    path = tmp_path / "tenants.toml"
    path.write_text(f'[[tenant]]\nid = "ada"\n{toml_line}\n')
    key = FileTenants(path).access_key(id_line.rpartition(" ")[2])
    assert key is not None
    assert key.secret == secret


def test_a_file_that_is_there_is_never_overwritten(tmp_path, capsys):
    secret_file = tmp_path / "ada.secret"
    secret_file.write_text("precious")
    assert main(["keys", "sigv4", str(secret_file)]) == 2
    assert "not there yet" in capsys.readouterr().err
    assert secret_file.read_text() == "precious"


def test_check_says_in_one_sentence_what_is_wrong(tmp_path, capsys):
    path = tmp_path / "tenants.toml"
    path.write_text('[[tenant]]\nid = "a"\nwieght = 2\n')
    assert main(["keys", "check", str(path)]) == 4
    said = " ".join(capsys.readouterr().err.split())
    assert said.endswith("cannot be used: Object contains unknown field `wieght` - at `$.tenant[0]`")
