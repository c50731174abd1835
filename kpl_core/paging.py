"""The bound on a listing that a service returns in pages: a faulty endpoint must not keep it going without end."""

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
            message = f"a page has the token {text[:100]!r}, as a page before it; the endpoint repeats its pages"
            raise EndlessListingError(message)
        self._seen.add(text)
        if len(self._seen) >= MAX_PAGES:
            message = f"the listing has more than {MAX_PAGES} pages, which is the most that is read"
            raise EndlessListingError(message)
