"""Signs requests as botocore's `SigV4Auth` does, at a tenth of its cost.

Two requests of one operation differ only in time, body hash, body length and signature. botocore signs the first
request of each day. From its canonical request and header fields a template is made for the others, which then need
two hashes and one HMAC. A template is used only if it gives the head that botocore gave, and if nothing in it but the
body's hash depends on the body. Otherwise botocore signs every request.
"""

import re
import time
from functools import lru_cache
from hashlib import sha256
from hmac import digest
from typing import Any, Final, NamedTuple
from urllib.parse import SplitResult

from botocore.auth import SigV4Auth
from botocore.awsrequest import AWSRequest

_SERVICE: Final = "kinesis"
_TARGET: Final = "Kinesis_20131202."
_HASH_CHARACTERS: Final = 64
_DAY_CHARACTERS: Final = len("YYYYMMDD")
# A header with one of these would begin another header.
_FORBIDDEN: Final = re.compile("[\\r\\n\\0]")


@lru_cache(maxsize=1)
def _timestamp(second: int) -> str:
    return time.strftime("%Y%m%dT%H%M%SZ", time.gmtime(second))


class _Template(NamedTuple):
    """The parts that the requests of one operation share for a day. Each pair of texts has the time in between."""

    credentials: Any
    day: str
    scope: str
    signing_key: bytes
    canonical: tuple[str, str]
    head: tuple[str, str]

    def __repr__(self) -> str:
        """Return a text without secrets."""
        return f"<_Template of {self.scope}>"

    def signature(self, timestamp: str, body_hash: str) -> str:
        """Return the signature of a request."""
        canonical = sha256(f"{timestamp.join(self.canonical)}{body_hash}".encode()).hexdigest()
        to_sign = f"AWS4-HMAC-SHA256\n{timestamp}\n{self.scope}\n{canonical}"
        return digest(self.signing_key, to_sign.encode(), "sha256").hex()

    def signed_head(self, timestamp: str, body: bytes) -> str:
        """Return request line and header fields."""
        return f"{timestamp.join(self.head)}{self.signature(timestamp, sha256(body).hexdigest())}\r\n"


class RequestSigner:
    """Signs requests to Kinesis in one region."""

    def __init__(self, region: str, user_agent: str) -> None:
        self._region = region
        self._user_agent = user_agent
        self._templates: dict[tuple[SplitResult, str, str], _Template] = {}

    def signed_head(
        self,
        url: SplitResult,
        operation: str,
        content_type: str,
        body: bytes,
        credentials: Any,  # noqa: ANN401
    ) -> str:
        """Return the request line and the header fields of a POST. `credentials` are frozen ones of botocore.

        Raises:
            RuntimeError: a header field would have a line break.
        """
        form = url, operation, content_type
        template = self._templates.get(form)
        timestamp = _timestamp(int(time.time()))
        if template is not None and template.credentials == credentials and timestamp.startswith(template.day):
            return template.signed_head(timestamp, body)
        auth = SigV4Auth(credentials, _SERVICE, self._region)
        request = self._signed_request(auth, url, operation, content_type, body)
        head = f"POST {url.path or '/'} HTTP/1.1\r\n" + "".join(
            [f"{name}: {value}\r\n" for name, value in request.headers.items()]
        )
        learned = _learned(auth, request, head, body)
        if learned is not None:
            self._templates[form] = learned
        return head

    def _signed_request(
        self, auth: SigV4Auth, url: SplitResult, operation: str, content_type: str, body: bytes
    ) -> AWSRequest:
        host = url.netloc.rpartition("@")[2].removesuffix(":443" if url.scheme == "https" else ":80")
        headers = {
            "Host": host,
            "X-Amz-Target": _TARGET + operation,
            "Content-Type": content_type,
            "User-Agent": self._user_agent,
        }
        request = AWSRequest("POST", f"{url.scheme}://{host}{url.path or '/'}", headers, body)
        auth.add_auth(request)
        for name, value in request.headers.items():
            if _FORBIDDEN.search(value):
                message = f"the header {name} has a line break; check the credentials for one, for example at the end"
                raise RuntimeError(message)
        return request


def _learned(auth: SigV4Auth, request: AWSRequest, head: str, body: bytes) -> _Template | None:
    """Return the template of a signed request, or None if it does not give what botocore gave."""
    timestamp = request.context["timestamp"]
    # botocore's canonical request has every header field of the request.
    del request.headers["Authorization"]
    canonical = auth.canonical_request(request)
    scope = auth.credential_scope(request)
    key = f"AWS4{auth.credentials.secret_key}".encode()
    for part in scope.split("/"):
        key = digest(key, part.encode(), "sha256")
    template = _Template(
        auth.credentials,
        timestamp[:_DAY_CHARACTERS],
        scope,
        key,
        _around(timestamp, canonical[:-_HASH_CHARACTERS]),
        _around(timestamp, head[: -_HASH_CHARACTERS - 2]),
    )
    # Each part that depends on the body must be one that the template computes each time.
    body_hash = sha256(body).hexdigest()
    has_one_hash = canonical.endswith(f"\n{body_hash}") and (canonical + head).count(body_hash) == 1
    return template if has_one_hash and template.signed_head(timestamp, body) == head else None


def _around(timestamp: str, text: str) -> tuple[str, str]:
    before, _, after = text.partition(timestamp)
    return before, after
