"""POST /: the Kinesis API. An AWS SDK or agent gets aggregation and fairness by changing only its endpoint.

PutRecord and PutRecords always wait for delivery: they answer sequence number and shard of the Kinesis record that
contains the user record. A record with an error is not kept, even with a spool: every client sends it again, and this
API cannot express "not delivered, but safe". Throttled records are answered like those of a busy shard of Kinesis,
one by one, because every client retries those.
"""

import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from hashlib import sha256
from http import HTTPStatus
from types import MappingProxyType
from typing import Final, NamedTuple, cast

import msgspec

from kpl_core import Deliveries, RecordResult, UserRecord
from kpl_core.options.kinesis_limits import MAX_HASH_KEY, MIB
from kpl_core.records.record_result import BREAKER_OPEN, EXPIRED, RATE_LIMITED
from kpl_integrations.asgi.protocol import Receive, Scope, Send, retry_after_header
from kpl_integrations.ingest.admission.admission import Counts
from kpl_integrations.ingest.admission.refusals import Refusal, Refused
from kpl_integrations.ingest.admission.senders import AddressBudget
from kpl_integrations.ingest.admission.tenant_account import TenantAccount
from kpl_integrations.ingest.decoding.put_records_body import named_stream, put_records_in_steps
from kpl_integrations.ingest.decoding.record_counts import aggregate_counts, aggregate_counts_in_steps
from kpl_integrations.ingest.http.answers import send_answer
from kpl_integrations.ingest.http.bodies import ClientGone, read_body, require_length
from kpl_integrations.ingest.http.large_bodies import SMALL_BYTES
from kpl_integrations.ingest.http.request_head import header_fields
from kpl_integrations.ingest.open_gateway import OpenGateway, client_of
from kpl_integrations.ingest.streams.upstream import FAILED, FORWARDED, TOO_OFTEN, UNAVAILABLE, Upstream
from kpl_integrations.ingest.tenants import AccessKey, Tenant
from kpl_integrations.kinesis_protocol.requests import (
    INVALID_ARGUMENT,
    UNKNOWN_OPERATION,
    PutRecord,
    PutRecords,
    PutRecordsRequestEntry,
    RequestRefused,
    StreamRequest,
)
from kpl_integrations.kinesis_protocol.sigv4 import (
    REFUSED_CREDENTIALS,
    SignedRequest,
    named_credential,
    require_signature,
)
from kpl_integrations.kinesis_protocol.wire import (
    JSON_CONTENT_TYPE,
    PutResult,
    Wire,
    error_body,
    operation_of,
    present,
    request_of,
    wire_of,
)

THROTTLED: Final = "ProvisionedThroughputExceededException"
_UNKNOWN_KEY: Final = "UnrecognizedClientException"
_INVALID_TOKEN: Final = "The security token included in the request is invalid."  # noqa: S105 - no token
_OPERATIONS: Final = ("PutRecord", "PutRecords", *FORWARDED)
# 10 MiB of data are 13.4 MiB of base64.
_MOST_BODY_BYTES: Final = 16 * MIB
# Retry-After if Kinesis could not be asked: the time that a new connection may take.
_UPSTREAM_RETRY_SECONDS: Final = 1.0
# Between the stream and the token of Kinesis; no stream name or ARN has it.
_TOKEN_SEPARATOR: Final = "|"  # noqa: S105 - no password
# Codes of attempts that Kinesis throttled, and of records that waited for room or rate until they expired.
_THROTTLED_CODES: Final = frozenset({THROTTLED, EXPIRED, RATE_LIMITED, BREAKER_OPEN})


class WireAnswer(NamedTuple):
    """A refusal in the terms of the Kinesis API. `per_record`: PutRecords answers 200 with this code per record."""

    code: str
    status: int = 400
    per_record: bool = False


UNAVAILABLE_ANSWER: Final = WireAnswer(UNAVAILABLE, 503)

WIRE_ANSWERS: Final[Mapping[Refusal, WireAnswer]] = MappingProxyType(
    {
        Refusal.QUOTA: WireAnswer(THROTTLED, per_record=True),
        Refusal.QUEUE_SHARE: WireAnswer(THROTTLED, per_record=True),
        Refusal.CPU_SHARE: UNAVAILABLE_ANSWER,
        Refusal.NO_ROOM: WireAnswer(THROTTLED, per_record=True),
        Refusal.BREAKER_OPEN: UNAVAILABLE_ANSWER,
        Refusal.DRAINING: UNAVAILABLE_ANSWER,
        Refusal.STREAM_UNCERTAIN: UNAVAILABLE_ANSWER,
        Refusal.BAD_CREDENTIALS: WireAnswer(_UNKNOWN_KEY),
        Refusal.FORBIDDEN: WireAnswer("AccessDeniedException"),
        Refusal.UNKNOWN_STREAM: WireAnswer("ResourceNotFoundException"),
        Refusal.TOO_LARGE: WireAnswer("RequestEntityTooLargeException", 413),
        Refusal.SLOW_BODY: WireAnswer("RequestTimeoutException", 408),
        Refusal.BAD_PARAMETER: WireAnswer("SerializationException"),
        Refusal.BAD_RECORDS: WireAnswer("ValidationException"),
    }
)
# Codes with status 400 that no row of the table of refusals has.
WIRE_CODES: Final = REFUSED_CREDENTIALS | {INVALID_ARGUMENT, TOO_OFTEN, UNKNOWN_OPERATION}


class _NotStored(NamedTuple):
    """The result of a record that Kinesis did not store."""

    error_code: str
    error_message: str
    shard_id: str | None = None
    sequence_number: str | None = None


class KinesisWireRoute:
    """The handler of `POST /`."""

    def __init__(self, gateway: OpenGateway) -> None:
        self._gateway = gateway
        self._upstream = Upstream(gateway.transport, gateway.streams.describe_calls)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        wire = wire_of(None)
        retry_after: float | None = None
        try:
            headers = [(name.decode("latin-1"), value.decode("latin-1")) for name, value in scope["headers"]]
            fields = header_fields(scope["headers"])
            by_name = {name.decode("latin-1"): value.decode("latin-1") for name, value in fields.items()}
            wire = wire_of(by_name.get("content-type"))
            status, body = 200, await self._answer(scope, receive, wire, headers, by_name)
        except RequestRefused as refused:
            if refused.code in REFUSED_CREDENTIALS:
                self._gateway.tally.refusals[Refusal.BAD_CREDENTIALS] += 1
            status, body = refused.status, error_body(wire, refused.code, refused.message)
            retry_after = _UPSTREAM_RETRY_SECONDS if refused.code == UNAVAILABLE else None
        except Refused as refused:
            self._gateway.tally.refusals[refused.refusal] += 1
            answer = WIRE_ANSWERS.get(refused.refusal, WireAnswer(FAILED, 500))
            status, body = answer.status, error_body(wire, answer.code, refused.detail)
            retry_after = refused.retry_after if answer is UNAVAILABLE_ANSWER else None
        except ClientGone:
            return
        self._gateway.tally.answers[status] += 1
        await _send(send, status, wire.content_type, body, retry_after)

    async def _answer(
        self, scope: Scope, receive: Receive, wire: Wire, headers: list[tuple[str, str]], by_name: Mapping[str, str]
    ) -> bytes:
        gateway = self._gateway
        gateway.admission.require_open()
        account, body = await self._verified(scope, receive, headers, by_name)
        gateway.claim(scope, account)
        payer = gateway.payer_of(account, client_of(scope))
        account.requests += 1
        try:
            account.require_readable(gateway.admission.now(), payer)
            operation = operation_of(by_name.get("x-amz-target"), _OPERATIONS)
            if operation == "PutRecords":
                return await self._put_records(wire, account, scope, body, payer)
            request = request_of(wire, operation, body)
            assert isinstance(request, StreamRequest)  # noqa: S101 - all operations here name a stream
            arguments = {} if isinstance(request, PutRecord) else present(msgspec.to_builtins(request))
            asked = request.stream() or _stream_of_token(arguments)
            stream = await self._require_stream(account, asked, operation) if asked else ""
            if isinstance(request, PutRecord):
                return await self._put_record(wire, account, stream, request)
        except RequestRefused as refused:
            if refused.status < HTTPStatus.INTERNAL_SERVER_ERROR and refused.code != THROTTLED:
                account.charge(len(body), gateway.admission.now(), payer)
            raise
        except Refused as refused:
            account.count_refused(refused, len(body), gateway.admission.now(), payer)
            raise
        answer = dict(await self._upstream.call(operation, arguments, tenant=account.tenant.id))
        if answer.get("NextToken"):
            answer["NextToken"] = f"{asked}{_TOKEN_SEPARATOR}{answer['NextToken']}"
        return wire.encode(answer)

    async def _verified(
        self, scope: Scope, receive: Receive, headers: list[tuple[str, str]], by_name: Mapping[str, str]
    ) -> tuple[TenantAccount, bytes]:
        """Return the tenant and the body of a request, whose signature covers the body.

        Until it is verified, the request uses the room and the budget of its address, never those of the tenant
        whose key id it names.
        """
        gateway, settings, length = self._gateway, self._gateway.settings, by_name.get("content-length")
        # Check the id of the key before the body, so that an unknown client cannot make the gateway read 16 MiB.
        require_signed = self._claimed_key(scope, headers, by_name)
        room = gateway.room_of_address(scope)
        gateway.addresses.require(room.sender, gateway.admission.now())
        # Only PutRecords may have more bytes than are decoded at once.
        is_cut = by_name.get("x-amz-target", "").endswith(".PutRecords")
        most = min(_MOST_BODY_BYTES if is_cut else settings.decode_limits().max_uncut_bytes, settings.max_body_bytes)
        require_length(None if length is None else length.encode("latin-1"), most)
        body = b""
        try:
            body = await read_body(scope, receive, most_bytes=most, seconds=settings.body_seconds, room=room)
            hashed = sha256()
            await gateway.large_bodies.add_to_hash(hashed, body)
            return gateway.accounts.of(require_signed(hashed.hexdigest())), body
        except (Refused, RequestRefused) as refused:
            work_bytes = len(body) + getattr(refused, "work_bytes", 0)
            gateway.addresses.charge(room.sender, work_bytes, gateway.admission.now())
            raise

    def _claimed_key(
        self, scope: Scope, headers: list[tuple[str, str]], by_name: Mapping[str, str]
    ) -> Callable[[str], Tenant]:
        """Return a function that checks the signature with the hash of the body and returns the tenant."""
        directory = self._gateway.directory
        authorization = by_name.get("authorization")
        unknown = directory.unknown
        if unknown is not None and (authorization is None or not directory.verifies):
            return lambda _: unknown
        credential = named_credential(authorization)
        claimed = directory.access_key(credential.access_key_id)
        if claimed is None:
            raise RequestRefused(_UNKNOWN_KEY, _INVALID_TOKEN)
        raw_path: bytes = scope.get("raw_path") or scope["path"].encode()
        query: bytes = scope["query_string"]
        key: AccessKey = claimed

        def require_signed(body_hash: str) -> Tenant:
            path = raw_path.decode("latin-1").partition("?")[0]
            request = SignedRequest(scope["method"], path, query.decode("latin-1"), headers, b"", body_hash)
            return require_signature(request, credential, lambda _: key, now=time.time()).tenant

        return require_signed

    async def _require_stream(self, account: TenantAccount, stream: str, operation: str) -> str:
        """Return the canonical name of the stream."""
        if self._is_known(account, stream):
            return stream
        name = await self._gateway.streams.admit(stream, account.tenant.allows, tenant=account.tenant.id)
        if name is None:
            detail = f"tenant {account.tenant.id} is not authorized to perform: kinesis:{operation} on stream {stream}"
            raise Refused(Refusal.FORBIDDEN, detail)
        return name

    def _is_known(self, account: TenantAccount, stream: str) -> bool:
        return stream in self._gateway.streams.known and account.tenant.allows(stream)

    async def _put(
        self,
        account: TenantAccount,
        stream: str,
        entries: Sequence[PutRecord | PutRecordsRequestEntry],
        *,
        in_slices: bool = False,
    ) -> tuple[Sequence[UserRecord], Deliveries, Counts]:
        for entry in entries:
            if entry.explicit_hash_key is not None:
                _require_hash_key(entry.explicit_hash_key)
        records = [
            UserRecord(entry.partition_key or "", entry.data or b"", entry.explicit_hash_key) for entry in entries
        ]
        admission, large = self._gateway.admission, self._gateway.large_bodies
        if not in_slices:
            counts = aggregate_counts(records)
            deliveries = admission.put_records(
                account, stream, records, aggregate=counts is None, keep=False, counts=counts
            )
            return records, deliveries, counts
        counts = await large.run(aggregate_counts_in_steps(records))
        group = admission.begin_group(account, stream, records, aggregate=counts is None, keep=False, counts=counts)
        await large.put(group)
        return records, group.deliveries, counts

    async def _results(
        self, account: TenantAccount, records: Sequence[UserRecord], deliveries: Deliveries, counts: Counts
    ) -> list[PutResult]:
        """Return the result of each record. A request of which nothing was stored costs no rate."""
        results = [_put_result(delivery.peek() or await delivery) for delivery in deliveries]
        if all(result.error_code is not None for result in results):
            self._gateway.admission.give_back(account, records, deliveries, counts)
        return results

    async def _put_records(
        self, wire: Wire, account: TenantAccount, scope: Scope, body: bytes, payer: AddressBudget | None
    ) -> bytes:
        gateway, large, room = self._gateway, self._gateway.large_bodies, self._gateway.room_of(account, scope)
        is_large = len(body) > SMALL_BYTES
        is_cut = is_large and wire.content_type == JSON_CONTENT_TYPE
        entries: Sequence[PutRecordsRequestEntry] = ()
        put: tuple[Sequence[UserRecord], Deliveries, Counts] = ((), Deliveries(0), None)
        # Kinesis is asked for a stream without a turn, so that a slow answer does not stop other large bodies.
        asked = named_stream(body) if is_cut else ""
        stream = await self._require_stream(account, asked, "PutRecords") if asked else ""
        try:
            async with large.turn(room, len(body)) if is_large else nullcontext():
                if is_cut:
                    most = gateway.settings.decode_limits().max_uncut_bytes
                    request = await large.run(put_records_in_steps(body, most))
                else:
                    request = cast("PutRecords", request_of(wire, "PutRecords", body))
                entries = request.records or ()
                if request.stream() != asked:
                    asked = request.stream()
                    stream = asked if self._is_known(account, asked) else ""
                if stream:
                    put = await self._put(account, stream, entries, in_slices=is_large)
            if not stream:
                stream = await self._require_stream(account, asked, "PutRecords")
                async with large.turn(room, len(body)) if is_large else nullcontext():
                    put = await self._put(account, stream, entries, in_slices=is_large)
        except Refused as refused:
            answer = WIRE_ANSWERS.get(refused.refusal)
            if answer is None or not answer.per_record or not entries:
                raise
            account.count_refused(refused, len(body), gateway.admission.now(), payer)
            gateway.tally.refusals[refused.refusal] += 1
            return wire.encode_put_results([_NotStored(answer.code, refused.detail)] * len(entries))
        return wire.encode_put_results(await self._results(account, *put))

    async def _put_record(self, wire: Wire, account: TenantAccount, stream: str, request: PutRecord) -> bytes:
        (result,) = await self._results(account, *await self._put(account, stream, [request]))
        if result.error_code is not None:
            status = 400 if result.error_code == THROTTLED else 500
            raise RequestRefused(result.error_code, result.error_message or "", status=status)
        return wire.encode({"ShardId": result.shard_id, "SequenceNumber": result.sequence_number})


def _stream_of_token(arguments: dict[str, object]) -> str:
    """Return the stream of a token of ListShards, and put Kinesis' own token into `arguments`.

    A token stands for a stream. Clients get it together with the stream, so that the tenant's permission is checked.
    """
    token = arguments.get("NextToken")
    if token is None:
        return ""
    stream, separator, arguments["NextToken"] = str(token).partition(_TOKEN_SEPARATOR)
    if not (separator and stream and arguments["NextToken"]):
        raise RequestRefused(INVALID_ARGUMENT, "NextToken is not one that this gateway returned.")
    return stream


def _require_hash_key(explicit_hash_key: str) -> None:
    if int(explicit_hash_key) > MAX_HASH_KEY:
        message = (
            f"Invalid ExplicitHashKey. ExplicitHashKey must be in the range: [0, 2^128-1]. "
            f"Specified value was {explicit_hash_key}"
        )
        raise RequestRefused(INVALID_ARGUMENT, message)


def _put_result(result: RecordResult) -> PutResult:
    if result.successful:
        return result
    codes = {attempt.error_code for attempt in result.attempts}
    message = f"{result.error_code or FAILED}: {result.error_message or 'the record was not stored'}"
    return _NotStored(THROTTLED if codes & _THROTTLED_CODES else FAILED, message)


async def _send(send: Send, status: int, content_type: str, body: bytes, retry_after: float | None) -> None:
    headers = [
        (b"content-type", content_type.encode()),
        (b"content-length", str(len(body)).encode()),
        (b"x-amzn-requestid", str(uuid.uuid4()).encode()),
    ]
    if retry_after is not None:
        headers.append(retry_after_header(retry_after))
    await send_answer(send, status, headers, body)
