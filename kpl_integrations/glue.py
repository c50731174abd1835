"""An encoder for topics whose schemas are in the AWS Glue Schema Registry; needs the extra `glue`.

registry = SchemaRegistryClient(boto3.client("glue"), registry_name="orders")
orders = Topic("orders", Order, partition_key=..., encoder=GlueEncoder(registry, AvroSchema(text), "order"))

The data is what the KPL's `addUserRecord` with a schema sends, and what the registry's deserializers for Java and
Python read: a version byte, a compression byte, the UUID of the schema's version, and the encoded value.
"""

from datetime import date, datetime, time
from decimal import Decimal
from functools import partial
from typing import Final
from uuid import UUID

import msgspec
from aws_schema_registry import Schema, SchemaRegistryClient
from aws_schema_registry.codec import encode
from aws_schema_registry.schema import CompatibilityMode

from kpl_core.records.topic import plain_value

# fastavro encodes these itself, as Avro's logical types.
_AVRO_TYPES: Final = (bytes, bytearray, date, datetime, time, Decimal, UUID)


class GlueEncoder:
    """Encodes values by a schema, of class `AvroSchema` or `JsonSchema` of the package aws_schema_registry.

    The constructor gets the schema's version from the registry, and registers it if it is new. These calls block, so
    make the encoder when the program starts. Encoding makes no call.

    Args:
        client: the client of one registry.
        schema: the schema of the values.
        name: the name of the schema in the registry; the KPL and Kafka's serializers use the name of the stream.
        compatibility_mode: for a schema that does not exist yet.
        has_compression: compresses the values with zlib, which the deserializers undo.

    Raises:
        SchemaRegistryException: the registry refuses the schema, or does not answer.
    """

    def __init__(
        self,
        client: SchemaRegistryClient,
        schema: Schema,
        name: str,
        *,
        compatibility_mode: CompatibilityMode = "BACKWARD",
        has_compression: bool = False,
    ) -> None:
        version = client.get_or_register_schema_version(
            definition=str(schema),
            schema_name=name,
            data_format=schema.data_format,
            compatibility_mode=compatibility_mode,
        )
        self._schema = schema
        self._version_id: UUID = version.version_id
        self._has_compression = has_compression
        is_avro = schema.data_format == "AVRO"
        self._own_types = _AVRO_TYPES if is_avro else ()
        self._plain_value = partial(plain_value, mode="python" if is_avro else "json")

    def __call__(self, value: object) -> bytes:
        """Return the encoded value.

        Raises:
            Exception: the value does not fit the schema; the error is the schema's own.
        """
        plain = msgspec.to_builtins(value, builtin_types=self._own_types, enc_hook=self._plain_value)
        encoded: bytes = encode(self._schema.write(plain), self._version_id, self._has_compression)
        return encoded
