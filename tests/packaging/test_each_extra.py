"""Each extra alone, in a clean environment outside the checkout: installed, imported and used."""

import tomllib
from pathlib import Path

import pytest

from tests.packaging.environment import Environment

EXTRAS = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text(encoding="utf-8"))["project"][
    "optional-dependencies"
]

# The first program of a user of that extra alone; "" is the distribution without extras.
SMOKE = {
    "": """
import anyio
from kpl_core import Producer
from kpl_core.testing import FakeKinesis
from kpl_core.testing.fake_transport import FakeTransport

async def main():
    async with Producer(transport=FakeTransport(FakeKinesis({"orders": 1}))) as producer:
        assert (await (await producer.put("orders", partition_key="42", data=b"..."))).successful

anyio.run(main)
import logging
import kpl_integrations.asgi
from kpl_integrations.logging_handler import KinesisHandler
logging.getLogger().addHandler(KinesisHandler("logs", region="us-east-1"))
""",
    "fastapi": """
from fastapi import FastAPI
from kpl_core import Config
from kpl_integrations.fastapi import KinesisRouter
FastAPI().include_router(KinesisRouter(Config(region="us-east-1")))
""",
    "ingest": """
from kpl_integrations.ingest import IngestGateway, load_settings
from kpl_integrations.ingest.tenants import OpenTenants, Tenant
IngestGateway(load_settings(region="us-east-1"), OpenTenants(Tenant(id="local")))
""",
    "otel": """
from kpl_integrations.otel import KinesisSpanExporter
""",
    "otel-json": """
from kpl_integrations.otel import KinesisSpanExporter
import opentelemetry.exporter.otlp.json.common
""",
    "prometheus": """
from kpl_integrations.metrics.prometheus import PrometheusMetrics
assert b"kinesis_producer" in PrometheusMetrics().exposition()[0]
""",
    "redis": """
import anyio
from kpl_core.coordination.stores import open_store

async def main():
    store = await open_store("redis://127.0.0.1:1?group=orders")
    assert type(store).__name__ == "RedisStore"
    await store.aclose()

anyio.run(main)
""",
    "boto3": """
import boto3
import kpl_core.transport.aiobotocore_transport
boto3.client("kinesis", region_name="us-east-1")
""",
    "glue": """
from aws_schema_registry.avro import AvroSchema
from kpl_integrations.glue import GlueEncoder
""",
    "zstd": """
from kpl_core import Compressed, Topic
from kpl_core.records.topic import decompressed
texts = Topic("texts", str, partition_key=lambda text: "1", encoder=Compressed("json", "zstd"))
assert decompressed(texts.encode("text")) == b"text"
""",
    "cli": """
from kpl_integrations.cli import main
import sys
sys.argv = ["kpl", "--help"]
try:
    main()
except SystemExit as ended:
    assert not ended.code
""",
    "local": """
from kpl_integrations.local_kinesis import LocalKinesis, ThreadedLocalKinesis
with ThreadedLocalKinesis(LocalKinesis({"orders": 1})) as kinesis:
    print(kinesis.endpoint_url)
""",
    "cbor": """
from kpl_core import Config
Config(wire_path="cbor")
""",
    "all": """
import kpl_core, kpl_integrations.fastapi, kpl_integrations.local_kinesis, kpl_integrations.logging_handler
""",
}
OPTIONAL = {
    "fastapi",
    "starlette",
    "uvicorn",
    "orjson",
    "pydantic",
    "opentelemetry",
    "prometheus_client",
    "redis",
    "typer",
    "rich",
    "zstandard",
    "aws_schema_registry",
    "boto3",
}


def test_every_extra_has_a_program() -> None:
    assert set(SMOKE) - {""} == set(EXTRAS)


def test_all_means_all() -> None:
    (everything,) = EXTRAS["all"]
    names = everything.partition("[")[2].rstrip("]").split(",")
    assert names == sorted(set(EXTRAS) - {"all"})


@pytest.mark.timeout(300)
@pytest.mark.parametrize("extra", SMOKE, ids=lambda extra: extra or "none")
def test_an_extra_works_alone(extra: str, wheel: Path, tmp_path: Path) -> None:
    environment = Environment(tmp_path)
    environment.install(f"{wheel}[{extra}]" if extra else str(wheel))
    environment.pip("check")
    (tmp_path / "smoke.py").write_text(SMOKE[extra], encoding="utf-8")
    environment.run("-W", "error", "smoke.py")
    if not extra:
        # kpl_core installs no optional package and needs none.
        assert environment.modules_after("import kpl_core") & OPTIONAL == set()


@pytest.mark.timeout(300)
def test_the_sdist_builds_the_same_package(sdist: Path, tmp_path: Path) -> None:
    environment = Environment(tmp_path)
    environment.install(str(sdist))
    (tmp_path / "smoke.py").write_text(SMOKE[""], encoding="utf-8")
    environment.run("-W", "error", "smoke.py")
