"""Self-signed certificates that begin and end when a test wants, made by the `openssl` command."""

import shutil
import subprocess
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

needs_openssl = pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl makes the certificates")
_CONFIGURATION = """\
[ca]
default_ca = own
[own]
database = {folder}/{name}.index
serial = {folder}/{name}.serial
new_certs_dir = {folder}
default_md = sha256
policy = any
[any]
commonName = supplied
[names]
subjectAltName = DNS:localhost, IP:127.0.0.1
"""


def certificate_pair(folder: Path, name: str, not_before: datetime, not_after: datetime) -> tuple[Path, Path]:
    """Return the files of a certificate for localhost, valid between these instants, and of its key."""
    certificate, key, request, options = (folder / f"{name}.{end}" for end in ("crt", "key", "csr", "cnf"))
    options.write_text(_CONFIGURATION.format(folder=folder, name=name))
    (folder / f"{name}.index").write_text("")
    (folder / f"{name}.serial").write_text("01")
    kind = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-subj", "/CN=localhost"]
    _run("req", "-new", *kind, "-keyout", str(key), "-out", str(request))
    times = [f"{each.astimezone(UTC):%Y%m%d%H%M%SZ}" for each in (not_before, not_after)]
    signed = ["-selfsign", "-keyfile", str(key), "-in", str(request), "-out", str(certificate), "-notext"]
    _run(
        *("ca", "-batch", "-config", str(options), "-extensions", "names", *signed),
        *("-startdate", times[0], "-enddate", times[1]),
    )
    return certificate, key


def days_from_now(days: float) -> datetime:
    """Return an instant before or after now."""
    return datetime.now(UTC) + timedelta(days=days)


def _run(*arguments: str) -> None:
    subprocess.run(["openssl", *arguments], check=True, capture_output=True, timeout=30)
