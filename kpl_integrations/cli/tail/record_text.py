"""A user record that was read, as one line: for a person, or as JSON."""

from base64 import b64encode
from datetime import UTC
from typing import Any

import msgspec
from rich.text import Text

from kpl_integrations.cli.tail.consumer_view import ReadRecord

__all__ = ["as_json", "as_text", "harmless"]


def as_json(record: ReadRecord) -> str:
    """Return one JSON object. Data that is no UTF-8 stands in `data_base64` instead of `data`."""
    members: dict[str, Any] = {
        "shard": record.shard_id,
        "sequence_number": record.sequence_number,
        "subsequence": record.subsequence,
        "partition_key": record.partition_key,
        "explicit_hash_key": record.explicit_hash_key,
        "arrival": record.arrived_at.astimezone(UTC).isoformat(timespec="milliseconds"),
    }
    try:
        members["data"] = record.data.decode()
    except UnicodeDecodeError:
        members["data_base64"] = b64encode(record.data).decode()
    return msgspec.json.encode(members).decode()


def as_text(record: ReadRecord) -> Text:
    """Return arrival (UTC), shard, partition key and data. Nothing in it can steer a terminal."""
    return Text.assemble(
        (f"{record.arrived_at.astimezone(UTC):%H:%M:%S.%f}"[:-3], "dim"),
        "  ",
        (f"shard {record.shard_id.removeprefix('shardId-').lstrip('0') or '0'}", "cyan"),
        "  ",
        (harmless(record.partition_key), "bold"),
        "  ",
        _data(record.data),
    )


def _data(data: bytes) -> Text:
    try:
        return Text(harmless(data.decode()))
    except UnicodeDecodeError:
        return Text.assemble((f"{len(data):,} bytes, base64 ", "dim"), b64encode(data).decode())


def harmless(text: str) -> str:
    """Return one line of text that cannot steer a terminal."""
    if text.isprintable():
        return text
    return "".join(
        character if character.isprintable() else character.encode("unicode_escape").decode() for character in text
    )
