"""TLS files are checked before the gateway listens, and an error is one sentence."""

import shutil
import subprocess
from pathlib import Path

import pytest

from kpl_core import ConfigError
from kpl_integrations.ingest.http.listening import require_certificate

needs_openssl = pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl makes the certificates")


def _pair(folder: Path, name: str, *options: str) -> tuple[Path, Path]:
    certificate, key = folder / f"{name}.crt", folder / f"{name}.key"
    kind = ["-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-subj", "/CN=localhost"]
    command = ["openssl", "req", *kind, "-keyout", str(key), "-out", str(certificate), *options]
    subprocess.run(command, check=True, capture_output=True, timeout=30)
    return certificate, key


@needs_openssl
def test_a_matching_certificate_and_key_are_accepted(tmp_path: Path):
    require_certificate(*_pair(tmp_path, "one", "-nodes"))


@needs_openssl
def test_invalid_files_are_reported_in_one_sentence(tmp_path: Path):
    certificate, key = _pair(tmp_path, "one", "-nodes")
    _, other = _pair(tmp_path, "other", "-nodes")
    _, locked = _pair(tmp_path, "locked", "-passout", "pass:sesame")
    text = tmp_path / "text.pem"
    text.write_text("hello")
    for one, two, words in [
        (tmp_path / "none.crt", key, r"tls_certificate .*none\.crt cannot be read \(No such file"),
        (certificate, tmp_path, r"tls_key .* cannot be read \(Is a directory"),
        (certificate, text, r"cannot be used \(.+\); give a certificate chain and the private key"),
        (text, key, r"cannot be used \(.+\); give a certificate chain and the private key"),
        (certificate, other, r"cannot be used \(KEY_VALUES_MISMATCH\)"),
        (certificate, locked, r"tls_key .*locked\.key is encrypted"),
    ]:
        with pytest.raises(ConfigError, match=words):
            require_certificate(one, two)
