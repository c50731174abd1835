"""Tells the stream itself what was dropped, each drop once, for as long as anything can be sent."""

from collections import Counter
from collections.abc import Callable

from kpl_core import BufferFull, ProducerClosed
from kpl_integrations.logging_handler.entry_putter import EntryPutter

__all__ = ["DropNotices", "NoticeMaker"]

# Formats what was dropped since the last notice, by reason.
NoticeMaker = Callable[[dict[str, int]], bytes]


class DropNotices:
    """Compares what was dropped with what was told of it. `all_dropped` counts by reason, since the beginning."""

    def __init__(
        self,
        putter: EntryPutter,
        *,
        all_dropped: Callable[[], Counter[str]],
        make_notice: NoticeMaker,
        interval_seconds: float,
        now: float,
    ) -> None:
        self._putter = putter
        self._all_dropped = all_dropped
        self._make_notice = make_notice
        self._interval_seconds = interval_seconds
        self._told: Counter[str] = Counter()
        self._due_at = now + interval_seconds

    def tell_if_due(self, now: float) -> None:
        """Tell, once in each interval; where there was no room, try again at the next call."""
        if now >= self._due_at and self.tell():
            self._due_at = now + self._interval_seconds

    def tell(self) -> bool:
        """Put a notice of what was dropped since the last one; return False if there is no room for it."""
        dropped = self._all_dropped()
        # A notice that did not arrive has told nobody.
        self._told -= self._putter.special.take_untold()
        news = dropped - self._told
        if not news:
            return True
        try:
            delivery = self._putter.put_notice(self._make_notice(dict(news)))
        except (BufferFull, ProducerClosed):
            return False
        self._putter.special.add_notice(delivery, news)
        self._told = dropped
        return True
