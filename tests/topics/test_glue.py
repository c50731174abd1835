"""Records whose schemas are in the Glue Schema Registry, read back by the registry's own deserializer."""

import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any
from uuid import uuid4

import boto3
import pytest
from aws_schema_registry import KafkaDeserializer, SchemaRegistryClient, ValidationError
from aws_schema_registry.avro import AvroSchema
from aws_schema_registry.jsonschema import JsonSchema

from kpl_core import Topic
from kpl_integrations.glue import GlueEncoder
from tests.support.orders import KINDS, ORDER, OrderStruct

AVRO = AvroSchema(
    '{"type": "record", "name": "Order", "fields": [{"name": "customer", "type": "string"}, '
    '{"name": "total", "type": "long"}]}'
)
JSON = JsonSchema('{"type": "object", "required": ["customer"], "properties": {"total": {"maximum": 100}}}')


NOT_FOUND = {"schema": "Schema is not found.", "version": "Schema version is not found."}


class GlueStub:
    """The four calls of Glue that the client of the package makes, with the service's words."""

    def __init__(self) -> None:
        self.versions: dict[str, dict[str, Any]] = {}
        self.calls: list[str] = []

    def get_schema_by_definition(self, SchemaId: dict[str, str], SchemaDefinition: str) -> dict[str, Any]:  # noqa: N803
        self.calls.append("get_schema_by_definition")
        of_name = [each for each in self.versions.values() if each["SchemaArn"].endswith(SchemaId["SchemaName"])]
        if not of_name:
            raise LookupError(NOT_FOUND["schema"])
        found = [each for each in of_name if each["SchemaDefinition"] == SchemaDefinition]
        if not found:
            raise LookupError(NOT_FOUND["version"])
        return found[0]

    def create_schema(self, *, SchemaName: str, DataFormat: str, SchemaDefinition: str, **_: Any) -> dict[str, Any]:  # noqa: N803
        self.calls.append("create_schema")
        version: dict[str, Any] = {
            "SchemaVersionId": str(uuid4()),
            "SchemaDefinition": SchemaDefinition,
            "DataFormat": DataFormat,
            "SchemaArn": f"arn:aws:glue:us-east-1:1:schema/registry/{SchemaName}",
            "Status": "AVAILABLE",
            "VersionNumber": 1,
        }
        self.versions[version["SchemaVersionId"]] = version
        return version

    def register_schema_version(self, SchemaId: dict[str, str], SchemaDefinition: str) -> dict[str, Any]:  # noqa: N803
        self.calls.append("register_schema_version")
        known = next(iter(self.versions.values()))
        return self.create_schema(
            SchemaName=SchemaId["SchemaName"], DataFormat=known["DataFormat"], SchemaDefinition=SchemaDefinition
        )

    def get_schema_version(self, SchemaVersionId: str) -> dict[str, Any]:  # noqa: N803
        return self.versions[SchemaVersionId]


@pytest.mark.parametrize("has_compression", [False, True])
@pytest.mark.parametrize("schema", [AVRO, JSON], ids=["avro", "json"])
@pytest.mark.parametrize(("kind", "value"), KINDS)
def test_the_registrys_own_deserializer_reads_the_records(
    kind: Any, value: Any, schema: Any, *, has_compression: bool
) -> None:
    glue = GlueStub()
    client = SchemaRegistryClient(glue, registry_name="orders")
    encoder = GlueEncoder(client, schema, "order", has_compression=has_compression)
    orders: Topic[Any] = Topic("orders", kind, partition_key=lambda _: "1", encoder=encoder)
    records = [orders.record(value) for _ in range(3)]
    assert glue.calls == ["get_schema_by_definition", "create_schema"]
    for record in records:
        read = KafkaDeserializer(client).deserialize("orders", record.data)
        assert read.data == ORDER
        assert read.schema == schema


def test_a_second_version_of_a_schema_is_registered() -> None:
    client = SchemaRegistryClient(glue := GlueStub(), registry_name="orders")
    GlueEncoder(client, AVRO, "order")
    GlueEncoder(client, AVRO, "order")
    GlueEncoder(client, JSON, "order")
    assert glue.calls.count("create_schema") == 2
    assert glue.calls.count("register_schema_version") == 1


def test_a_value_that_does_not_fit_the_schema_is_rejected() -> None:
    encoder = GlueEncoder(SchemaRegistryClient(GlueStub()), JSON, "order")
    with pytest.raises(ValidationError, match="must be smaller than or equal to 100"):
        encoder(OrderStruct("c-1", 101))


def test_the_program_on_the_page_encodes_by_the_registry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = (Path(__file__).parents[2] / "docs" / "howto" / "topics.md").read_text(encoding="utf-8")
    (code,) = re.findall(r"^```py\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    glue = GlueStub()
    monkeypatch.setattr(boto3, "client", lambda name: {"glue": glue}[name])
    monkeypatch.chdir(tmp_path)
    (tmp_path / "order.avsc").write_text(str(AVRO))
    names: dict[str, Any] = {"__name__": "page"}
    monkeypatch.setitem(sys.modules, "page", ModuleType("page"))
    exec(compile(code, "topics.md", "exec"), names)  # noqa: S102 - our own documentation
    record = names["orders"].record(names["Order"](**ORDER))
    assert KafkaDeserializer(SchemaRegistryClient(glue)).deserialize("orders", record.data).data == ORDER
