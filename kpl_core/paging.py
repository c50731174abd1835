"""The bound on a listing that a service returns in pages, because a faulty endpoint may return pages forever."""

from typing import Final

# A million shards or objects, in full pages. The largest streams of Kinesis have tens of thousands of shards.
MAX_PAGES: Final = 1_000


class EndlessListingError(OSError):
    """A service returned one token twice, or more than 1,000 pages."""


class PageTokens:
    """The tokens of one listing. Each stands for its next page."""

    def __init__(self) -> None:
        self._seen: set[str] = set()

    def follow(self, token: object) -> None:
        """Note the token of the next page.

        Raises:
            EndlessListingError: it came before, or this listing has had 1,000 pages.
        """
        text = str(token)
        if text in self._seen:
            message = f"the listing has no end, because the token {text[:100]!r} came twice; check the endpoint"
            raise EndlessListingError(message)
        self._seen.add(text)
        if len(self._seen) >= MAX_PAGES:
            message = f"the listing has more than {MAX_PAGES} pages, the most that are read; check the endpoint"
            raise EndlessListingError(message)
