"""Which partition key a log record gets; None leaves it to chance, when the record is sent."""

import logging
import secrets
from collections.abc import Callable, Iterator
from itertools import cycle
from typing import Final

from kpl_core import ConfigError
from kpl_core.options.kinesis_limits import PARTITION_KEY_CHARACTERS
from kpl_integrations.logging_handler.trace_context import current_trace

__all__ = ["KeyChoice", "KeyOf", "key_chooser", "random_keys"]

KeyOf = Callable[[logging.LogRecord], str | None]
KeyChoice = str | KeyOf

# Enough to reach all of some hundred shards alike, and few enough that each is hashed once.
_RANDOM_KEYS: Final = 1_024
_EXTRA: Final = "extra:"


def key_chooser(choice: KeyChoice | None) -> KeyOf | None:
    """Return what gives a record its key, None where chance does.

    Raises:
        ConfigError: the choice is an unknown word, or None, which a file without a value gives.
    """
    if callable(choice):
        return choice
    if choice == "random":
        return None
    if choice == "logger":
        return lambda record: record.name
    if choice == "trace_id":
        return _trace_id
    if choice is not None and choice.startswith(_EXTRA) and len(choice) > len(_EXTRA):
        field = choice.removeprefix(_EXTRA)
        return lambda record: _text(getattr(record, field, None))
    message = (
        f"partition_key is {choice!r}; it must be 'random', 'logger', 'trace_id', 'extra:<field>' or a function "
        f"of the log record"
    )
    raise ConfigError(message)


def key_of(choose: KeyOf, record: logging.LogRecord) -> str | None:
    """Return a key that Kinesis takes, None where there is none."""
    key = choose(record)
    if not key:
        return None
    return key[:PARTITION_KEY_CHARACTERS].encode(errors="replace").decode()


def random_keys() -> Iterator[str]:
    """Return an endless round of keys."""
    return cycle([secrets.token_hex(8) for _ in range(_RANDOM_KEYS)])


def _trace_id(_record: logging.LogRecord) -> str | None:
    trace = current_trace()
    return None if trace is None else trace[0]


def _text(value: object) -> str | None:
    return None if value is None else str(value)
