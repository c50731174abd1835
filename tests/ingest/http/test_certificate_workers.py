"""`kpl serve --workers`: SIGHUP reaches every worker, and each takes the new certificate."""

import signal
import ssl
from pathlib import Path

import pytest

from tests.support.certificates import certificate_pair, days_from_now, needs_openssl
from tests.support.kpl_process import started
from tests.support.waiting import wait_until


@needs_openssl
@pytest.mark.long
@pytest.mark.parametrize("workers", [1, 2])
def test_sighup_lets_each_worker_read_its_certificate_again(
    workers: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old, old_key = certificate_pair(tmp_path, "old", days_from_now(-9), days_from_now(1))
    new, new_key = certificate_pair(tmp_path, "new", days_from_now(-1), days_from_now(90))
    monkeypatch.setenv("KPL_INGEST_TLS_CERTIFICATE", str(old))
    monkeypatch.setenv("KPL_INGEST_TLS_KEY", str(old_key))
    monkeypatch.setenv("KPL_INGEST_RELOAD_SECONDS", "3600")
    with started("serve", "--local", "--port", "0", "--workers", str(workers)) as serve:
        url = serve.stdout.readline().split()[-1]
        host, _, port = url.rpartition("/")[2].partition(":")

        def shown() -> set[str]:
            """Return the certificates of enough connections to reach each worker."""
            return {ssl.get_server_certificate((host, int(port)), timeout=10).strip() for _ in range(12)}

        assert shown() == {old.read_text().strip()}
        old_key.write_bytes(new_key.read_bytes())
        old.write_bytes(new.read_bytes())
        assert shown() != {new.read_text().strip()}
        serve.process.send_signal(signal.SIGHUP)
        wait_until(lambda: shown() == {new.read_text().strip()}, "each worker has the new certificate")
        serve.process.terminate()
        assert serve.end() == 0
        said = serve.stderr.read()
    assert said.count("part changed: certificate is degraded: expires at") == workers
    assert said.count(f"read the certificate {old}, valid until") == workers
    assert said.count("part changed: certificate is ok") == workers
