"""What the service checks about the records of one request, before any of them is stored.

Wording as the service gives it: the constraints as ValidationException, a hash key out of range
and a request too large as InvalidArgumentException.
"""

from collections.abc import Sequence
from typing import Final

from kpl_core.options.kinesis_limits import MAX_HASH_KEY, MIB, PARTITION_KEY_CHARACTERS
from kpl_core.records.hash_key import hash_key_digest, hash_key_to_digest
from kpl_core.testing.kinesis_error import INVALID_ARGUMENT, SERIALIZATION, KinesisError, constraint_violated
from kpl_core.testing.service_limits import ServiceLimits

__all__ = ["HASH_KEY_PATTERN", "PutRecord", "route_records"]

# partition key, explicit hash key or None, data
PutRecord = tuple[str, str | None, bytes]

HASH_KEY_PATTERN: Final = r"0|([1-9]\d{0,38})"
_HASH_KEY_DIGITS: Final = 39


def route_records(
    records: Sequence[PutRecord], limits: ServiceLimits, *, max_record_bytes: int, single: bool = False
) -> list[tuple[bytes, int]]:
    """Return the hash key (16 bytes) and the size (key and data, bytes) of each record.

    `single` spells the members as PutRecord does.

    Raises:
        KinesisError: one of them, or all together, can never be stored.
    """
    count = len(records)
    if not 1 <= count <= limits.records_per_request:
        bound = "greater than or equal to 1" if not count else f"less than or equal to {limits.records_per_request}"
        constraint = f"Member must have length {bound}"
        raise constraint_violated(path="records", constraint=constraint, value=None if count else "[]")
    routed: list[tuple[bytes, int]] = []
    total = 0
    for partition_key, explicit_hash_key, data in records:
        try:
            encoded = partition_key.encode()
        except UnicodeEncodeError as error:
            message = f"PartitionKey is not valid Unicode: {error.reason}"
            raise KinesisError(SERIALIZATION, message) from None
        size = len(encoded) + len(data)
        if not 0 < len(partition_key) <= PARTITION_KEY_CHARACTERS or size > max_record_bytes:
            path = "" if single else f"records.{len(routed) + 1}.member."
            raise _refused(path, partition_key, max_record_bytes)
        if explicit_hash_key is None:
            digest = hash_key_digest(encoded)
        else:
            digest = _explicit_digest(explicit_hash_key, "" if single else f"records.{len(routed) + 1}.member.")
        total += size
        routed.append((digest, size))
    if total > limits.request_bytes:
        raise KinesisError(INVALID_ARGUMENT, f"Records size exceeds {limits.request_bytes // MIB} MB limit")
    return routed


def _refused(path: str, partition_key: str, max_record_bytes: int) -> KinesisError:
    if not partition_key:
        bound = "Member must have length greater than or equal to 1"
        return constraint_violated(path=f"{path}partitionKey", constraint=bound, value="")
    if len(partition_key) > PARTITION_KEY_CHARACTERS:
        bound = f"Member must have length less than or equal to {PARTITION_KEY_CHARACTERS}"
        return constraint_violated(path=f"{path}partitionKey", constraint=bound, value=partition_key)
    # The service counts the key too, and still names the data.
    bound = f"Member must have length less than or equal to {max_record_bytes}"
    return constraint_violated(path=f"{path}data", constraint=bound)


def _explicit_digest(explicit_hash_key: str, path: str) -> bytes:
    # As the pattern says, at a third of its cost.
    digits = explicit_hash_key.isascii() and explicit_hash_key.isdigit() and len(explicit_hash_key) <= _HASH_KEY_DIGITS
    if not digits or (explicit_hash_key[0] == "0" and len(explicit_hash_key) > 1):
        bound = f"Member must satisfy regular expression pattern: {HASH_KEY_PATTERN}"
        raise constraint_violated(path=f"{path}explicitHashKey", constraint=bound, value=explicit_hash_key)
    hash_key = int(explicit_hash_key)
    if hash_key > MAX_HASH_KEY:
        message = (
            f"Invalid ExplicitHashKey. ExplicitHashKey must be in the range: [0, 2^128-1]. "
            f"Specified value was {explicit_hash_key}"
        )
        raise KinesisError(INVALID_ARGUMENT, message)
    return hash_key_to_digest(hash_key)
