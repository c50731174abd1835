"""TLS files are checked before the gateway listens, read again when they change, and an error is one sentence."""

import asyncio
import shutil
import ssl
import subprocess
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import anyio
import pytest

from kpl_core import ConfigError
from kpl_integrations.ingest.http.certificate import ServerCertificate, Validity, instant_text, validity_of
from kpl_integrations.ingest.http.listening import SpareSockets, bound_socket
from kpl_integrations.ingest.tenants import Tenant
from tests.ingest.served import served
from tests.support.certificates import certificate_pair, needs_openssl
from tests.support.gateway_scene import KnownTenants, gateway_of, kinesis
from tests.support.waiting import until

NAMED = ("-addext", "subjectAltName=DNS:localhost")


def _pair(folder: Path, name: str, *options: str) -> tuple[Path, Path]:
    certificate, key = folder / f"{name}.crt", folder / f"{name}.key"
    kind = ["-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-subj", "/CN=localhost"]
    command = ["openssl", "req", *kind, "-keyout", str(key), "-out", str(certificate), *options]
    subprocess.run(command, check=True, capture_output=True, timeout=30)
    return certificate, key


@needs_openssl
def test_a_matching_certificate_and_key_are_accepted(tmp_path: Path):
    ServerCertificate(*_pair(tmp_path, "one", "-nodes"))


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
            ServerCertificate(one, two)


@needs_openssl
@pytest.mark.parametrize(
    ("starts", "ends"),
    [
        ("1999-12-31T23:59:59", "2020-02-01T00:00:00"),
        # From 2050 on the time has another form (RFC 5280, section 4.1.2.5).
        ("2049-01-01T00:00:00", "2050-12-31T12:30:00"),
    ],
)
def test_the_validity_is_that_of_the_first_certificate(tmp_path: Path, starts: str, ends: str) -> None:
    times = [datetime.fromisoformat(each).replace(tzinfo=UTC) for each in (starts, ends)]
    certificate, _ = certificate_pair(tmp_path, "one", *times)
    other, _ = _pair(tmp_path, "other", "-nodes")
    found = validity_of("a comment\n" + certificate.read_text() + other.read_text())
    assert (instant_text(found.not_before), instant_text(found.not_after)) == (f"{starts}Z", f"{ends}Z")


@needs_openssl
def test_a_malformed_certificate_has_no_validity(tmp_path: Path) -> None:
    text = _pair(tmp_path, "one", "-nodes")[0].read_text()
    lines = text.splitlines()
    for malformed in ("", "hello", "\n".join([*lines[:3], lines[-1]]), "\n".join([lines[0], "AAAA", lines[-1]])):
        with pytest.raises(ValueError, match="certificate"):
            validity_of(malformed)


@pytest.mark.parametrize(
    ("days", "at", "problem"),
    [
        (90, -0.1, "is not valid before 1970-01-01T00:00:00Z"),
        (90, 0.0, None),
        (90, 75.9, None),
        (90, 76.0, "expires at 1970-04-01T00:00:00Z, in 14.0 days"),
        (90, 90.0, "expired at 1970-04-01T00:00:00Z"),
        # A short life is no reason to complain all the time.
        (6, 4.9, None),
        (6, 5.0, "expires at 1970-01-07T00:00:00Z, in 1.0 days"),
    ],
)
def test_a_certificate_is_due_for_renewal_in_its_last_days(days: float, at: float, problem: str | None) -> None:
    assert Validity(0.0, days * 86_400.0).problem(at * 86_400.0) == problem


@needs_openssl
def test_files_that_changed_are_read_again_and_a_wrong_pair_leaves_the_earlier_one(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    certificate, key = _pair(tmp_path, "one", "-nodes", "-days", "5")
    new, new_key = _pair(tmp_path, "new", "-nodes", "-days", "9")
    used = ServerCertificate(certificate, key)
    first = used.validity
    assert not used.reload_if_changed()
    # Half of a renewal: the certificate is of another key.
    shutil.copy(new, certificate)
    for _ in range(3):
        assert not used.reload_if_changed()
    assert "cannot be used (KEY_VALUES_MISMATCH)" in str(used.problem)
    assert used.validity == first
    assert caplog.text.count("the earlier certificate stays in use") == 1
    shutil.copy(new_key, key)
    assert used.reload_if_changed()
    assert (used.problem, used.validity) == (None, validity_of(new.read_text()))
    assert not used.reload_if_changed()
    assert used.reload_if_changed(always=True)
    # A file of which a part is written, and one that is missing for a moment.
    certificate.write_text(new.read_text()[:300])
    assert not used.reload_if_changed()
    certificate.unlink()
    assert not used.reload_if_changed()
    assert "cannot be read (No such file" in str(used.problem)
    shutil.copy(new, certificate)
    assert used.reload_if_changed()
    assert "valid until" in repr(used)


@needs_openssl
@pytest.mark.parametrize("use_uvloop", [False, True], ids=["asyncio", "uvloop"])
def test_new_connections_get_the_new_certificate_and_open_ones_go_on(tmp_path: Path, *, use_uvloop: bool) -> None:
    """Also those of clients that send no server name."""
    certificate, key = _pair(tmp_path, "one", "-nodes", *NAMED)
    new, new_key = _pair(tmp_path, "new", "-nodes", *NAMED)
    anyio.run(_replace, (certificate, key), (new, new_key), backend_options={"use_uvloop": use_uvloop})


async def _replace(used: tuple[Path, Path], new: tuple[Path, Path]) -> None:
    directory = KnownTenants(Tenant(id="a"))
    gateway = gateway_of(kinesis(), directory, tls_certificate=used[0], tls_key=used[1], reload_seconds=0.02)
    old_text, new_text = used[0].read_text(), new[0].read_text()
    async with served(gateway) as server:
        host, _, port = server.url.rpartition("/")[2].partition(":")

        async def shown(name: str | None) -> str:
            context = ssl.create_default_context(cafile=str(used[0]))
            context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
            _, writer = await asyncio.open_connection(host, int(port), ssl=context, server_hostname=name)
            der = writer.get_extra_info("ssl_object").getpeercert(binary_form=True)
            writer.close()
            return ssl.DER_cert_to_PEM_cert(der).strip()

        assert await shown("localhost") == old_text.strip()
        context = ssl.create_default_context(cafile=str(used[0]))
        reader, writer = await asyncio.open_connection(host, int(port), ssl=context, server_hostname="localhost")
        shutil.copy(new[0], used[0])
        await until(lambda: gateway.certificate is not None and gateway.certificate.problem is not None)
        assert await shown("localhost") == old_text.strip()
        parts = gateway.opened.parts.readiness(verbose=True)[1]["parts"]
        assert (parts["certificate"]["state"], parts["certificate"]["accepts_records"]) == ("degraded", True)
        shutil.copy(new[1], used[1])
        await until(lambda: gateway.certificate is not None and gateway.certificate.problem is None)
        assert await shown("localhost") == new_text.strip()
        assert await shown(None) == new_text.strip()
        writer.write(b"GET /livez HTTP/1.1\r\nhost: localhost\r\n\r\n")
        assert await asyncio.wait_for(reader.readline(), 10) == b"HTTP/1.1 200 OK\r\n"
        writer.close()


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
