"""The Glue encoder against moto's Glue: records are read back by the registry's own deserializer."""

from uuid import uuid4

import boto3
import pytest
from aws_schema_registry import KafkaDeserializer, Schema, SchemaRegistryClient
from aws_schema_registry.avro import AvroSchema
from aws_schema_registry.jsonschema import JsonSchema

from kpl_core import Topic, user_records
from kpl_integrations.glue import GlueEncoder
from tests.interop.emulators import Emulator
from tests.support.orders import ORDER, OrderStruct

FIELDS = '[{"name": "customer", "type": "string"}, {"name": "total", "type": "long"}]'
SCHEMAS = [
    AvroSchema('{"type": "record", "name": "Order", "fields": ' + FIELDS + "}"),
    JsonSchema('{"$schema": "http://json-schema.org/draft-07/schema#", "type": "object", "required": ["customer"]}'),
]


@pytest.fixture(scope="module")
def registry(moto: Emulator) -> SchemaRegistryClient:
    glue = boto3.client("glue", endpoint_url=moto.endpoint_url, region_name="us-east-1")
    name = f"orders-{uuid4().hex}"
    glue.create_registry(RegistryName=name)
    return SchemaRegistryClient(glue, registry_name=name)


@pytest.mark.parametrize("schema", SCHEMAS, ids=["avro", "json"])
def test_records_are_read_by_the_registrys_own_deserializer(registry: SchemaRegistryClient, schema: Schema) -> None:
    name = f"order-{uuid4().hex}"
    # The second encoder finds the schema that the first one registered.
    for _ in range(2):
        orders = Topic("orders", OrderStruct, partition_key=lambda _: "1", encoder=GlueEncoder(registry, schema, name))
        (received,) = user_records(orders.encode(OrderStruct(**ORDER)))
        read = KafkaDeserializer(registry).deserialize("orders", received.data)
        assert (read.data, read.schema) == (ORDER, schema)
