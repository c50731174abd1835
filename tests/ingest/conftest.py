"""What several folders of these tests use."""

from collections.abc import Iterator

import pytest

from kpl_integrations.ingest.http import correlation


@pytest.fixture(scope="module")
def same_request_ids() -> Iterator[None]:
    """Give all requests without an id of their own the same one, so that answers can be compared."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(correlation, "getrandbits", lambda _bits: 7)
        yield
