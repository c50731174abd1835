"""Where a user record goes that could not be delivered: a table, in the order of preference.

The spool takes what time will cure, the dead letters what a person must look at, and bulk that was
refused: to replay at once what was shed because there was too much of it would shed it again. What
came from the spool or from the dead letters is there still, and stays. What its caller still has is
the caller's to put again: kept here too, it would arrive twice.
"""

from typing import Final

import msgspec

from kpl_core.options.config import Config
from kpl_core.records.outcome import Origin
from kpl_core.records.record_result import INCURABLE, Place, Reason
from kpl_core.records.user_record import Tier

__all__ = ["KeepingRules", "keeping_rules", "places_of"]

_SHED: Final[frozenset[Reason]] = frozenset({"rate_limited", "breaker_open"})


class KeepingRules(msgspec.Struct, frozen=True, kw_only=True):
    """What there is to keep user records in."""

    spool: bool = False
    dead_letters: bool = False
    # User records enter the spool before anything else happens to them.
    write_ahead: bool = False


def keeping_rules(config: Config) -> KeepingRules:
    """Return what a producer with this configuration keeps user records in."""
    return KeepingRules(
        spool=config.spool is not None,
        dead_letters=config.dead_letters is not None,
        write_ahead=config.spool is not None and config.spool.mode == "write_ahead",
    )


def places_of(reason: Reason, origin: Origin | None, tier: Tier, rules: KeepingRules) -> tuple[Place, ...]:
    """Return where to keep a failed user record: the first choice, then others; none: it has failed."""
    match origin:
        case "write_ahead":
            # The replay will say whether it can be delivered at all.
            return ("spooled",)
        case "replay":
            return ("dead_lettered",) if reason in INCURABLE else ("spooled",)
        case "redrive":
            return ("dead_lettered",)
        case "caller":
            return ()
    spool: tuple[Place, ...] = ("spooled",) if rules.spool else ()
    letters: tuple[Place, ...] = ("dead_lettered",) if rules.dead_letters else ()
    if reason in INCURABLE:
        return letters
    return letters + spool if tier == "bulk" and reason in _SHED else spool + letters
