"""During a fork the senders stand still; after it the child begins anew: what was exported is the parent's to send."""

import os
import weakref
from collections.abc import Callable
from typing import Final, Protocol

__all__ = ["begin_anew_in_children", "inherit"]


# A sender stands still within milliseconds, but for the one step that makes its client: tenths of a second of CPU,
# which on a busy machine is seconds. A child that was forked in that step could not make one.
_PARK_SECONDS: Final = 30.0


class _Forkable(Protocol):
    def park(self, timeout: float) -> Callable[[], object]:
        """Stand still; return what ends that."""

    def begin_anew(self) -> None:
        """Start empty, without the threads that the parent has."""


_exporters: "weakref.WeakSet[_Forkable]" = weakref.WeakSet()
_inherited: Final[list[object]] = []
_parked: Final[list[Callable[[], object]]] = []


def begin_anew_in_children(exporter: _Forkable) -> None:
    """Take part in forks."""
    _exporters.add(exporter)


def inherit(sender: object) -> None:
    """Keep a parent's sender for ever: its sockets and its selector are the parent's too, so nobody may close them."""
    _inherited.append(sender)


def _park() -> None:
    _parked.extend([exporter.park(_PARK_SECONDS) for exporter in list(_exporters)])


def _go_on() -> None:
    while _parked:
        _parked.pop()()


def _begin_anew() -> None:
    _parked.clear()
    for exporter in list(_exporters):
        exporter.begin_anew()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_park, after_in_parent=_go_on, after_in_child=_begin_anew)
