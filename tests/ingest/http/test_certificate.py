"""TLS files are checked before the gateway listens, and an error is one sentence."""

import asyncio
import shutil
import ssl
import subprocess
from pathlib import Path
from typing import Any

import pytest

from kpl_core import ConfigError
from kpl_integrations.ingest.http.listening import SpareSockets, bound_socket, require_certificate
from tests.ingest.scene import gateway_of, kinesis
from tests.ingest.served import served

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


@needs_openssl
@pytest.mark.anyio
@pytest.mark.parametrize("anyio_backend", ["asyncio"])
@pytest.mark.parametrize("is_tls", [False, True], ids=["plain", "tls"])
async def test_a_connection_of_another_workers_socket_is_served_as_its_own(tmp_path: Path, is_tls, anyio_backend):
    """A client that does not finish its handshake disturbs no other, and a shutdown ends idle connections."""
    certificate, key = _pair(tmp_path, "one", "-nodes", "-addext", "subjectAltName=DNS:localhost")
    files: dict[str, Any] = {"tls_certificate": certificate, "tls_key": key} if is_tls else {}
    context = ssl.create_default_context(cafile=str(certificate)) if is_tls else None
    with bound_socket("127.0.0.1", 0) as other:
        host, port = other.getsockname()
        spares = SpareSockets({1: other.dup()})
        async with served(gateway_of(kinesis(), **files), spares):
            spares.accept_from([1])
            # Closed at the end: the server closes them only at its shutdown.
            opened = [await asyncio.open_connection(host, port)]
            opened[0][1].write(b"\x00garbage\r\n\r\n")
            for _ in range(2):
                reader, writer = await asyncio.open_connection(
                    host, port, ssl=context, server_hostname="localhost" if is_tls else None
                )
                opened.append((reader, writer))
                writer.write(b"GET /readyz HTTP/1.1\r\nhost: localhost\r\n\r\n")
                assert await asyncio.wait_for(reader.readline(), 10) == b"HTTP/1.1 200 OK\r\n"
        assert await asyncio.wait_for(opened[-1][0].read(), 10)
        for _, writer in opened:
            writer.close()
