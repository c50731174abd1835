"""Classify: what an outcome means for the user records of one Kinesis record.

The decision is the table `TABLE`, read from top to bottom; the first row that
applies decides. Seed 001's rows (KPL, `retrier.cc`) come back with
`Config.kpl_compatible()`; where the default differs, it is because

- the KPL retries every error until the record expires, also those no retry can cure;
- the KPL decides a wrong shard for each user record, but a KCL consumer drops a whole
  aggregated record if one user record in it is outside the shard it was read from, so the
  user records reported successful are lost for it. A single record was routed by its hash key
  and is right by construction.
"""

import enum
from collections.abc import Callable
from typing import Final

import msgspec

from kpl_core.options.config import Config

THROTTLED: Final = "ProvisionedThroughputExceededException"
NO_STREAM: Final = "ResourceNotFoundException"
# Also the answer to a request that was signed before the machine was suspended, or before its clock was corrected.
_WRONG_SIGNATURE: Final = "InvalidSignatureException"

# The codes of a request that breaks a rule. The answer does not say which record breaks it.
_INVALID: Final = ("Validation", "InvalidArgument")


class Action(enum.Enum):
    """What to do with the user records of a Kinesis record."""

    FINISH = "report success"
    FAIL = "report failure"
    RETRY = "retry all of them"
    RETRY_OUTSIDE = "report success for those inside the shard's range, retry those outside"
    AWAIT_MAP = "decide when the shard map is refreshed"
    BISECT = "send the halves of the request apart"


class Case(msgspec.Struct, frozen=True, kw_only=True):
    """Everything the table asks about one Kinesis record's outcome."""

    error_code: str | None = None
    # Of an error: it was the answer to a whole request of more than one Kinesis record.
    request_of_many: bool = False
    # Of an error: the attempt before this one failed with the same code.
    repeated: bool = False
    # Of a success:
    aggregated: bool = False
    expected_shard: bool = True
    range_known: bool = True
    all_inside: bool = True
    # The shard map did not come in time; an unknown range counts as outside.
    waited: bool = False


class Row(msgspec.Struct, frozen=True):
    """One row: it applies, this is done, and whether the shard map is refreshed."""

    outcome: str
    applies: Callable[[Case, Config], bool]
    action: Action
    refresh: bool = False


TABLE: Final[tuple[Row, ...]] = (
    Row(
        "throttled, and the caller prefers to fail",
        lambda case, config: case.error_code == THROTTLED and config.fail_if_throttled,
        Action.FAIL,
    ),
    Row(
        "a whole request of many is invalid",
        lambda case, config: (
            case.request_of_many
            and case.error_code is not None
            and is_invalid(case.error_code)
            and not config.is_retryable(case.error_code)
        ),
        Action.BISECT,
    ),
    Row(
        "a signature that is refused for the first time",
        lambda case, _: case.error_code == _WRONG_SIGNATURE and not case.repeated,
        Action.RETRY,
    ),
    Row(
        "an error no retry can cure",
        lambda case, config: case.error_code is not None and not config.is_retryable(case.error_code),
        Action.FAIL,
    ),
    Row("any other error", lambda case, _: case.error_code is not None, Action.RETRY),
    Row("success where predicted, or without a prediction", lambda case, _: case.expected_shard, Action.FINISH),
    Row(
        "success on another shard, for consumers that do not look at ranges",
        lambda _, config: config.consumer == "range_blind",
        Action.FINISH,
        refresh=True,
    ),
    Row(
        "success of a single record on another shard",
        lambda case, config: not case.aggregated and config.consumer == "kcl",
        Action.FINISH,
        refresh=True,
    ),
    Row(
        "success on a shard whose range is not known yet",
        # In arrival order for any consumer: a record decided by the map must travel before records that the map moves.
        lambda case, config: (
            not case.range_known and not case.waited and (config.consumer == "kcl" or config.ordering == "per_key")
        ),
        Action.AWAIT_MAP,
        refresh=True,
    ),
    Row(
        "success on another shard, every user record inside its range",
        lambda case, _: case.range_known and case.all_inside,
        Action.FINISH,
        refresh=True,
    ),
    Row(
        "success on another shard, some user record outside its range, for a KCL",
        lambda _, config: config.consumer == "kcl",
        Action.RETRY,
        refresh=True,
    ),
    Row(
        "success on another shard, decided for each user record",
        lambda _, config: config.consumer == "per_user_record",
        Action.RETRY_OUTSIDE,
        refresh=True,
    ),
)


def classify(case: Case, config: Config) -> Row:
    """Return the first row of the table that applies."""
    return next(row for row in TABLE if row.applies(case, config))


def is_invalid(error_code: str) -> bool:
    """Return True if the code is that of a request that breaks a rule."""
    return error_code.startswith(_INVALID)
