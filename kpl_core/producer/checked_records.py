"""What a put of many user records takes, checked whole before any of it is put."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, cast

from msgspec import structs

from kpl_core.errors import InvalidUserRecord
from kpl_core.pipeline.open_record import PAIR, plain_until
from kpl_core.records.hash_key import are_explicit_hash_keys, parse_explicit_hash_key
from kpl_core.records.user_record import (
    BytesLike,
    Tier,
    UserRecord,
    as_bytes,
    check_user_record,
    encode_partition_key,
    require_size,
    with_bytes,
)

Puttable = tuple[str, bytes] | UserRecord
# Partition key and data of user records, without a flow of their own; all or none with an explicit hash key.
Pairs = Sequence[tuple[str, bytes]] | Sequence[tuple[str, bytes, str]]


def checked_records(
    records: Iterable[tuple[str, BytesLike] | UserRecord], *, max_record_bytes: int
) -> tuple[list[Puttable], int]:
    """Return the records as a list, all of which a put would accept, with bytes of their own as data; and their bytes.

    Some wait for room, and the caller may fill its bytearray again before they are accepted.

    Raises:
        TypeError, InvalidUserRecord: one would not; the message begins with its index.
    """
    if not isinstance(records, Iterable):
        message = f"records must be an iterable of pairs or of UserRecords, not {type(records).__name__}"
        raise TypeError(message)
    checked: list[Any] = list(records)
    if checked and type(checked[0]) is UserRecord:
        checked = [_as_pair(record) for record in checked]
    # What nearly all are, a pair of an ASCII key and bytes, is seen without encoding the key.
    index, size_bytes = plain_until(checked, 0, PAIR, max_record_bytes)
    while index < len(checked):
        try:
            checked[index], record_bytes = _checked(checked[index], max_record_bytes)
        except (TypeError, InvalidUserRecord) as error:
            message = f"records[{index}]: {error}"
            raise type(error)(message) from error
        index, rest_bytes = plain_until(checked, index + 1, PAIR, max_record_bytes)
        size_bytes += record_bytes + rest_bytes
    return checked, size_bytes


def _as_pair(record: Any) -> Any:  # noqa: ANN401 - whatever a caller gave
    """Return a user record of key and data as a pair, which is put together with others; anything else as it is."""
    if type(record) is not UserRecord:
        return record
    key, data, explicit_hash_key, flow, tier, metadata = structs.astuple(record)
    is_plain = explicit_hash_key is None and flow is None and metadata is None and tier == "normal"
    return (key, data) if is_plain else record


def _checked(record: object, max_record_bytes: int) -> tuple[Puttable, int]:
    if isinstance(record, UserRecord):
        size_bytes = check_user_record(record, max_record_bytes=max_record_bytes)
        return _as_pair(with_bytes(record)), size_bytes
    if isinstance(record, tuple) and len(record) == PAIR:
        pair = record[0], as_bytes(record[1])
        return pair, checked_size(pair, max_record_bytes)
    kind = f"a tuple of {len(record)}" if isinstance(record, tuple) else type(record).__name__
    message = f"it must be a (partition_key, data) pair or a UserRecord, not {kind}"
    raise TypeError(message)


def checked_size(record: Puttable, max_record_bytes: int) -> int:
    """Return the bytes of key and data of what a put would accept; its data are bytes already.

    Raises:
        TypeError, InvalidUserRecord: a put would not accept it.
    """
    if not isinstance(record, tuple):
        return check_user_record(record, max_record_bytes=max_record_bytes)
    key, data = record
    key_bytes = len(encode_partition_key(key))
    require_size(key_bytes, len(data), max_record_bytes=max_record_bytes)
    return key_bytes + len(data)


def puttable(
    partition_key: str,
    data: BytesLike,
    explicit_hash_key: str | None = None,
    flow: str | None = None,
    tier: Tier = "normal",
    metadata: Mapping[str, Any] | None = None,
) -> Puttable:
    """Return the arguments of a put as a pair if there are no others, else as a user record; with bytes of their own.

    Raises:
        TypeError: the data are not bytes-like.
    """
    data = data if type(data) is bytes else as_bytes(data)
    if explicit_hash_key is None and flow is None and metadata is None and tier == "normal":
        return partition_key, data
    return UserRecord(partition_key, data, explicit_hash_key, flow, tier, metadata)


def as_user_record(record: Puttable) -> UserRecord:
    """Return a pair of partition key and data as a user record."""
    return record if isinstance(record, UserRecord) else UserRecord(*record)


def checked_pairs(pairs: Pairs, *, max_record_bytes: int) -> tuple[list[Any], int]:
    """Return pairs of partition key and data as a list, and the bytes of all keys and data.

    All of them may have an explicit hash key as a third item.

    Raises:
        TypeError, InvalidUserRecord: not all are alike, or a put would not accept one.
    """
    checked: list[Any] = pairs if type(pairs) is list else list(pairs)
    parts = PAIR + 1 if checked and len(checked[0]) > PAIR else PAIR
    index, size_bytes = plain_until(checked, 0, parts, max_record_bytes)
    if index < len(checked):
        _require_alike(checked)
        checked = checked.copy()
    while index < len(checked):
        try:
            checked[index], pair_bytes = _checked_pair(*checked[index], max_record_bytes=max_record_bytes)
        except (TypeError, InvalidUserRecord) as error:
            message = f"records[{index}]: {error}"
            raise type(error)(message) from error
        index, rest_bytes = plain_until(checked, index + 1, parts, max_record_bytes)
        size_bytes += pair_bytes + rest_bytes
    return checked, size_bytes


def _checked_pair(key: Any, data: Any, *explicit: Any, max_record_bytes: int) -> tuple[Any, int]:  # noqa: ANN401
    own = as_bytes(data)
    key_bytes = len(encode_partition_key(key))
    require_size(key_bytes, len(own), max_record_bytes=max_record_bytes)
    for each in explicit:
        parse_explicit_hash_key(each)
    return (key, own, *explicit), key_bytes + len(own)


def checked_run(records: Sequence[UserRecord] | Pairs, *, max_record_bytes: int) -> tuple[list[Any], int]:
    """Return user records, or pairs of `Pairs`, as pairs and triples, and the bytes of all keys and data.

    Raises:
        TypeError, InvalidUserRecord: as a put; the message begins with the index.
    """
    if not records or not isinstance(records[0], UserRecord):
        return checked_pairs(cast("Pairs", records), max_record_bytes=max_record_bytes)
    run, size_bytes = checked_pairs(
        [(record.partition_key, record.data) for record in cast("Sequence[UserRecord]", records)],
        max_record_bytes=max_record_bytes,
    )
    hash_keys = [record.explicit_hash_key for record in cast("Sequence[UserRecord]", records)]
    given = [each for each in hash_keys if each is not None]
    if not given:
        return run, size_bytes
    if not ({*map(type, given)} == {str} and are_explicit_hash_keys(given)):
        for index, each in enumerate(hash_keys):
            if each is not None:
                _require_hash_key(each, index)
    return [pair if each is None else (*pair, each) for pair, each in zip(run, hash_keys, strict=True)], size_bytes


def _require_alike(pairs: list[Any]) -> None:
    """Raise TypeError if not all tuples have two items, or not all of them three."""
    parts = len(pairs[0])
    for index, pair in enumerate(pairs):
        if len(pair) != parts or parts not in (PAIR, PAIR + 1):
            message = (
                f"records[{index}] has {len(pair)} items and records[0] has {parts}; give partition key and data, "
                "and an explicit hash key with all of them or with none"
            )
            raise TypeError(message)


def _require_hash_key(explicit_hash_key: object, index: int) -> None:
    try:
        parse_explicit_hash_key(explicit_hash_key)
    except (TypeError, InvalidUserRecord) as error:
        message = f"records[{index}]: {error}"
        raise type(error)(message) from error
