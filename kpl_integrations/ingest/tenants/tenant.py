"""A tenant: its share of the capacity, its rates, and the streams it may write to."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from fnmatch import translate
from functools import lru_cache
from types import MappingProxyType
from typing import Final, Literal, get_args

from kpl_core import ConfigError
from kpl_core.options.policy import require_weight
from kpl_core.options.validation import Bound, require_number
from kpl_core.records.user_record import TIERS, Tier

Ack = Literal["queued", "spooled", "delivered"]
ACKS: Final[tuple[Ack, ...]] = get_args(Ack)
Signal = Literal["logs", "traces", "metrics"]
SIGNALS: Final[tuple[Signal, ...]] = get_args(Signal)

# The id is used as a flow, a metric label and in log lines, so it has no characters that need escaping.
_ID: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.:-]{0,127}")
_ALL: Final = ("*",)
# What `credentials.new_api_key` returns.
_API_KEY: Final = re.compile(r"kpl_[A-Za-z0-9_-]{40,}")
_LONGEST_SHOWN: Final = 24
# A quota, rate x burst, is a number of at most 15 digits in the RateLimit header fields (RFC 9651, section 3.3.1).
_BOUNDS: Final = {
    "records_per_second": Bound(1e-3, 1e9, "records a second", optional=True),
    "bytes_per_second": Bound(1.0, 1e11, "bytes a second", optional=True),
    "burst_seconds": Bound(1e-3, 3_600.0, "seconds of both rates"),
}


def shown(value: str, quoted: str | None = None) -> str:
    """Return a value in quotes for an error message; only its length if it may be a key pasted at the wrong place."""
    if len(value) > _LONGEST_SHOWN or value.startswith("kpl_"):
        return f"a value of {len(value)} characters, which may be a key"
    return repr(value) if quoted is None else quoted


@dataclass(frozen=True, slots=True, kw_only=True)
class Tenant:
    """One tenant's settings. It contains no secret; the directory has the credentials.

    Args:
        id: the name of its flow.
        weight: its share relative to other tenants where they compete.
        tier: "critical" records are evicted last, "bulk" records first.
        records_per_second, bytes_per_second: its rates; None is unlimited. Bytes count data and partition key.
        burst_seconds: how many seconds of its rates it may use at once after a pause.
        streams: globs of the streams it may write to; a glob for ARNs begins with "arn:".
        default_ack: the acknowledgement of requests that do not choose one.
        aggregation: whether its user records may share a Kinesis record.
        trace_records: whether its records carry the trace of their request, if they are JSON objects or CloudEvents.
        otlp_streams: the streams of its logs, traces and metrics, instead of the gateway's.

    Raises:
        ConfigError: a value is out of its range.
    """

    id: str
    weight: float = 1.0
    tier: Tier = "normal"
    records_per_second: float | None = None
    bytes_per_second: float | None = None
    burst_seconds: float = 1.0
    streams: tuple[str, ...] = _ALL
    default_ack: Ack = "queued"
    aggregation: bool = True
    trace_records: bool = False
    otlp_streams: Mapping[Signal, str] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        if _ID.fullmatch(self.id) is None or _API_KEY.fullmatch(self.id) is not None:
            message = (
                f"tenant id is {shown(self.id)}; it must be 1 to 128 ASCII letters, digits and _.:- after a letter or "
                f"digit, and no API key"
            )
            raise ConfigError(message)
        require_weight(f"weight of tenant {self.id}", self.weight)
        self._require_word("tier", self.tier, TIERS)
        self._require_word("ack", self.default_ack, ACKS)
        for name, bound in _BOUNDS.items():
            require_number(f"{name} of tenant {self.id}", getattr(self, name), bound)
        for signal in self.otlp_streams:
            self._require_word("otlp signal", signal, SIGNALS)
        object.__setattr__(self, "otlp_streams", MappingProxyType(dict(self.otlp_streams)))

    def _require_word(self, name: str, value: str, words: tuple[str, ...]) -> None:
        if value not in words:
            message = f"{name} of tenant {self.id} is {shown(value)}; it must be one of {', '.join(words)}"
            raise ConfigError(message)

    def allows(self, stream: str) -> bool:
        """Return True if it may write to `stream`, a name or an ARN; "*" allows every name, "arn:*" every ARN."""
        if self.streams == _ALL and not stream.startswith("arn:"):
            return True
        return _matches(self.streams, stream)


@lru_cache(maxsize=4096)
def _matches(globs: tuple[str, ...], stream: str) -> bool:
    is_arn = stream.startswith("arn:")
    return any(glob.startswith("arn:") == is_arn and _pattern(glob).fullmatch(stream) is not None for glob in globs)


@lru_cache(maxsize=4096)
def _pattern(glob: str) -> re.Pattern[str]:
    return re.compile(translate(glob))


# All clients without credentials together are this tenant.
UNKNOWN_TENANT: Final = Tenant(id="unknown")
