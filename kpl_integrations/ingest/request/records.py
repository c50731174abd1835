"""POST /v1/streams/{stream}/records: records in JSON, NDJSON, CloudEvents or bytes."""

from collections.abc import Iterable, Sequence
from functools import partial
from typing import Final, cast

import msgspec

from kpl_core import Deliveries, InvalidUserRecord
from kpl_core.producer.delivery import each_alone
from kpl_core.records.user_record import require_stream
from kpl_integrations.ingest.admission.idempotency import StoredAnswer, begin_fingerprint, parse_key
from kpl_integrations.ingest.admission.refusals import Refusal, Refused, rate_limit_headers, refused_decoding
from kpl_integrations.ingest.decoding import (
    Decoded,
    DecodeLimits,
    DecodeRefusal,
    decode,
    decode_in_steps,
    decode_plain,
    decode_singles,
    small_body,
    trace_members,
)
from kpl_integrations.ingest.http.answers import (
    JSON,
    Answer,
    RejectedRecord,
    all_delivered,
    answer_queued,
    delivered_answer,
    problem_of,
    record_answers,
    record_answers_in_steps,
)
from kpl_integrations.ingest.http.request_head import PREFIX, SUFFIX, FieldsByName, RecordsHead, Server, options_of
from kpl_integrations.ingest.open_gateway import OpenGateway
from kpl_integrations.ingest.request.needs import LargeBody, Results, Slices, Steps, StreamName
from kpl_integrations.ingest.request.request import (
    Request,
    add_to_hash,
    body,
    cpu_share,
    credentials,
    length,
    open_gateway,
    refused_bytes,
    repeated_fields,
    require_spool,
    stored,
)
from kpl_integrations.ingest.tenants import Ack

# The first problems are enough to find the mistake. The answer must not be larger than the request.
_MOST_PROBLEMS: Final = 100
# The results of more records are encoded in slices.
_FEW_RESULTS: Final = 1_000
# A request with one of these is not put together with others.
_APART: Final = frozenset({b"content-encoding", b"idempotency-key"})
# The fields that change the records of a body, besides the attributes of a CloudEvent.
_DECODING_FIELDS: Final = frozenset({b"content-type", b"content-encoding", b"x-partition-key", b"x-explicit-hash-key"})


def options(request: "RecordsRequest") -> None:
    """Check that the query and X-Ack are valid, and the gateway has a spool if they ask for one."""
    chosen = request.head.options or options_of(request.head)
    request.partial = chosen.partial
    request.ack = chosen.ack or request.account.tenant.default_ack
    if request.ack == "spooled":
        require_spool(request.gateway)


def existing_stream(request: "RecordsRequest") -> Steps[None] | None:
    """Check that the stream has a valid name, the tenant may write to it, and it exists."""
    if request.stream in request.gateway.streams.known and request.account.tenant.allows(request.stream):
        return None
    return request.look_up_stream()


class RecordsRequest(Request):
    """A request with this head. It accepts all of its records or none, or those that are valid if it says `partial`."""

    __slots__ = ("ack", "head", "limits", "partial")
    ack: Ack
    partial: bool
    route = PREFIX + "{stream}" + SUFFIX
    who = (open_gateway, repeated_fields, credentials)
    may_it = (cpu_share, refused_bytes, options, existing_stream, length, body)

    def __init__(
        self,
        gateway: OpenGateway,
        limits: DecodeLimits,
        head: RecordsHead,
        client: str,
        body: bytes | None,
        server: Server | None,
    ) -> None:
        super().__init__(gateway, head.headers, head.authorization, client, body, server)
        self.head = head
        self.limits = limits
        self.stream = head.stream
        self.correlation = head.correlation

    def look_up_stream(self) -> Steps[None]:
        """Check name, permission and existence, in this order, and note the canonical name.

        The check of the name is bounded and linear, so that refusals may repeat the name. A tenant without permission
        does not learn whether the stream exists.
        """
        tenant = self.account.tenant
        try:
            require_stream(self.stream)
        except InvalidUserRecord:
            detail = (
                "this is not a stream name; send 1 to 128 ASCII letters, digits, underscores, dots and hyphens, or an "
                "ARN"
            )
            raise Refused(Refusal.UNKNOWN_STREAM, detail) from None
        name = yield StreamName(self.stream, tenant.allows, tenant.id)
        if name is None:
            detail = f"tenant {tenant.id} may not write to stream {self.stream}"
            raise Refused(Refusal.FORBIDDEN, detail)
        self.stream = name

    def accept(self, received: bytes) -> Steps[Answer]:
        """Put the records, and return the answer once it is true; for a repeated key the earlier one."""
        key = self.headers.get(b"idempotency-key")
        return self._put(received) if key is None else self._once(parse_key(key), received)

    def rejection(self, error: Exception) -> Answer:
        """Return a problem document."""
        return problem_of(cast("Refused", error), self.identified())

    def may_be_put_together(self) -> bool:
        """Return True if requests with this head, whose options are known, may be put together with others."""
        return self.ack != "spooled" and self.head.plain_type is not None and not _APART & self.headers.keys()

    def put_together(self, bodies: Sequence[bytes]) -> Answer | list[Steps[Answer]] | None:
        """Put the one record of each body; return the answer to each, or what each does next. None: nothing happened.

        All are requests with the tenant, the stream and the options of this one, which has no body of its own. After
        None each needs a request of its own.
        """
        if not (self._passes() and self.ack != "spooled" and self.account.puts_pairs) or self._must_be_alone():
            return None
        pairs, admission = decode_singles(bodies, self.limits), self.gateway.admission
        if pairs is None:
            return None
        size_bytes = sum(map(len, bodies))
        if self.ack == "delivered":
            deliveries = admission.try_put_for_results(self.account, self.stream, pairs, size_bytes)
            if deliveries is None:
                return None
            self.account.requests += len(bodies)
            put = zip(each_alone(deliveries), bodies, strict=True)
            return [self._answer_to_one(delivery, len(body)) for delivery, body in put]
        if not admission.try_put_pairs(self.account, self.stream, pairs, size_bytes):
            return None
        self.account.requests += len(bodies)
        self.gateway.tally.answers[_ONE_QUEUED.status] += len(bodies)
        return _ONE_QUEUED

    def _must_be_alone(self) -> bool:
        """Return True if what the requests of a group do depends on the id or the trace of each."""
        if self.correlation is None:
            return self.gateway.spans is not None
        # A refusal says the id of its request, and a record its trace.
        is_traced = self.gateway.spans is not None or self.account.tenant.trace_records
        return is_traced or self.ack == "delivered"

    def _answer_to_one(self, delivery: Deliveries, body_bytes: int) -> Steps[Answer]:
        """Wait for the result of a record that was put with others; return the answer, and count it."""
        try:
            answer = yield from self._wait(Decoded([], []), delivery)
        except Refused as error:
            self.received_bytes = body_bytes
            # Each has an id of its own.
            self.request_id = b""
            answer = self._rejected(error)._replace(request_id=self.request_id)
        self.gateway.tally.answers[answer.status] += 1
        return answer

    def _passes(self) -> bool:
        """Return True if the checks accept this request, and others from any address, without waiting."""
        try:
            if any(step(self) is not None for step in _CHECKS_OF_MANY):
                return False
        except Exception:  # noqa: BLE001 - an application's directory may raise anything, again for each request
            return False
        # `refused_bytes` may let one request of many pass.
        if not self.is_verified:
            return not self.gateway.addresses.makes_wait(self.now())
        budget = self.account.refused_bytes
        return budget is None or not budget.wait_seconds(self.now())

    def _once(self, key: str, received: bytes) -> Steps[Answer]:
        parts = self.stream.encode(), self.head.query, self.ack.encode(), *_decoding_fields(self.headers)
        hashed = begin_fingerprint(*parts)
        yield from add_to_hash(hashed, received)
        keys, fingerprint = self.account.keys, hashed.digest()
        earlier = keys.begin(key, fingerprint, self.now())
        if earlier is not None:
            return self._answer(Answer(earlier.status, earlier.body))
        try:
            answer = yield from self._put(received)
        except BaseException:
            keys.forget(key)
            raise
        keys.finish(key, StoredAnswer(answer.status, answer.body), self.now())
        return answer

    def _put(self, received: bytes) -> Steps[Answer]:
        """Decode and put the records of the body, and wait until `ack` is true."""
        is_queued = self.ack == "queued"
        if self.trace is not None and self.account.tenant.trace_records:
            self.limits = msgspec.structs.replace(self.limits, trace_members=trace_members(*self.trace))
        try:
            small = small_body(
                self.headers.get(b"content-encoding"), received, self.gateway.settings.max_inflated_bytes
            )
            if small is None:
                decoded, deliveries = yield LargeBody(self.room(), len(received), self._put_large(received))
            else:
                self.inflated_bytes = 0 if small is received else len(small)
                plain_type, pairs = self.head.plain_type, None
                if plain_type is not None and (pairs := decode_plain(plain_type, small, self.limits)) is not None:
                    if is_queued and self.account.puts_pairs:
                        self.gateway.admission.put_pairs(self.account, self.stream, pairs, len(small))
                        return self._answer(answer_queued(len(pairs), ()))
                    decoded = Decoded([], [], pairs=pairs)
                else:
                    content_type, texts = self.head.content_type, self.head.texts
                    decoded = decode(
                        content_type, small, limits=self.limits, headers=texts, is_plain=plain_type is None
                    )
                decoded, deliveries = yield from self._put_decoded(decoded, in_slices=False)
        except DecodeRefusal as refusal:
            raise refused_decoding(refusal) from None
        if is_queued:
            return self._answer(answer_queued(len(deliveries), decoded.problems))
        return self._answer((yield from self._wait(decoded, deliveries)))

    def _answer(self, answer: Answer) -> Answer:
        """Return an answer with what is left of the tenant's rate, if it has one."""
        quota = self.account.quota
        if quota is None:
            return answer
        return answer._replace(fields=(*JSON, *rate_limit_headers(quota.states(1, 0, self.now()))))

    def _put_large(self, received: bytes) -> Steps[tuple[Decoded, Deliveries]]:
        """Put the records of a large body in slices."""
        content_type, texts = self.head.content_type, self.head.texts
        decoder = partial(decode_in_steps, content_type, limits=self.limits, headers=texts)
        decoded = yield from self.decode_large(received, decoder)
        return (yield from self._put_decoded(decoded, in_slices=True))

    def _put_decoded(self, decoded: Decoded, *, in_slices: bool) -> Steps[tuple[Decoded, Deliveries]]:
        """Put the records: all or none of them. Return them as they were put."""
        self._require_records(decoded)
        if not self.account.puts_pairs:
            decoded = decoded.with_records()
        records, counts, durable = decoded.pairs or decoded.records, decoded.counts, self.ack == "spooled"
        aggregate = counts is None
        deliveries = yield from self.put(
            self.stream, records, in_slices=in_slices, aggregate=aggregate, durable=durable, counts=counts
        )
        return decoded, deliveries

    def _wait(self, decoded: Decoded, deliveries: Deliveries) -> Steps[Answer]:
        """Wait until the records are stored or delivered."""
        try:
            if self.ack == "spooled":
                yield from stored(deliveries)
                return answer_queued(len(deliveries), decoded.problems, "spooled")
            yield Results(deliveries)
            if not decoded.problems and (answer := all_delivered(deliveries)) is not None:
                return answer
            results = deliveries.known_results()
            assert results is not None  # noqa: S101 - the driver has waited
            if len(results) > _FEW_RESULTS:
                answers = yield Slices(record_answers_in_steps(results))
            else:
                answers = record_answers(results)
            return delivered_answer(results, answers, decoded.problems, decoded.positions() if decoded.problems else ())
        except Refused:
            self.gateway.admission.give_back(self.account, decoded.pairs or decoded.records, deliveries, decoded.counts)
            raise

    def _require_records(self, decoded: Decoded) -> None:
        """Refuse the request because of its invalid records, unless it may be accepted in part."""
        if decoded.problems and not (self.partial and decoded.records):
            raise _bad_records(decoded)


_ONE_QUEUED: Final = answer_queued(1, ())
_CHECKS_OF_MANY: Final = [step for step in (*RecordsRequest.who, *RecordsRequest.may_it) if step is not refused_bytes]


def _decoding_fields(headers: FieldsByName) -> Iterable[bytes]:
    """Return names and values of the fields that change the records of a body."""
    for name in sorted(headers):
        if name in _DECODING_FIELDS or name.startswith(b"ce-"):
            yield name
            yield headers[name]


def _bad_records(decoded: Decoded) -> Refused:
    problems = decoded.problems
    total = len(decoded.records) + len({problem.index for problem in problems})
    first = problems[0]
    field = "" if first.field == "$" or first.field in first.detail else f"{first.field}: "
    detail = (
        f"{len(problems):,} of {total:,} records are invalid, so none was accepted; the first is "
        f"records[{first.index}]: {field}{first.detail}"
    )
    errors = [RejectedRecord(each.index, each.field, each.detail) for each in problems[:_MOST_PROBLEMS]]
    return Refused(Refusal.BAD_RECORDS, detail, extensions={"errors": errors, "error_count": len(problems)})
