"""Mounted under a prefix: with or without the slash, and not under a path that only resembles the prefix."""

from typing import Any

import pytest

from kpl_integrations.ingest import IngestGateway
from tests.support.gateway_scene import open_gateway

pytestmark = pytest.mark.anyio


async def ask(gateway: IngestGateway, method: str, path: str, root: str) -> tuple[int, dict[str, str], bytes]:
    sent: list[Any] = []

    async def receive() -> Any:
        return {"type": "http.request", "body": b"{}"}

    async def send(message: Any) -> None:
        sent.append(message)

    scope = {
        "type": "http",
        "method": method,
        "path": path,
        "raw_path": path.encode(),
        "root_path": root,
        "query_string": b"",
        "headers": [(b"content-type", b"application/x-amz-json-1.1")],
    }
    await gateway(scope, receive, send)
    fields = {name.decode(): value.decode() for name, value in sent[0]["headers"]}
    return sent[0]["status"], fields, b"".join(message.get("body", b"") for message in sent[1:])


# The path, the host's prefix, and whether the Kinesis API answers there.
ROOTS = [
    ("/", "", True),
    ("", "", True),
    ("/ingest", "/ingest", True),
    ("/ingest/", "/ingest", True),
    ("/ingest/", "/ingest/", True),
    # A host that removes the prefix itself.
    ("/", "/ingest", True),
    ("", "/ingest", True),
    ("/ingester", "/ingest", False),
    ("/ingest//", "/ingest", False),
]


@pytest.mark.parametrize(("path", "root", "is_kinesis"), ROOTS)
async def test_the_kinesis_api_answers_at_the_prefix_with_and_without_a_slash(path, root, is_kinesis):
    async with open_gateway() as gateway:
        status, headers, body = await ask(gateway, "POST", path, root)
    if is_kinesis:
        assert (status, headers["content-type"]) == (400, "application/x-amz-json-1.1")
        assert b"UnknownOperationException" in body
    else:
        assert status == 404


@pytest.mark.parametrize(
    ("path", "root", "status"),
    [
        ("/ingest/livez", "/ingest", 200),
        ("/livez", "/ingest", 200),
        ("/livez/", "", 404),
        ("/ingestlivez", "/ingest", 404),
        ("/v1/streams", "/v1", 404),
    ],
)
async def test_other_paths_have_no_slash_at_their_end(path, root, status):
    async with open_gateway() as gateway:
        assert (await ask(gateway, "GET", path, root))[0] == status
