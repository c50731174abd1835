"""POST /v1/streams/{stream}/records.

`RecordsRoute.answer` handles a request in one method, in this order: authenticate, decode, admit, acknowledge. Until
the records are put nothing has happened. After that, nothing that the client does can undo it.
"""

import contextlib
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Final, NamedTuple

import msgspec

from kpl_core import Deliveries, InvalidUserRecord
from kpl_core.records.user_record import require_stream
from kpl_integrations.asgi.protocol import Receive, Scope
from kpl_integrations.ingest.admission.acknowledgement import (
    Acknowledged,
    RejectedRecord,
    all_delivered,
    answer_delivered,
    answer_queued,
    answer_spooled,
    delivered_answer,
    record_answers,
)
from kpl_integrations.ingest.admission.admission import Admission
from kpl_integrations.ingest.admission.idempotency import StoredAnswer, begin_fingerprint, parse_key
from kpl_integrations.ingest.admission.refusals import Refusal, Refused, refused_decoding
from kpl_integrations.ingest.admission.senders import AddressBudget, SenderRoom
from kpl_integrations.ingest.admission.tenant_account import TenantAccount
from kpl_integrations.ingest.decoding import (
    Decoded,
    DecodeRefusal,
    decode,
    decode_in_steps,
    decode_plain,
    decode_singles,
    pieces_of,
)
from kpl_integrations.ingest.http.bodies import read_body, require_length, require_size
from kpl_integrations.ingest.http.large_bodies import small_body
from kpl_integrations.ingest.http.request_head import (
    FORWARDED_FOR,
    FieldsByName,
    RecordsHead,
    header_fields,
    records_head,
)
from kpl_integrations.ingest.open_gateway import OpenGateway, client_of
from kpl_integrations.ingest.tenants import Ack

PREFIX: Final = "/v1/streams/"
SUFFIX: Final = "/records"
# The first problems are enough to find the mistake. The answer must not be larger than the request.
_MOST_PROBLEMS: Final = 100
_NO_HEADERS: Final[Mapping[str, str]] = {}
# The fields that change the records of a body, besides the attributes of a CloudEvent.
_DECODING_FIELDS: Final = frozenset({b"content-type", b"content-encoding", b"x-partition-key", b"x-explicit-hash-key"})


class PutRequest(NamedTuple):
    """A request whose records are put, and that is answered when all of them have their results."""

    deliveries: Deliveries
    decoded: Decoded
    account: TenantAccount
    payer: AddressBudget | None
    received_bytes: int
    admission: Admission

    def answer(self, now: float) -> Acknowledged:
        """Return the answer, because the results are known; raises as `RecordsRoute.answer`."""
        problems = self.decoded.problems
        if not problems and (answer := all_delivered(self.deliveries)) is not None:
            return answer
        results = self.deliveries.known_results()
        assert results is not None  # noqa: S101 - the caller has waited
        try:
            positions = self.decoded.positions() if problems else ()
            return delivered_answer(results, record_answers(results), problems, positions)
        except Refused as refused:
            decoded = self.decoded
            self.admission.give_back(self.account, decoded.pairs or decoded.records, self.deliveries, decoded.counts)
            self.account.count_refused(refused, self.received_bytes, now, self.payer)
            raise


class RecordsRoute:
    """Accept records for one stream. All requests share this object."""

    def __init__(self, gateway: OpenGateway) -> None:
        self._gateway = gateway
        self._settings = gateway.settings
        self._limits = gateway.settings.decode_limits()
        self._streams = gateway.streams
        self._admission = gateway.admission

    async def answer(self, scope: Scope, receive: Receive, stream: str) -> tuple[Acknowledged, TenantAccount]:
        """Put the request's records. Return the answer and the tenant's account.

        Raises:
            Refused: the request is rejected, or none of its records was delivered.
            ClientGone: the client disconnected.
        """
        settings = self._settings
        self._admission.require_open()
        headers: FieldsByName = header_fields(scope["headers"])
        account = self._gateway.account_of(scope, headers)
        payer = self._gateway.payer_of(account, client_of(scope))
        account.requests += 1
        received_bytes = 0
        try:
            account.require_readable(self._admission.now(), payer)
            query: bytes = scope["query_string"]
            head = records_head(stream, query, headers)
            ack: Ack = head.options.ack or account.tenant.default_ack
            if ack == "spooled" and settings.spool is None:
                raise _no_spool()
            if stream not in self._streams.known or not account.tenant.allows(stream):
                stream = await self._require_stream(account, stream)
            most = settings.max_body_bytes
            require_length(headers.get(b"content-length"), most, expect=headers.get(b"expect"))
            room = self._gateway.room_of(account, scope)
            body = await read_body(scope, receive, most_bytes=most, seconds=settings.body_seconds, room=room)
            received_bytes = len(body)
            key_header = headers.get(b"idempotency-key")
            answering = partial(self._put_and_wait, head, body, ack, account, stream, room)
            if key_header is not None:
                key = parse_key(key_header)
                hashed = begin_fingerprint(stream.encode(), query, ack.encode(), *_decoding_fields(headers))
                await self._gateway.large_bodies.add_to_hash(hashed, body)
                return await self._once(account, key, hashed.digest(), answering), account
            if ack == "queued" and (answer := self._queue(head, body, account, stream)) is not None:
                return answer, account
            # A body with ack=queued that was not put at once is large.
            return await answering(is_large=ack == "queued"), account
        except Refused as refused:
            account.count_refused(refused, received_bytes, self._admission.now(), payer)
            raise

    def answer_sync(
        self, head: RecordsHead, body: bytes, client: str
    ) -> tuple[Acknowledged | PutRequest, TenantAccount] | None:
        """Answer a complete request, or put its records. Return None if it may have to wait: then call `answer`.

        Nothing is counted or put before it is clear that the request waits for nothing, or only for its results.

        Raises:
            Refused: as `answer`.
        """
        self._admission.require_open()
        account = self._gateway.account_shown(head.authorization)
        tenant, stream = account.tenant, head.stream
        ack = head.options.ack or tenant.default_ack
        if ack == "spooled":
            return None
        if stream not in self._streams.known or not tenant.allows(stream):
            return None
        payer = self._gateway.payer_of(account, client)
        if payer is not None and FORWARDED_FOR in head.headers:
            # The server finds the address of the client for the application only.
            return None
        account.requests += 1
        received_bytes = 0
        try:
            is_charged = account.refused_bytes is not None if payer is None else len(self._gateway.addresses) > 0
            if is_charged:
                account.require_readable(self._admission.now(), payer)
            received_bytes = len(body)
            require_size(len(body), self._settings.max_body_bytes)
            if ack == "queued":
                answer: Acknowledged | PutRequest | None = self._queue(head, body, account, stream)
            else:
                answer = self._put_small(head, body, account, stream, payer)
            if answer is None:
                account.requests -= 1
                return None
            return answer, account
        except Refused as refused:
            account.count_refused(refused, received_bytes, self._admission.now(), payer)
            raise

    def queue_together(self, head: RecordsHead, bodies: Sequence[bytes]) -> Acknowledged | None:
        """Put the one record of each request, and return the answer to each. None: nothing has happened.

        All requests have the tenant, the stream and the options of `head`. Each then needs `answer_sync`.
        """
        try:
            account = self._gateway.account_shown(head.authorization)
        except Exception:  # noqa: BLE001 - an application's directory may raise anything, again for each request
            return None
        tenant, stream = account.tenant, head.stream
        if (head.options.ack or tenant.default_ack) != "queued" or not account.puts_pairs:
            return None
        if stream not in self._streams.known or not tenant.allows(stream):
            return None
        if self._gateway.is_verified(account):
            refused_bytes = account.refused_bytes
            is_refused = refused_bytes is not None and refused_bytes.wait_seconds(self._admission.now()) > 0.0
        else:
            is_refused = self._gateway.addresses.makes_wait(self._admission.now()) or FORWARDED_FOR in head.headers
        pairs = None if is_refused else decode_singles(bodies, self._limits)
        if pairs is None or not self._admission.put_ordinary_pairs(account, stream, pairs, sum(map(len, bodies))):
            return None
        account.requests += len(bodies)
        return answer_queued(1, ())

    def now(self) -> float:
        """Return the time on the producer's clock."""
        return self._admission.now()

    def _queue(self, head: RecordsHead, body: bytes, account: TenantAccount, stream: str) -> Acknowledged | None:
        """Put the records of a request with ack=queued. Return None if its body is large: nothing has happened."""
        encoding, inflated_bytes = head.headers.get(b"content-encoding"), 0
        is_plain = head.plain_type is not None
        try:
            small = small_body(encoding, body, self._settings.max_inflated_bytes)
            if small is None:
                return None
            inflated_bytes = 0 if encoding is None else len(small)
            if head.plain_type is not None and account.puts_pairs:
                is_plain = False
                pairs = decode_plain(head.plain_type, small, self._limits)
                if pairs is not None:
                    if not self._admission.put_ordinary_pairs(account, stream, pairs, len(small)):
                        self._admission.put_pairs(account, stream, pairs)
                    return answer_queued(len(pairs), ())
        except DecodeRefusal as refusal:
            raise refused_decoding(refusal, inflated_bytes) from None
        except Refused as refused:
            refused.work_bytes = inflated_bytes
            raise
        decoded = self._decoded(head, small, inflated_bytes, is_plain=is_plain)
        deliveries = self._put(decoded, head, account, stream)
        return answer_queued(len(deliveries), decoded.problems)

    def _put_small(
        self, head: RecordsHead, body: bytes, account: TenantAccount, stream: str, payer: AddressBudget | None
    ) -> PutRequest | None:
        """Put the records of a request with ack=delivered. Return None as `_queue`."""
        decoded = self._decoded_small(head, body)
        if decoded is None:
            return None
        deliveries = self._put(decoded, head, account, stream)
        return PutRequest(deliveries, decoded, account, payer, len(body), self._admission)

    async def _once(
        self, account: TenantAccount, key: str, request: bytes, answering: Callable[[], Awaitable[Acknowledged]]
    ) -> Acknowledged:
        """Answer a request with an idempotency key, or return its earlier answer."""
        stored = account.keys.begin(key, request, self._admission.now())
        if stored is not None:
            return Acknowledged(stored.status, stored.body)
        try:
            acknowledged = await answering()
        except BaseException:
            account.keys.forget(key)
            raise
        account.keys.finish(key, StoredAnswer(*acknowledged), self._admission.now())
        return acknowledged

    def _put(
        self, decoded: Decoded, head: RecordsHead, account: TenantAccount, stream: str, *, durable: bool = False
    ) -> Deliveries:
        # Without `_charging`, which would cost a tenth of a request with one record.
        try:
            _require_records(decoded, head)
            if decoded.pairs is not None and account.puts_pairs:
                group = self._admission.begin_group(account, stream, decoded.pairs, durable=durable)
                group.finish()
                return group.deliveries
            records, aggregate = decoded.with_records().records, decoded.counts is None
            return self._admission.put_records(
                account, stream, records, aggregate=aggregate, durable=durable, counts=decoded.counts
            )
        except Refused as refused:
            refused.work_bytes = decoded.inflated_bytes
            raise

    async def _put_and_wait(
        self,
        head: RecordsHead,
        body: bytes,
        ack: Ack,
        account: TenantAccount,
        stream: str,
        room: SenderRoom,
        *,
        is_large: bool = False,
    ) -> Acknowledged:
        """Put the records of a request, wait until `ack` is true, then return the answer.

        `is_large`: it is known that the body is large.
        """
        decoded = None if is_large else self._decoded_small(head, body)
        if decoded is None:
            decoded, deliveries = await self._put_large(head, body, account, stream, room, durable=ack == "spooled")
        else:
            deliveries = self._put(decoded, head, account, stream, durable=ack == "spooled")
        problems = decoded.problems
        if ack == "queued":
            return answer_queued(len(decoded.records or decoded.pairs or ()), problems)
        try:
            if ack == "spooled":
                return await answer_spooled(self._gateway.producer, deliveries, problems)
            return await answer_delivered(deliveries, problems, decoded.positions() if problems else ())
        except Refused:
            self._admission.give_back(account, decoded.pairs or decoded.records, deliveries, decoded.counts)
            raise

    async def _put_large(
        self, head: RecordsHead, body: bytes, account: TenantAccount, stream: str, room: SenderRoom, *, durable: bool
    ) -> tuple[Decoded, Deliveries]:
        """Put the records of a large body, in slices: all or none of them."""
        large, encoding, inflated = self._gateway.large_bodies, head.headers.get(b"content-encoding"), [0]
        async with large.turn(room, len(body)):
            try:
                pieces = pieces_of(encoding, body, self._settings.max_inflated_bytes, inflated)
                content_type, texts = _texts_of(head)
                steps = decode_in_steps(content_type, pieces, limits=self._limits, headers=texts)
                decoded = await large.run(steps)
            except DecodeRefusal as refusal:
                raise refused_decoding(refusal, inflated[0]) from None
            with _charging(inflated[0]):
                _require_records(decoded, head)
                if not account.puts_pairs:
                    decoded = decoded.with_records()
                records, counts = decoded.pairs or decoded.records, decoded.counts
                group = self._admission.begin_group(
                    account, stream, records, aggregate=counts is None, durable=durable, counts=counts
                )
            await large.put(group)
        return decoded, group.deliveries

    async def _require_stream(self, account: TenantAccount, stream: str) -> str:
        """Check name, permission and existence, in this order, and return the canonical name of the stream.

        The check of the name is bounded and linear, so that refusals may repeat the name. A tenant without permission
        does not learn whether the stream exists.
        """
        try:
            require_stream(stream)
        except InvalidUserRecord:
            detail = (
                "this is not a stream name; send 1 to 128 ASCII letters, digits, underscores, dots and hyphens, or an "
                "ARN"
            )
            raise Refused(Refusal.UNKNOWN_STREAM, detail) from None
        name = await self._streams.admit(stream, account.tenant.allows, tenant=account.tenant.id)
        if name is None:
            detail = f"tenant {account.tenant.id} may not write to stream {stream}"
            raise Refused(Refusal.FORBIDDEN, detail)
        return name

    def _decoded_small(self, head: RecordsHead, body: bytes) -> Decoded | None:
        """Decompress and decode a body; None if it is large."""
        encoding = head.headers.get(b"content-encoding")
        try:
            small = small_body(encoding, body, self._settings.max_inflated_bytes)
        except DecodeRefusal as refusal:
            raise refused_decoding(refusal) from None
        return None if small is None else self._decoded(head, small, 0 if encoding is None else len(small))

    def _decoded(self, head: RecordsHead, body: bytes, inflated_bytes: int = 0, *, is_plain: bool = True) -> Decoded:
        """Decode a small body, which is decompressed. `is_plain`: its records may be in an ordinary form."""
        try:
            if is_plain and head.plain_type is not None:
                is_plain = False
                pairs = decode_plain(head.plain_type, body, self._limits)
                if pairs is not None:
                    return Decoded([], [], inflated_bytes=inflated_bytes, pairs=pairs)
            content_type, texts = _texts_of(head)
            decoded = decode(content_type, body, limits=self._limits, headers=texts, is_plain=is_plain)
        except DecodeRefusal as refusal:
            raise refused_decoding(refusal, inflated_bytes) from None
        return msgspec.structs.replace(decoded, inflated_bytes=inflated_bytes) if inflated_bytes else decoded


def _texts_of(head: RecordsHead) -> tuple[str, Mapping[str, str]]:
    """Return the content type, and the header fields as texts unless no other field determines the format."""
    if head.plain_type is not None:
        return head.plain_type, _NO_HEADERS
    texts = {name.decode("latin-1"): value.decode("latin-1") for name, value in head.headers.items()}
    return texts.get("content-type", ""), texts


@contextlib.contextmanager
def _charging(inflated_bytes: int) -> Iterator[None]:
    """Charge the decompressed bytes of a request that is refused in the block."""
    try:
        yield
    except Refused as refused:
        refused.work_bytes = inflated_bytes
        raise


def _require_records(decoded: Decoded, head: RecordsHead) -> None:
    """Refuse a request because of its invalid records, unless it may be accepted in part."""
    if decoded.problems and not (head.options.partial and decoded.records):
        raise _bad_records(decoded)


def _decoding_fields(headers: FieldsByName) -> Iterable[bytes]:
    """Return names and values of the fields that change the records of a body."""
    for name in sorted(headers):
        if name in _DECODING_FIELDS or name.startswith(b"ce-"):
            yield name
            yield headers[name]


def _no_spool() -> Refused:
    detail = "ack=spooled needs a spool, and this gateway has none; ask for queued or delivered"
    return Refused(Refusal.BAD_PARAMETER, detail, extensions={"field": "ack"})


def _bad_records(decoded: Decoded) -> Refused:
    problems = decoded.problems
    total = len(decoded.records) + len({problem.index for problem in problems})
    first = problems[0]
    detail = (
        f"{len(problems):,} of {total:,} records are invalid, so none was accepted; the first is "
        f"records[{first.index}]: {first.detail}"
    )
    errors = [RejectedRecord(each.index, each.field, each.detail) for each in problems[:_MOST_PROBLEMS]]
    return Refused(Refusal.BAD_RECORDS, detail, extensions={"errors": errors, "error_count": len(problems)})
