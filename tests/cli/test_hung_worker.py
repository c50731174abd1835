"""A worker of `kpl serve --workers` that hangs: the others say how old its figures are."""

import json
import os
import signal
from contextlib import closing
from http.client import HTTPConnection
from typing import Any

import pytest

from tests.cli.test_serve_workers import gateway
from tests.support.waiting import wait_until

pytestmark = [pytest.mark.long, pytest.mark.timeout(120)]


def test_the_figures_of_a_worker_that_hangs_grow_old(stream):
    with gateway(stream) as running, closing(HTTPConnection("127.0.0.1", running.port, timeout=30)) as connection:

        def asked(path: str) -> Any:
            # Over one connection, so it is always the same worker.
            connection.request("GET", path)
            return json.loads(connection.getresponse().read())

        def workers() -> dict[str, Any]:
            found: dict[str, Any] = asked("/v1/stats")["workers"]
            return found

        wait_until(lambda: len(workers()) == 2, "two workers")
        own = asked("/readyz?verbose")["process_id"]
        (hung,) = (number for number, each in workers().items() if each["process_id"] != own)
        (other,) = workers().keys() - {hung}
        os.kill(workers()[hung]["process_id"], signal.SIGSTOP)
        wait_until(lambda: workers()[hung]["silent_seconds"] > workers()[other]["silent_seconds"] + 3, "silence")
        silent = next(line for line in running.serve.stderr if f"worker {hung} has not reported for " in line)
        assert f"py-spy dump --pid {workers()[hung]['process_id']}" in silent
        os.kill(workers()[hung]["process_id"], signal.SIGCONT)
        wait_until(lambda: workers()[hung]["silent_seconds"] < 2, "a report")
        again = next(line for line in running.serve.stderr if f"worker {hung} " in line)
        assert f"worker {hung} reports again" in again
        assert running.end(signal.SIGTERM) == 0
