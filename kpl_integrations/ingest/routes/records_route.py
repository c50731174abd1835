"""POST /v1/streams/{stream}/records: the fast path.

Everything a request needs stands in one method, read downwards: who, what, decode, admit, acknowledge. Until
`Intake.take` nothing has happened; after it nothing the client does can undo it.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from kpl_core import Delivery, InvalidUserRecord, Producer
from kpl_core.records.user_record import require_stream
from kpl_integrations.asgi.protocol import Receive, Scope
from kpl_integrations.ingest.admission.account import TenantAccount, TenantAccounts
from kpl_integrations.ingest.admission.acknowledgement import (
    Acknowledged,
    answer_delivered,
    answer_queued,
    answer_spooled,
)
from kpl_integrations.ingest.admission.admission import Refusal, Refused
from kpl_integrations.ingest.admission.idempotency import StoredAnswer, fingerprint, parse_key
from kpl_integrations.ingest.admission.intake import Intake
from kpl_integrations.ingest.decoding import Decoded, DecodeRefusal, decode, decode_plain, inflate
from kpl_integrations.ingest.http.body import first_body, read_body, require_length, require_size
from kpl_integrations.ingest.http.first_step import FirstStep
from kpl_integrations.ingest.http.header_fields import header_fields
from kpl_integrations.ingest.routes.records_head import BODY_ALONE, RecordsHead, records_head
from kpl_integrations.ingest.settings import IngestSettings
from kpl_integrations.ingest.streams.stream_directory import StreamDirectory
from kpl_integrations.ingest.tenants import Ack, TenantDirectory

__all__ = ["PREFIX", "SUFFIX", "RecordsRoute", "account_of", "refused_decoding"]

PREFIX: Final = "/v1/streams/"
SUFFIX: Final = "/records"
# The first problems are enough to find the mistake; an answer may not be larger than its request.
_MOST_PROBLEMS: Final = 100
_STATUS: Final = {
    400: Refusal.MALFORMED,
    413: Refusal.TOO_LARGE,
    415: Refusal.UNSUPPORTED,
}
_NO_HEADERS: Final[Mapping[str, str]] = {}
_DECIDING: Final = frozenset({b"content-type", b"content-encoding", b"x-partition-key", b"x-explicit-hash-key"})

Headers = Mapping[bytes, bytes]


class RecordsRoute:
    """Takes records for one stream; shared by all requests."""

    def __init__(
        self,
        settings: IngestSettings,
        producer: Producer,
        directory: TenantDirectory,
        accounts: TenantAccounts,
        streams: StreamDirectory,
        intake: Intake,
    ) -> None:
        self._settings = settings
        self._limits = settings.decode_limits()
        self._producer = producer
        self._directory = directory
        self._accounts = accounts
        self._streams = streams
        self._intake = intake
        # Whether the server's `receive` may be started outside the timer around it (see `first_step`).
        self.starts_receive = False

    async def answer(self, scope: Scope, receive: Receive, stream: str) -> tuple[Acknowledged, TenantAccount]:
        """Take the request's records; return the answer, and whose request it was.

        Raises:
            Refused: they were not taken, or none of them was delivered.
            ClientGone: there is nobody to answer.
        """
        settings = self._settings
        self._intake.require_open()
        headers: Headers = header_fields(scope["headers"])
        account = account_of(headers, self._directory, self._accounts)
        account.requests += 1
        try:
            query: bytes = scope["query_string"]
            head = records_head(stream, query, headers)
            ack: Ack = head.options.ack or account.tenant.default_ack
            if ack == "spooled" and settings.spool is None:
                raise _no_spool()
            if stream not in self._streams.known or not account.tenant.allows(stream):
                stream = await self._require_stream(account, stream)
            require_length(headers.get(b"content-length"), settings.max_body_bytes)
            first = FirstStep(receive()) if self.starts_receive else None
            body = None if first is None else first_body(first, most_bytes=settings.max_body_bytes)
            if body is None:
                most, seconds = settings.max_body_bytes, settings.body_seconds
                body = await read_body(receive, most_bytes=most, seconds=seconds, first=first, room=self._intake.bodies)
            key_header = headers.get(b"idempotency-key")
            if key_header is not None:
                parts = (stream.encode(), query, ack.encode(), *_deciding(headers), body)
                key, request = parse_key(key_header), fingerprint(*parts)
                return await self._once(key, request, head, body, ack, account, stream), account
            if ack == "queued":
                return self._queue(head, body, account, stream), account
            decoded = self._decoded(headers, body)
            deliveries = self._put(decoded, head, account, stream)
            return await self._acknowledge(ack, deliveries, decoded), account
        except Refused as refused:
            account.refused[refused.refusal] += 1
            raise

    def answer_at_once(self, head: RecordsHead, body: bytes) -> tuple[Acknowledged, TenantAccount] | None:
        """Answer a request that is here whole and waits for nothing; None: it may have to wait, so `answer` it.

        Until it is clear that nothing is to be waited for, nothing is counted or taken.

        Raises:
            Refused: as `answer`.
        """
        self._intake.require_open()
        account = account_shown(head.authorization, self._directory, self._accounts)
        tenant, stream = account.tenant, head.stream
        if (head.options.ack or tenant.default_ack) != "queued":
            return None
        if stream not in self._streams.known or not tenant.allows(stream):
            return None
        account.requests += 1
        try:
            require_size(len(body), self._settings.max_body_bytes)
            return self._queue(head, body, account, stream), account
        except Refused as refused:
            account.refused[refused.refusal] += 1
            raise

    def now(self) -> float:
        """Return the instant, on the producer's clock."""
        return self._intake.now()

    def _queue(self, head: RecordsHead, body: bytes, account: TenantAccount, stream: str) -> Acknowledged:
        """Take the records of a request that waits for no more than that."""
        plain_type = head.plain_type if account.wants_pairs else None
        if plain_type is not None:
            try:
                pairs = decode_plain(plain_type, body, self._limits)
            except DecodeRefusal as refusal:
                raise refused_decoding(refusal) from None
            if pairs is not None:
                self._intake.take_pairs(account, stream, pairs)
                return answer_queued(len(pairs), ())
        decoded = self._decoded(head.headers, body, is_plain=plain_type is None)
        deliveries = self._put(decoded, head, account, stream)
        return answer_queued(len(deliveries), decoded.problems)

    async def _once(
        self,
        key: str,
        request: bytes,
        head: RecordsHead,
        body: bytes,
        ack: Ack,
        account: TenantAccount,
        stream: str,
    ) -> Acknowledged:
        """Take the records of a request with a key, or give the answer that it had before."""
        stored = account.keys.begin(key, request, self._intake.now())
        if stored is not None:
            return Acknowledged(stored.status, stored.body)
        try:
            decoded = self._decoded(head.headers, body)
            deliveries = self._put(decoded, head, account, stream)
            acknowledged = await self._acknowledge(ack, deliveries, decoded)
        except BaseException:
            account.keys.forget(key)
            raise
        account.keys.finish(key, StoredAnswer(*acknowledged), self._intake.now())
        return acknowledged

    def _put(self, decoded: Decoded, head: RecordsHead, account: TenantAccount, stream: str) -> list[Delivery]:
        if decoded.problems and not (head.options.partial and decoded.records):
            raise _bad_records(decoded)
        return self._intake.take(account, stream, decoded.records, aggregate=not decoded.holds_aggregates)

    async def _acknowledge(self, ack: Ack, deliveries: Sequence[Delivery], decoded: Decoded) -> Acknowledged:
        """Wait for what the acknowledgement promises."""
        problems = decoded.problems
        if ack == "queued":
            return answer_queued(len(deliveries), problems)
        if ack == "spooled":
            return await answer_spooled(self._producer, deliveries, problems)
        return await answer_delivered(deliveries, problems, decoded.positions() if problems else ())

    async def _require_stream(self, account: TenantAccount, stream: str) -> str:
        """Check name, permission and existence, in this order: who may not write learns nothing.

        Returns the name under which the gateway knows the stream.
        """
        try:
            require_stream(stream)
        except InvalidUserRecord:
            detail = (
                "no stream has such a name: 1 to 128 ASCII letters, digits, underscores, dots and hyphens, or an ARN"
            )
            raise Refused(Refusal.UNKNOWN_STREAM, detail) from None
        known_as = await self._streams.admit(stream, account.tenant.allows)
        if known_as is None:
            detail = f"tenant {account.tenant.id} may not write to stream {stream}"
            raise Refused(Refusal.FORBIDDEN, detail)
        return known_as

    def _decoded(self, headers: Headers, body: bytes, *, is_plain: bool = True) -> Decoded:
        try:
            encoding = headers.get(b"content-encoding")
            if encoding is not None:
                most = self._settings.max_inflated_bytes
                body = inflate(encoding.decode("latin-1"), body, max_inflated_bytes=most)
            content_type = headers.get(b"content-type", b"").decode("latin-1")
            if content_type in BODY_ALONE and b"ce-specversion" not in headers:
                return decode(content_type, body, limits=self._limits, headers=_NO_HEADERS, is_plain=is_plain)
            texts = {name.decode("latin-1"): value.decode("latin-1") for name, value in headers.items()}
            return decode(content_type, body, limits=self._limits, headers=texts)
        except DecodeRefusal as refusal:
            raise refused_decoding(refusal) from None


def _deciding(headers: Headers) -> Iterable[bytes]:
    """Return names and values of the fields by which two requests with one body hold different records."""
    for name in sorted(headers):
        if name in _DECIDING or name.startswith(b"ce-"):
            yield name
            yield headers[name]


def _no_spool() -> Refused:
    detail = "ack=spooled needs a spool, and this gateway has none; ask for queued or delivered"
    return Refused(Refusal.BAD_PARAMETER, detail, extensions={"field": "ack"})


def account_of(headers: Headers, directory: TenantDirectory, accounts: TenantAccounts) -> TenantAccount:
    """Return the account of whoever sent these header fields.

    Raises:
        Refused: no credentials where there must be some, or wrong ones.
    """
    authorization = headers.get(b"authorization")
    return account_shown(None if authorization is None else authorization.decode("latin-1"), directory, accounts)


def account_shown(authorization: str | None, directory: TenantDirectory, accounts: TenantAccounts) -> TenantAccount:
    """Return the account that an `Authorization` field's value is shown for; raises as `account_of`."""
    tenant = directory.authenticate(authorization)
    if tenant is None:
        if authorization is None:
            detail = "send Authorization: Bearer and the tenant's API key"
            raise Refused(Refusal.NO_CREDENTIALS, detail)
        detail = "these credentials belong to no tenant"
        raise Refused(Refusal.BAD_CREDENTIALS, detail)
    return accounts.of(tenant)


def refused_decoding(refusal: DecodeRefusal) -> Refused:
    """Return a decoder's refusal as the gateway's own."""
    place = {"index": refusal.index, "field": refusal.field}
    return Refused(
        _STATUS[refusal.status],
        refusal.detail,
        code=refusal.code,
        extensions={name: value for name, value in place.items() if value is not None},
    )


def _bad_records(decoded: Decoded) -> Refused:
    problems = decoded.problems
    total = len(decoded.records) + len({problem.index for problem in problems})
    first = problems[0]
    detail = (
        f"{len(problems):,} of {total:,} records cannot be taken, so none was; the first is records[{first.index}]: "
        f"{first.detail}"
    )
    errors = [{"index": each.index, "field": each.field, "detail": each.detail} for each in problems[:_MOST_PROBLEMS]]
    return Refused(Refusal.BAD_RECORDS, detail, extensions={"errors": errors, "error_count": len(problems)})
