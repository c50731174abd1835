"""The last question about a record: would Kinesis ever take it, and if not, because of which field."""

from kpl_core import InvalidUserRecord, UserRecord
from kpl_core.records.hash_key import parse_explicit_hash_key
from kpl_core.records.user_record import encode_partition_key, require_size
from kpl_integrations.ingest.decoding.decoded import DecodeLimits, RecordProblem

__all__ = ["checked_record"]


def checked_record(
    record: UserRecord, index: int, limits: DecodeLimits, *, key_field: str = "partition_key"
) -> UserRecord | RecordProblem:
    """Return `record`, or what is wrong with it; `key_field` is what the client calls its partition key."""
    field = key_field
    try:
        key = encode_partition_key(record.partition_key)
        if record.explicit_hash_key is not None:
            field = "explicit_hash_key"
            parse_explicit_hash_key(record.explicit_hash_key)
        field = "data"
        require_size(len(key), len(record.data), max_record_bytes=limits.max_record_bytes)
    except InvalidUserRecord as error:
        return RecordProblem(index, field, str(error))
    return record
