"""What `put_many` takes, checked whole before any of it is put."""

from collections.abc import Iterable
from typing import Any

from kpl_core.errors import InvalidUserRecord
from kpl_core.pipeline.open_record import plain_until
from kpl_core.records.user_record import (
    BytesLike,
    UserRecord,
    as_bytes,
    check_user_record,
    encode_partition_key,
    require_size,
    with_bytes,
)

Puttable = tuple[str, bytes] | UserRecord


def checked_records(records: Iterable[tuple[str, BytesLike] | UserRecord], *, max_record_bytes: int) -> list[Puttable]:
    """Return the records as a list, all of which a put would accept, with bytes of their own as data.

    Some wait for room, and the caller may fill its bytearray again before they are accepted.

    Raises:
        TypeError, InvalidUserRecord: one would not; the message begins with its index.
    """
    if not isinstance(records, Iterable):
        message = f"records must be an iterable of pairs or of UserRecords, not {type(records).__name__}"
        raise TypeError(message)
    # Compiled code checks what is annotated, in its own words; these are to be ours.
    checked: list[Any] = list(records)
    # What nearly all are, a pair of an ASCII key and bytes, is seen without encoding the key.
    index = plain_until(checked, 0, max_record_bytes)
    while index < len(checked):
        try:
            checked[index] = _checked(checked[index], max_record_bytes)
        except (TypeError, InvalidUserRecord) as error:
            message = f"records[{index}]: {error}"
            raise type(error)(message) from error
        index = plain_until(checked, index + 1, max_record_bytes)
    return checked


def _checked(record: object, max_record_bytes: int) -> Puttable:
    if isinstance(record, UserRecord):
        check_user_record(record, max_record_bytes=max_record_bytes)
        return with_bytes(record)
    if isinstance(record, tuple) and len(record) == 2:  # noqa: PLR2004 - a pair
        key, data = record
        as_they_are = as_bytes(data)
        require_size(len(encode_partition_key(key)), len(as_they_are), max_record_bytes=max_record_bytes)
        return key, as_they_are
    kind = f"a tuple of {len(record)}" if isinstance(record, tuple) else type(record).__name__
    message = f"it must be a (partition_key, data) pair or a UserRecord, not {kind}"
    raise TypeError(message)
